"""The parts of an answer, before any wire format: its chunks, the whole completion, and its finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from services.common.token_logprobs import LogprobRows
from services.gateway.features.installed import PROMPT_LOGPROBS
from services.gateway.features.report import ReportPart
from services.gateway.link.journal_entry import FinishReason, Timings
from services.gateway.text.answer_parts import AnswerParts, ReasoningPart, TextPart
from services.gateway.text.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta, ReasoningDelta

NO_REPORTS: Mapping[str, ReportPart] = MappingProxyType({})
VALUES_PER_ANSWER = 30  # beside its tokens
MAX_INLINE_VALUES = 1000  # up to this many tokens and log-probabilities the event loop encodes itself


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
    """The prompt, for a request with `echo`, or with a report that is shown with it."""

    token_ids: list[int]
    # By feature, if they have all been computed.
    reports: Mapping[str, ReportPart] = field(default_factory=lambda: NO_REPORTS)

    @property
    def logprobs(self) -> LogprobRows | None:
        """Of all tokens but the first; None if they were not asked for, or not computed."""
        return self.reports.get(PROMPT_LOGPROBS.name)  # type: ignore[return-value]


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
    deltas: Sequence[Delta] = ()  # content, reasoning and calls, if they are told apart; `text` is the content
    # By feature: what there is now of those that were asked for.
    reports: Mapping[str, ReportPart] = field(default_factory=lambda: NO_REPORTS)
    num_cached_tokens: int = 0  # of the prompt

    def all_deltas(self) -> Sequence[Delta]:
        """What it adds to the answer; a plain text is content."""
        if self.deltas:
            return self.deltas
        return (ContentDelta(self.text),) if self.text else ()


@dataclass(slots=True)
class Completion:
    """One whole answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows = field(default_factory=LogprobRows)
    finish: Finish | None = None
    reports: dict[str, list[ReportPart]] = field(default_factory=dict)  # by feature: the parts of all chunks
    parts: AnswerParts | None = None  # content, reasoning and calls, if they are told apart; `text` is the content

    def append(self, chunk: Chunk) -> None:
        """Adds the next chunk of this answer."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if chunk.logprobs:
            self.logprobs.extend(chunk.logprobs)
        self.finish = chunk.finish
        for name, part in chunk.reports.items():
            self.reports.setdefault(name, []).append(part)
        if chunk.deltas:
            self.parts = self.parts or AnswerParts()
            self.parts.add(chunk.deltas)
        if chunk.finish is not None and self.parts is not None:
            self.parts.finish()
            self.text = self.parts.text()

    def all_deltas(self) -> Sequence[Delta]:
        """The deltas of the whole answer, as few as possible; a plain text is content."""
        if self.parts is None:
            return (ContentDelta(self.text),) if self.text else ()
        assert self.finish is not None, "the answer is whole"
        deltas: list[Delta] = []
        num_calls = 0
        for part in self.parts.parts:
            if isinstance(part, TextPart):
                deltas.append(ContentDelta(part.text))
            elif isinstance(part, ReasoningPart):
                deltas.append(ReasoningDelta(part.text))
            else:
                is_cut = num_calls >= self.finish.num_calls  # which counts complete calls
                deltas += (
                    CallBegin(num_calls, part.call_id, part.name),
                    CallArguments(num_calls, part.arguments),
                    CallEnd(num_calls, is_cut=is_cut),
                )
                num_calls += 1
        return deltas


def is_large(pieces: Sequence[Chunk | Completion], prompts: Sequence[Prompt | None]) -> bool:
    """Whether encoding these takes more than a millisecond; then it is done in turns of `HeavyWork`."""
    num_values = sum(len(each.token_ids) for each in pieces) + VALUES_PER_ANSWER * len(pieces)
    for each in pieces:
        if each.logprobs:
            num_values += each.logprobs.num_values
        for found in each.reports.values():
            num_values += sum(part.num_values for part in (found if isinstance(found, list) else (found,)))
    for prompt in prompts:
        if prompt is not None:
            num_values += sum(part.num_values for part in prompt.reports.values())
    return num_values > MAX_INLINE_VALUES
