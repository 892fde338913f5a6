"""The records of the KV cache about sequences and steps, the results of its calls, and `SequenceRows`: all lengths."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.cache.tiers.tier import MissingBlock
from services.common.errors import TwostrokeError
from services.step import SequenceOpened
from services.step.prompt_span import PromptSpan


@dataclass(frozen=True, slots=True)
class OpenResult(SequenceOpened):
    """The answer for a sequence that was opened, and what else this worker has to know of it."""

    # Blocks whose content must be loaded before the sequence may run, be forked or stay without its dense worker.
    missing: tuple[MissingBlock, ...] = ()
    num_copied_blocks: int = 0  # that came from another attention worker; they are cached ones


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that is ready to run, and the errors of sequences that cannot take part."""

    metadata: StepMetadata
    # By group: (from, to) of each; copied before the layers run and after all earlier steps.
    block_copies: list[list[tuple[int, int]]]
    num_freed_blocks: int  # blocks freed by the sequences that this step closes, and evicted behind windows
    errors: dict[int, TwostrokeError]  # by seq_id; these sequences do not advance, or were not forked


@dataclass(slots=True)
class InFlight:
    """A planned step that may still be running; some of its sequences may have been closed since."""

    rows: np.ndarray  # int64 [num_sequences]
    generations: np.ndarray  # int64 [num_sequences], of the rows then: one that was freed since has another
    lengths: np.ndarray  # int64 [num_sequences], including the step's tokens but not its drafts


@dataclass(slots=True, eq=False)
class CachedSequence:
    """The cache's record of a sequence, in addition to its row."""

    row: int  # in all groups
    root: bytes
    generation: int  # of prefixes, when it was opened first
    token_ids: array[int]  # uint32; all known tokens; may be fewer than the computed ones
    digests: list[bytes]  # of its leading full blocks
    spans: Sequence[PromptSpan]  # of its prompt
    num_found_tokens: int = 0  # when it was opened first
    is_orphan: bool = False  # its dense worker is gone, and nobody has opened it since


NO_SEQUENCE = 0  # row for entries of unknown sequences: empty, all null blocks
_INITIAL_NUM_ROWS = 64


class SequenceRows:
    """One row of numpy arrays per sequence. Rows are reused; the cache adds them here and in all groups when needed.

    The arrays are replaced when rows are added, so read them by name each time.
    """

    def __init__(self) -> None:
        self._free_rows: list[int] = []
        self._counts = np.zeros((4, 0), np.int64)
        self.generations = np.zeros(0, np.int64)  # [num_rows]; another one for each sequence that a row has had

    def __len__(self) -> int:
        return self._counts.shape[1]

    @property
    def num_to_add(self) -> int:
        """Rows to add before the next one can be taken; 0: one is free."""
        return 0 if self._free_rows else max(_INITIAL_NUM_ROWS, len(self))

    def add_rows(self, num_new: int) -> None:
        """Adds empty rows."""
        first = max(NO_SEQUENCE + 1, len(self))
        self._free_rows.extend(reversed(range(first, len(self) + num_new)))
        self._counts = np.pad(self._counts, ((0, 0), (0, num_new)))
        self.generations = np.pad(self.generations, (0, num_new))
        # Views, int64 [num_rows]; num_computed is ahead of num_committed while a step runs.
        self.num_prompt_tokens, self.num_computed, self.num_committed, self.num_hashed_blocks = self._counts

    def take(self) -> int:
        """An empty row. There must be one."""
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Empties a row."""
        self._counts[:, row] = 0
        self.generations[row] += 1
        self._free_rows.append(row)

    def check_integrity(self, used_rows: set[int]) -> None:
        """Counts everything again; raises AssertionError on any disagreement."""
        assert sorted(set(range(1, len(self))) - used_rows) == sorted(self._free_rows)
