"""What a search reports, in the messages of `protos/dense.proto`: its steps and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.token_logprobs import encode_logprobs, encode_rows
from services.dense_worker.features.beams.search import Hypothesis, SearchStep
from services.pb import dense_pb2


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The last step of a search that goes on. Implements `OutputReport`."""

    seq_id: int
    step: SearchStep
    has_logprobs: bool  # of tokens that are reported

    def add_to(self, message: dense_pb2.StepOutput) -> None:
        """Adds the step to the searches of the message."""
        message.searches.append(self.encode())

    def encode(self) -> dense_pb2.BeamStep:
        """The message of the step."""
        step, has_logprobs = self.step, self.has_logprobs
        return dense_pb2.BeamStep(
            seq_id=self.seq_id,
            parents=step.parents,
            token_ids=[beam.token_ids[-1] for beam in step.beams],
            scores=[beam.score for beam in step.beams],
            logprobs=[encode_logprobs(beam.logprobs[-1]) for beam in step.beams] if has_logprobs else (),
            ended=[
                dense_pb2.EndedBeam(
                    parent=parent,
                    token_id=answer.token_ids[-1],
                    score=answer.score,
                    logprobs=encode_logprobs(answer.logprobs[-1]) if has_logprobs else None,
                )
                for parent, answer in step.ended
            ],
        )


@dataclass(frozen=True, slots=True)
class AnswersReport:
    """The answers of a search that has ended. Implements `OutputReport`."""

    hypotheses: Sequence[Hypothesis]  # the best one first
    has_logprobs: bool

    def add_to(self, message: dense_pb2.StepOutput) -> None:
        """Adds the answers to the last end of the message."""
        made: dict[int, bytes] = {}  # the answers have most of their beginnings in common
        message.ended[-1].answers.extend(
            dense_pb2.BeamAnswer(
                token_ids=answer.token_ids,
                logprob_rows=encode_rows(answer.logprobs, made) if self.has_logprobs else b"",
                score=answer.score,
                reason=dense_pb2.SequenceEnd.STOP if answer.is_stopped else dense_pb2.SequenceEnd.LENGTH,
            )
            for answer in self.hypotheses
        )
