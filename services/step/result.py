"""`StepResult`: what a step yields, as plain numbers. Ragged: an entry gets no token, one, or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from index `start` on."""

    seq_id: int
    start: int  # at least 1: nothing precedes the first token
    tokens: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the entries of a plan got.

    An entry with `num_logits` gets the drafts that the sampler would have chosen, too, and the token it chose after
    them: at least one token, at most `num_logits`.
    """

    token_ids: Sequence[Sequence[int]]  # aligned with the plan's entries; empty for those without logits
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)  # by seq_id that wants them
    prompt_logprobs: Sequence[PromptLogprobs] = ()
