"""`StepResult`: the tokens of a step, as plain numbers. It is ragged: an entry gets no token, one, or several.

Then the attention worker's answers: `SequenceOpened` to an opening, `PlanAccepted` to a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from services.common.errors import TwostrokeError
from services.common.token_logprobs import TokenLogprobs


class Report(Protocol):
    """What only some sequences report of their tokens, besides the tokens."""

    seq_id: int


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTokens:
    """The tokens of each entry of a plan, one after the other: none, one, or several."""

    token_ids: np.ndarray  # int64 [num_tokens]
    counts: np.ndarray  # int64 [num_entries], tokens of each entry

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> RaggedTokens:
        """The columns of the tokens of each entry."""
        rows = list(rows)
        return cls(
            np.array([token_id for row in rows for token_id in row], np.int64), np.array([*map(len, rows)], np.int64)
        )

    def __len__(self) -> int:
        return len(self.counts)

    def of(self, index: int) -> list[int]:
        """The tokens of one entry."""
        first = int(self.counts[:index].sum())
        return self.token_ids[first : first + self.counts.item(index)].tolist()

    def rows(self, first: int = 0) -> list[list[int]]:
        """The tokens of each entry from `first` on."""
        token_ids, places = self.token_ids.tolist(), list(accumulate(self.counts.tolist(), initial=0))
        return [token_ids[start:end] for start, end in pairwise(places[first:])]


NO_ROWS = RaggedTokens.from_rows(())


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens and log-probabilities of a plan's entries.

    An entry with logits gets its accepted drafts (those that the sampler chose too) and the token that the sampler
    chose after them: at least one token, at most `num_logits`.
    """

    token_ids: RaggedTokens  # aligned with the plan's entries; none for entries without logits
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)  # by seq_id, if requested
    # Sequences that end with this step, by seq_id. None: the last token completes their output; else an error, because
    # of which the last token does not count.
    ended: dict[int, TwostrokeError | None] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)  # in the order in which they are sent
    follow_up_s: float = 0.0  # how long what followed the step's sampler took; 0: nothing did


@dataclass(frozen=True, slots=True)
class SequenceOpened:
    """The answer to one `NewSequence`: how much of it the KV cache holds, or why it was refused."""

    seq_id: int
    num_cached_tokens: int = 0  # leading tokens that are cached; fewer than the sequence has
    num_pinned_blocks: int = 0  # blocks that left the free pool
    num_held_blocks: int = 0  # blocks that the sequence holds now, shared ones included
    num_freed_blocks: int = 0  # blocks that the sequence held (left by a dead dense worker) and could not keep
    num_recovered_tokens: int = 0  # of the cached ones, those that it had computed itself for a dead dense worker
    has_extra_rows: bool = True  # whether its extra rows, if there are any, are in the KV cache
    error: str | None = None  # why the sequence was refused; all counts are then 0
    cache_id: int = 0  # which of several attention workers answers; not sent


@dataclass(frozen=True, slots=True)
class PlanAccepted:
    """The worker has accepted a plan; its layers have not run yet. Sent only if the plan opened or closed
    sequences or dropped blocks, or if an entry could not take part.
    """

    step_id: int
    num_freed_blocks: int = 0  # of the sequences that the plan closed, and of dropped blocks
    num_free_blocks: int = 0  # free blocks after the plan, cached prefixes included
    errors: Mapping[int, str] | None = None  # by seq_id: entries that could not take part; their rows are meaningless
    cache_id: int = 0  # which of several attention workers answers; not sent
    is_last: bool = True  # whether no other one will answer this plan; not sent
