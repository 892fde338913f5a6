"""`StepPlan`: what a step does, as the scheduler decided. All workers run the same plan.

A plan is made before the result of the step before it is known: it fixes how many tokens a step computes, not which.
Drafts are the exception: nobody knows in advance how many will be accepted, so a sequence with drafts is planned
again only after the result of its step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.sampling_params import SamplingParams
from services.lora.adapter import Adapter


@dataclass(frozen=True, slots=True)
class NewSequence:
    """The constant properties of a sequence and its tokens so far. Sent once, before its first entry."""

    seq_id: int
    request_id: str
    token_ids: tuple[int, ...]  # all tokens so far, prompt first
    num_prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()  # ascending
    num_logprobs: int | None = None  # most likely tokens to report with each sampled token; None: report nothing
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens; if set, all their logits are needed
    cache_salt: str = ""  # only sequences of equal salt share blocks
    traceparent: str = ""  # W3C trace context of the dense worker's span; empty without tracing
    return_context_logits: bool = False  # whether the logits after each prompt token are reported
    return_generation_logits: bool = False  # whether those from which each output token was sampled are
    adapter: Adapter | None = None  # computes all its tokens; only sequences with equal hashes share blocks
    prompt_table_hash: str = ""  # of the vectors for some of its prompt tokens; the same holds for it; empty: none
    # The scheduler chooses its tokens from `num_logprobs` most likely ones (`StepPlan.chosen`), not the sampler.
    has_chosen_tokens: bool = False


class PlanEntry(NamedTuple):
    """One sequence's part of a step: tokens `[position, position + num_tokens)`, drafts last.

    It is a tuple, because a step has hundreds of entries and tuples are fast to make.
    """

    seq_id: int
    position: int  # tokens in the KV cache that stay; the step overwrites the cache from there on
    num_tokens: int  # at least 1
    num_logits: int  # number of last rows that need logits: 0, or 1 more than there are drafts
    draft_token_ids: tuple[int, ...] = ()  # the entry's last tokens: guesses that the step verifies


@dataclass(frozen=True, slots=True)
class Fork:
    """Makes a second sequence with the same first tokens. Both share the full blocks; the last, partial one is copied.
    """

    parent_seq_id: int
    child_seq_id: int
    position: int  # the child has this many of the parent's tokens, which must be known and in the KV cache


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step does: confirm tokens, close and fork sequences, add chosen tokens, run `entries` in batch order."""

    step_id: int  # ascending; 0: no step, only `new_sequences` to open
    entries: tuple[PlanEntry, ...] = ()
    close_seq_ids: tuple[int, ...] = ()
    confirmed: tuple[tuple[int, int], ...] = ()  # (seq_id, token_id) that became known since the last plan, in order
    forks: tuple[Fork, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    # (seq_id, token_id): the next token of a beam, or the last one of the prompt of a forked answer
    chosen: tuple[tuple[int, int], ...] = ()
    lane: int = 0
    drops_blocks: bool = False  # entries drop the blocks that a window has left behind

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def frees_blocks(self) -> bool:
        """Whether the attention worker answers how many blocks became free."""
        return self.drops_blocks or bool(self.close_seq_ids)

    @property
    def has_drafts(self) -> bool:
        return any(entry.draft_token_ids for entry in self.entries)


def positions_of(plan: StepPlan, num_tokens: int) -> np.ndarray:
    """The position of each token of a step in its sequence, int64 [num_tokens]; zero for padding at the end."""
    positions = np.zeros(num_tokens, np.int64)
    end = 0
    for entry in plan.entries:
        start, end = end, end + entry.num_tokens
        positions[start:end] = np.arange(entry.position, entry.position + entry.num_tokens)
    return positions


def spans_of(plans: Iterable[StepPlan]) -> dict[int, range]:
    """The token indexes that these steps compute, by seq_id; each from the first to the last plan's."""
    spans: dict[int, range] = {}
    for entry in (entry for plan in plans for entry in plan.entries):
        span = range(entry.position, entry.position + entry.num_tokens)
        spans[entry.seq_id] = range(spans.get(entry.seq_id, span).start, span.stop)
    return spans
