"""The parts of an answer, before any wire format: its chunks, the whole completion, and its finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.token_logprobs import LogprobRows
from services.gateway.link.journal_entry import FinishReason
from services.gateway.link.logits import Logits
from services.gateway.text.answer_parts import AnswerParts
from services.gateway.text.deltas import Delta

VALUES_PER_ANSWER = 30  # beside its tokens
MAX_INLINE_VALUES = 1000  # up to this many tokens and log-probabilities the event loop encodes itself


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one answer, in seconds; those before the first token are None if there was none."""

    queue_s: float | None  # until its first step
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
    num_reasoning_tokens: int | None = None  # None: reasoning is not separated
    num_calls: int = 0  # complete calls of tools
    beam_score: float | None = None  # of an answer that a beam search has found


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt, for a request with `echo`, `prompt_logprobs` or `return_context_logits`."""

    token_ids: list[int]
    logprobs: LogprobRows | None  # of all tokens but the first, if requested and computed
    logits: Logits | None = None  # after each token, if requested and computed


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt of an answer is computed; counts are tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int  # cached ones included
    time_s: float  # since its first step


@dataclass(slots=True)  # not frozen: a frozen one takes three times as long to make, and there is one per token
class Chunk:
    """The new part of an answer since its last chunk."""

    index: int  # number of the answer
    text: str  # whole characters; may lag behind `token_ids`
    token_ids: list[int]
    logprobs: LogprobRows | None  # aligned with `token_ids`, if requested
    num_output_tokens: int  # all tokens of the answer so far
    finish: Finish | None  # on the last chunk
    prompt: Prompt | None  # on the first chunk of answer 0, if requested
    logits: Logits | None = None  # of `token_ids`, if requested
    deltas: Sequence[Delta] = ()  # content, reasoning and calls, if they are told apart; `text` is the content
    hidden_states: Logits | None = None  # on the last chunk, if requested: of all tokens but the last one
    progress: Progress | None = None  # if requested and changed


@dataclass(slots=True)
class Completion:
    """One whole answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows = field(default_factory=LogprobRows)
    finish: Finish | None = None
    logits: list[Logits] = field(default_factory=list)  # of `token_ids`, if requested
    hidden_states: Logits | None = None  # of all tokens but the last one, if requested
    parts: AnswerParts | None = None  # content, reasoning and calls, if they are told apart; `text` is the content

    def append(self, chunk: Chunk) -> None:
        """Adds the next chunk of this answer."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if chunk.logprobs:
            self.logprobs.extend(chunk.logprobs)
        self.finish = chunk.finish
        if chunk.logits is not None:
            self.logits.append(chunk.logits)
        self.hidden_states = chunk.hidden_states
        if chunk.deltas:
            self.parts = self.parts or AnswerParts()
            self.parts.add(chunk.deltas)
        if chunk.finish is not None and self.parts is not None:
            self.parts.finish()
            self.text = self.parts.text()


def is_large(pieces: Sequence[Chunk | Completion], prompts: Sequence[Prompt | None]) -> bool:
    """Whether encoding these takes more than a millisecond; then it is done in turns of `HeavyWork`."""
    num_values = sum(len(each.token_ids) for each in pieces) + VALUES_PER_ANSWER * len(pieces)
    if any(each.logits or each.hidden_states for each in pieces):
        return True
    if any(each is not None and each.logits for each in prompts):
        return True
    for logprobs in (*(each.logprobs for each in pieces), *(each.logprobs for each in prompts if each is not None)):
        if logprobs:
            num_values += logprobs.num_values
    return num_values > MAX_INLINE_VALUES
