"""`StepReport`: what gateways learn about a step, and what the engine notes in the step's sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.sequence import Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.features.report import TokenReport


class DecodedTokens(NamedTuple):
    """One token of each of these sequences, which go on and had tokens before."""

    streams: np.ndarray  # int64 [num_tokens], of the gateways
    seq_ids: np.ndarray  # uint64 [num_tokens]
    token_ids: np.ndarray  # int64 [num_tokens]
    sequences: np.ndarray  # object [num_tokens]


NO_DECODED = DecodedTokens(np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, object))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Nearly all outputs of most steps are `decoded`; first tokens, ends and all that is special are `others`."""

    decoded: DecodedTokens = NO_DECODED
    others: SequenceOf[SequenceOutput] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that sequences got."""
        num_others = sum([len(output.token_ids) for output in self.others]) if self.others else 0
        return len(self.decoded.token_ids) + num_others

    def __len__(self) -> int:
        return len(self.decoded.token_ids) + len(self.others)

    def __iter__(self) -> Iterator[SequenceOutput]:
        """All outputs, one by one."""
        for sequence, token_id in zip(self.decoded.sequences, self.decoded.token_ids.tolist(), strict=True):
            yield SequenceOutput(sequence, (token_id,), None)
        yield from self.others


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of a step for the gateways."""

    step_id: int
    started: SequenceOf[Sequence] = ()
    outputs: StepOutputs = field(default_factory=StepOutputs)
    logprobs: Mapping[int, SequenceOf[TokenLogprobs]] = field(default_factory=dict)  # by seq_id
    reports: SequenceOf[tuple[Sequence, TokenReport]] = ()  # that only some sequences have
    admitted: SequenceOf[Sequence] = ()  # sequences that steps may run from now on

    @classmethod
    def between_steps(cls, outputs: SequenceOf[SequenceOutput]) -> StepReport:
        """Outputs that no step has given."""
        return cls(0, outputs=StepOutputs(others=outputs))


def record_started(sequences: Iterable[Sequence], begin_s: float) -> list[Sequence]:
    """Stores in each sequence when its first step began. Returns those in their first step, without resumed ones."""
    started = [each for each in sequences if each.started_s is None and not each.output_token_ids]
    for sequence in started:
        sequence.started_s = begin_s
    return started


def record_first_tokens(outputs: Iterable[SequenceOutput], end_s: float) -> None:
    """Stores in each sequence when its first token was known."""
    for output in outputs:
        if output.sequence.first_token_s is None:
            output.sequence.first_token_s = end_s


def record_reports(sequences: Iterable[Sequence], found: SequenceOf[TokenReport]) -> list[tuple[Sequence, TokenReport]]:
    """Adds the sequence to each report; leaves out those of ended ones. Called before the step's tokens are appended.
    """
    if not found:  # in almost all steps
        return []
    live = {each.seq_id: each for each in sequences if each.status is not SequenceStatus.FINISHED}
    recorded = [(live[each.seq_id], each) for each in found if each.seq_id in live]
    for sequence, each in recorded:
        for feature in sequence.features:
            feature.note_reported(each)
    return recorded
