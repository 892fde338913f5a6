"""`StepResult`: the tokens of a step, as plain numbers. It is ragged: an entry gets no token, one, or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
        ends = np.cumsum(self.counts)[first:].tolist()
        begin = int(self.counts[:first].sum())
        token_ids = self.token_ids.tolist()
        return [token_ids[start:end] for start, end in zip([begin, *ends], ends, strict=False)]


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
