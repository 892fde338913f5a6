"""`StepReport`: what the engine thread tells of a step, and what it notes of the step's sequences for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.sequence import Sequence, SequenceOutput, SequenceStatus
from services.step import PromptLogprobs


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step means to the gateways."""

    step_id: int
    started: SequenceOf[Sequence] = ()
    outputs: SequenceOf[SequenceOutput] = ()
    logprobs: Mapping[int, SequenceOf[TokenLogprobs]] = field(default_factory=dict)  # of the tokens, by seq_id
    prompt_logprobs: SequenceOf[tuple[Sequence, PromptLogprobs]] = ()
    admitted: SequenceOf[Sequence] = ()  # steps may have them from now on


def note_started(sequences: Iterable[Sequence], begin_s: float) -> list[Sequence]:
    """Those whose first step this is, which began at `begin_s`. One with tokens was submitted again with them."""
    started = [each for each in sequences if each.started_s is None and not each.output_token_ids]
    for sequence in started:
        sequence.started_s = begin_s
    return started


def note_first_tokens(outputs: Iterable[SequenceOutput], end_s: float) -> None:
    """Keeps with each sequence when its first token was here."""
    for output in outputs:
        if output.sequence.first_token_s is None:
            output.sequence.first_token_s = end_s


def note_prompt_logprobs(
    sequences: Iterable[Sequence], found: Iterable[PromptLogprobs]
) -> list[tuple[Sequence, PromptLogprobs]]:
    """Of live ones of a step's sequences. What was told to the end is not wanted again when one starts over."""
    live = {each.seq_id: each for each in sequences if each.status is not SequenceStatus.FINISHED}
    noted = [(live[each.seq_id], each) for each in found if each.seq_id in live]
    for sequence, each in noted:
        if each.start + len(each.tokens) == sequence.num_prompt_tokens:
            sequence.num_prompt_logprobs = None
    return noted
