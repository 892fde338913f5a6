"""`StepPlan`: what a step does, as the scheduler decided. Every worker follows the same plan.

Plans are made one step ahead of what is known: they fix lengths, not tokens. A plan with drafts is the exception,
for it does not fix how many of them will be accepted: its sequences are planned again when its result is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """What never changes about a sequence, and its tokens so far. Sent once, before its first entry."""

    seq_id: int
    request_id: str
    token_ids: tuple[int, ...]  # all so far, prompt first
    num_prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()  # ascending
    num_logprobs: int | None = None  # likeliest tokens to report beside each sampled one; None: report nothing
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens, whose logits are all needed then
    cache_salt: str = ""  # only sequences of equal salt share blocks
    traceparent: str = ""  # W3C trace context of the dense worker's span; empty without tracing


class PlanEntry(NamedTuple):
    """One sequence's part in a step: tokens `[position, position + num_tokens)`, drafts last.

    A tuple, because a step has hundreds of them.
    """

    seq_id: int
    position: int  # tokens in the KV cache that stay; whatever it holds beyond them is overwritten
    num_tokens: int  # at least 1
    num_logits: int  # last rows whose logits are needed: 0, or 1 more than there are drafts
    draft_token_ids: tuple[int, ...] = ()  # its last tokens, guesses that the step verifies


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence becomes two, alike so far. Full blocks are shared, the last one is copied."""

    parent_seq_id: int  # all of its tokens are known
    child_seq_id: int
    position: int  # of the parent's tokens in the KV cache, so many are the child's, too


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step does; `entries` are in batch order. Before them: confirm, close, fork."""

    step_id: int  # ascending; 0: no step, only `new_sequences`
    entries: tuple[PlanEntry, ...] = ()
    close_seq_ids: tuple[int, ...] = ()
    confirmed: tuple[tuple[int, int], ...] = ()  # (seq_id, token_id) known since the last plan, in order
    forks: tuple[Fork, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    lane: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def has_drafts(self) -> bool:
        return any(entry.draft_token_ids for entry in self.entries)


def spans_of(plans: Iterable[StepPlan]) -> dict[int, range]:
    """Indexes of the tokens that these steps compute, by seq_id."""
    spans: dict[int, range] = {}
    for entry in (entry for plan in plans for entry in plan.entries):
        span = range(entry.position, entry.position + entry.num_tokens)
        spans[entry.seq_id] = range(spans.get(entry.seq_id, span).start, span.stop)
    return spans
