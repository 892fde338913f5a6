"""`StepPlan`: what a step does, as the scheduler decided. All workers run the same plan.

A plan is made before the result of the step before it is known: it fixes how many tokens a step computes, not which.
Drafts are the exception: nobody knows in advance how many will be accepted, so a sequence with drafts is planned
again only after the result of its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.step.prompt_span import PromptSpan


@dataclass(frozen=True, slots=True)
class NewSequence:
    """What the KV cache must know of a sequence. Sent once, before its first entry."""

    seq_id: int
    request_id: str  # for messages and logs
    token_ids: tuple[int, ...]  # all tokens so far, prompt first
    num_prompt_tokens: int
    prefix_key: bytes = b""  # see `SequenceSpec.prefix_key`
    ignores_prefix_cache: bool = False  # all its tokens are computed, because something is reported about each
    traceparent: str = ""  # W3C trace context of the dense worker's span; empty without tracing
    num_extra_rows: int = 0  # that the KV cache keeps for it besides those of its tokens; named by `prefix_key`
    max_cached_tokens: int | None = None  # no more may count as cached, since another rank has no more; None: any
    cache_id: int = 0  # which of several attention workers opens it; not sent
    leaves_cache_id: int | None = None  # the one that may have its keys and values to copy; not sent
    leaves_address: str = ""  # where that one is, for the one that opens it
    spans: tuple[PromptSpan, ...] = ()  # of its prompt, see `SequenceSpec`
    starts_empty: bool = False  # nothing of it is cached: the same plan may run it, and only a refusal is answered
    prefix_generation: int = 0  # only sequences of equal generations share blocks; they ascend
    part: range | None = None  # the tokens of which this KV cache keeps keys and values; None: all


class PlanEntry(NamedTuple):
    """One sequence's part of a step: tokens `[position, position + num_tokens)`, drafts last."""

    seq_id: int
    position: int  # tokens in the KV cache that stay; the step overwrites the cache from there on
    num_tokens: int  # at least 1
    num_logits: int  # number of last rows that need logits: 0, or 1 more than there are drafts
    draft_token_ids: tuple[int, ...] = ()  # the entry's last tokens, which the step verifies


@dataclass(frozen=True, slots=True, eq=False)
class PlanEntries:
    """The entries of a plan in batch order, a column for each field of `PlanEntry`: a step has hundreds of them.

    Nobody writes to the columns. Iterating makes an object of each entry; code that runs for all rows reads columns.
    """

    seq_ids: np.ndarray  # uint64 [num_entries]
    positions: np.ndarray  # int64 [num_entries]
    num_tokens: np.ndarray  # int64 [num_entries]
    num_logits: np.ndarray  # int64 [num_entries]
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by index of their entry; few have any

    @classmethod
    def of(cls, entries: Iterable[PlanEntry]) -> PlanEntries:
        """The columns of these entries."""
        entries = tuple(entries)
        seq_ids, positions, num_tokens, num_logits, drafts = zip(*entries, strict=True) if entries else ((),) * 5
        return cls(
            np.array(seq_ids, np.uint64),
            *(np.array(column, np.int64) for column in (positions, num_tokens, num_logits)),
            {index: each for index, each in enumerate(drafts) if each},
        )

    def where(self, is_chosen: np.ndarray) -> PlanEntries:
        """Some of the entries, in order. is_chosen: bool [num_entries]"""
        if len(is_chosen) and is_chosen.all():
            return self
        columns = (self.seq_ids, self.positions, self.num_tokens, self.num_logits)
        indexes = {index: own for own, index in enumerate(np.flatnonzero(is_chosen).tolist())} if self.drafts else {}
        drafts = {indexes[index]: each for index, each in self.drafts.items() if index in indexes}
        return PlanEntries(*(column[is_chosen] for column in columns), drafts)

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __getitem__(self, index: int) -> PlanEntry:
        columns = (self.seq_ids, self.positions, self.num_tokens, self.num_logits)
        return PlanEntry(*(column.item(index) for column in columns), self.drafts.get(index % len(self), ()))

    def __iter__(self) -> Iterator[PlanEntry]:
        columns = (self.seq_ids, self.positions, self.num_tokens, self.num_logits)
        rows = enumerate(zip(*(column.tolist() for column in columns), strict=True))
        return (PlanEntry(*row, self.drafts.get(index, ())) for index, row in rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanEntries) and list(self) == list(other)


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Tokens of sequences, in order; a sequence may have several."""

    seq_ids: np.ndarray  # uint64 [num_tokens]
    token_ids: np.ndarray  # int64 [num_tokens]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> TokenColumns:
        """The columns of pairs (seq_id, token_id)."""
        pairs = tuple(pairs)
        seq_ids, token_ids = zip(*pairs, strict=True) if pairs else ((), ())
        return cls(np.array(seq_ids, np.uint64), np.array(token_ids, np.int64))

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.seq_ids.tolist(), self.token_ids.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenColumns) and list(self) == list(other)


NO_ENTRIES = PlanEntries.of(())
NO_TOKENS = TokenColumns.of(())


@dataclass(frozen=True, slots=True)
class Fork:
    """Makes a second sequence with the same first tokens. Both share the full blocks; the last, partial one is copied.
    """

    parent_seq_id: int
    child_seq_id: int
    position: int  # the child has this many of the parent's tokens, which must be known and in the KV cache


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step does: open, add sampled tokens, close, fork, add forced tokens, run `entries` in batch order.

    Openings may be sent ahead, in a plan that has the number of the next step and nothing else.
    """

    step_id: int  # ascending
    entries: PlanEntries = field(default_factory=lambda: NO_ENTRIES)
    close_seq_ids: tuple[int, ...] = ()
    sampled: TokenColumns = field(default_factory=lambda: NO_TOKENS)  # that became known since the last plan
    forks: tuple[Fork, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    # (seq_id, token_id): tokens that no step has sampled for the sequence, which is mostly one that is forked
    forced: tuple[tuple[int, int], ...] = ()
    lane: int = 0
    evicts_blocks: bool = False  # entries drop the blocks that a window has left behind
    # (seq_id, number of rows): before the layers run, a feature of these sequences hands over their extra rows, and the
    # attention worker stores them.
    extra_rows: tuple[tuple[int, int], ...] = ()
    kept_seq_ids: tuple[int, ...] = ()  # closed now or soon, and opened again: a host tier shall have their blocks

    @property
    def num_tokens(self) -> int:
        return int(np.add.reduce(self.entries.num_tokens))

    @property
    def is_step(self) -> bool:
        """Whether anything is done besides opening sequences, which may be sent ahead of the step that follows."""
        return bool(len(self.entries) or self.close_seq_ids)

    @property
    def frees_blocks(self) -> bool:
        """Whether the attention worker answers how many blocks became free."""
        return self.evicts_blocks or bool(self.close_seq_ids)


def positions_of(plan: StepPlan, num_tokens: int) -> np.ndarray:
    """The position of each token of a step in its sequence, int64 [num_tokens]; zero for padding at the end."""
    entries = plan.entries
    starts = np.cumsum(entries.num_tokens) - entries.num_tokens
    used = np.arange(plan.num_tokens) + np.repeat(entries.positions - starts, entries.num_tokens)
    positions = np.zeros(num_tokens, np.int64)
    positions[: len(used)] = used
    return positions


def spans_of(plans: Iterable[StepPlan]) -> dict[int, range]:
    """The token indexes that these steps compute, by seq_id; each from the first to the last plan's."""
    spans: dict[int, range] = {}
    for entry in (entry for plan in plans for entry in plan.entries):
        span = range(entry.position, entry.position + entry.num_tokens)
        spans[entry.seq_id] = range(spans.get(entry.seq_id, span).start, span.stop)
    return spans
