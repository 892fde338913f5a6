"""`StepReport`: what gateways learn about a step, and what the engine notes in the step's sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.sequence import Sequence, SequenceOutput, SequenceStatus
from services.step import PromptLogprobs


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of a step for the gateways."""

    step_id: int
    started: SequenceOf[Sequence] = ()
    outputs: SequenceOf[SequenceOutput] = ()
    logprobs: Mapping[int, SequenceOf[TokenLogprobs]] = field(default_factory=dict)  # by seq_id
    prompt_logprobs: SequenceOf[tuple[Sequence, PromptLogprobs]] = ()
    admitted: SequenceOf[Sequence] = ()  # sequences that steps may run from now on


def note_started(sequences: Iterable[Sequence], begin_s: float) -> list[Sequence]:
    """Sequences in their first step, which began at `begin_s`; not those submitted again with tokens."""
    started = [each for each in sequences if each.started_s is None and not each.output_token_ids]
    for sequence in started:
        sequence.started_s = begin_s
    return started


def note_first_tokens(outputs: Iterable[SequenceOutput], end_s: float) -> None:
    """Stores in each sequence when its first token was known."""
    for output in outputs:
        if output.sequence.first_token_s is None:
            output.sequence.first_token_s = end_s


def note_prompt_logprobs(
    sequences: Iterable[Sequence], found: Iterable[PromptLogprobs]
) -> list[tuple[Sequence, PromptLogprobs]]:
    """Log-probabilities of live sequences. A sequence whose prompt is complete does not report it again."""
    live = {each.seq_id: each for each in sequences if each.status is not SequenceStatus.FINISHED}
    noted = [(live[each.seq_id], each) for each in found if each.seq_id in live]
    for sequence, each in noted:
        if each.start + len(each.tokens) == sequence.num_prompt_tokens:
            sequence.num_prompt_logprobs = None
    return noted
