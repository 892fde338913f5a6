"""The description of one step for an attention backend: lengths, positions and slots of its tokens.

Built by `KVCache.plan_step` without torch, read once by `AttentionBackend.begin_step`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The batch of one step. The arrays are new for each step and owned by the reader.

    The rows of qkv are the tokens of sequence 0, then of sequence 1, and so on. A sequence that cannot
    run keeps its rows: they start at position 0 and lie in the null block, whose index is `num_blocks`.

    A sequence may have dropped blocks that no row reads: its first ones, or those behind its sinks. Its table and its
    length then lack them; distances between tokens behind them stay the same. Only `positions` and `rope_lens` count
    all tokens.
    """

    num_tokens: np.ndarray  # int32 [num_seqs], tokens of this step
    context_lens: np.ndarray  # int32 [num_seqs], length including this step's tokens, without dropped ones
    block_tables: np.ndarray  # int32 [num_seqs, max_blocks_used], padded with the null block
    slot_mapping: np.ndarray  # int64 [total_tokens], block * block_size + offset in the block
    positions: np.ndarray  # int32 [total_tokens]
    rope_lens: np.ndarray  # int32 [total_tokens], max(position + 1, prompt length): for length-scaled RoPE
    # The same step for the layers with a window, if these have blocks of their own: other lengths, tables and slots.
    windows: StepMetadata | None = None
    # The positions on the axes of a rotary embedding that has three, int32 [3, total_tokens]; None: `positions` on all.
    rope_positions: np.ndarray | None = None
    # How many tokens after each it sees, too, within a span of the prompt, int32 [total_tokens]; None: none does. They
    # are in the step. Only for models whose attention `sees_spans`.
    num_later: np.ndarray | None = None
    others: tuple[object, ...] = ()  # the same step for layers that keep no blocks, a value of each kind of them: `of`
    num_other_rows: int = 0  # rows of qkv that only one of `others` describes

    @property
    def num_rows(self) -> int:
        """Rows of qkv."""
        return len(self.positions) + self.num_other_rows

    def parts(self, num_groups: int) -> list[StepMetadata]:
        """The step for each group of layers."""
        if num_groups == 1:
            return [self]
        assert self.windows is not None, "the KV cache has two groups"
        return [self, self.windows]

    def with_other(self, other: object) -> StepMetadata:
        """This step with what it is for one more kind of layers."""
        return replace(self, others=(*self.others, other))

    def of(self, kind: type[T]) -> T:
        """What the step is for the layers that read such a value. In a step without sequences, `kind` without any."""
        found = next((each for each in self.others if isinstance(each, kind)), None)
        assert found is not None or not len(self.num_tokens), f"the KV cache has no {kind.__name__}"
        return kind() if found is None else found


def build_step_metadata(
    num_tokens: np.ndarray,  # int64 [num_seqs]
    num_computed_tokens: np.ndarray,  # int64 [num_seqs], 0 for sequences that cannot run
    num_prompt_tokens: np.ndarray,  # int64 [num_seqs]
    block_tables: np.ndarray,  # int32 [num_seqs, >= blocks needed]
    block_size: int,
    num_dropped_tokens: np.ndarray | None = None,  # int64 [num_seqs], of blocks before the tables; None: nothing
    windows: StepMetadata | None = None,
) -> StepMetadata:
    """Expands counts per sequence to positions and slots per token."""
    seq_index = np.arange(len(num_tokens)).repeat(num_tokens)
    first_rows = num_tokens.cumsum() - num_tokens
    positions = np.arange(len(seq_index)) + (num_computed_tokens - first_rows)[seq_index]
    context_lens, places = num_computed_tokens + num_tokens, positions  # without dropped tokens
    if num_dropped_tokens is not None:
        context_lens, places = context_lens - num_dropped_tokens, positions - num_dropped_tokens[seq_index]
    blocks = block_tables[seq_index, places // block_size].astype(np.int64)
    return StepMetadata(
        num_tokens=num_tokens.astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        block_tables=block_tables,
        slot_mapping=blocks * block_size + places % block_size,
        positions=positions.astype(np.int32),
        rope_lens=np.maximum(positions + 1, num_prompt_tokens[seq_index]).astype(np.int32),
        windows=windows,
    )
