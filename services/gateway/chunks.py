"""What leaves of an answer, before any wire format: chunks while it grows, the whole completion, how it finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.token_logprobs import TokenLogprobs
from services.gateway.link.journal_entry import FinishReason

MAX_INLINE_VALUES = 1000  # tokens and log-probabilities that the event loop encodes itself


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one answer, in seconds; those before the first token are None if there was none."""

    queue_s: float | None  # until it first took part in a step
    first_token_s: float | None
    per_token_s: float | None  # mean time from one token to the next; None for fewer than two
    total_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """How and why an answer ended; counts are tokens."""

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    seed: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request that asked to see it again."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # of all tokens but the first, if asked for and computed


@dataclass(slots=True)  # not frozen: that takes three times as long to make, and there is one for every token
class Chunk:
    """What is new since the last chunk of the same answer."""

    index: int  # of the answer
    text: str  # whole characters; may lag behind `token_ids`
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # aligned with `token_ids`, if asked for
    num_output_tokens: int  # of the answer so far, these included
    finish: Finish | None  # on the last chunk, which has the last tokens, too, unless more became known only later
    prompt: Prompt | None  # on the first chunk of answer 0, if asked for


@dataclass(slots=True)
class Completion:
    """One whole answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


def is_large(pieces: Sequence[Chunk | Completion], prompts: Sequence[Prompt | None]) -> bool:
    """Whether these take more than a millisecond to encode: then a thread does it, and the event loop goes on."""
    num_values = sum(len(each.token_ids) for each in pieces)
    for logprobs in (*(each.logprobs for each in pieces), *(each.logprobs for each in prompts if each is not None)):
        if logprobs:
            num_values += len(logprobs) * (1 + len(logprobs[-1].top))
    return num_values > MAX_INLINE_VALUES
