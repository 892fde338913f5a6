"""`StepReport`: what the engine thread tells of a step, and what it notes of the step's sequences for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.prompt_logprobs import PromptLogprobs
from services.dense_worker.sequence import Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.step_tokens import StepTokens


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step means to the gateways."""

    step_id: int
    started: list[Sequence]
    outputs: list[SequenceOutput]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # of tokens of the step, by seq_id
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # steps may have them from now on


def note_times(started: Iterable[Sequence], outputs: Iterable[SequenceOutput], begin_s: float, end_s: float) -> None:
    """Keeps with each sequence when its first step began and when its first token was here."""
    for sequence in started:
        sequence.started_s = begin_s
    for output in outputs:
        if output.sequence.first_token_s is None:
            output.sequence.first_token_s = end_s


def take_prompt_logprobs(tokens: StepTokens) -> list[PromptLogprobs]:
    """Of live sequences. What was told to the end is not wanted again when a preempted sequence starts over."""
    taken = [each for each in tokens.prompt_logprobs if each.sequence.status is not SequenceStatus.FINISHED]
    for each in taken:
        if each.start + len(each.tokens) == each.sequence.num_prompt_tokens:
            each.sequence.num_prompt_logprobs = None
    return taken
