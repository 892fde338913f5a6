"""A feature that only this test knows: given to engine and runner in the list, it gets its rows and nothing else."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.pb import dense_pb2
from services.step import NewSequence, PlanAccepted, SequenceOpened, SequenceSpec, StepPlan, StepResult
from tests.support.dense.sequences import new_sequence
from tests.support.scripted_attention import LIMITS, TIMEOUT_S, FakeAttention, make_attachment, started_engine
from tests.unit.dense_worker.runner.test_runner_sequences import CHANNEL, NUM_LAYERS, VOCAB_SIZE, NextNumber


class ToySequence(SequenceFeature):
    """Writes down what happens to its sequence."""

    reports = True

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.events: list[Any] = []

    def enter(self) -> None:
        self.events.append("enter")

    def restore(self, output_token_ids: list[int]) -> None:
        self.events.append(list(output_token_ids))

    def leave(self, last_step_id: int) -> None:
        self.events.append("leave")


@dataclass(frozen=True, slots=True)
class ToyRows(StepPart):
    step: StepView
    rows: FeatureRows

    def read(self, result: StepResult) -> None:
        for index in self.rows.indexes.tolist():
            if token_ids := result.token_ids.of(index):
                rows = np.array(token_ids, np.uint32)[:, None]  # the tokens that the sequence has got from the step
                result.reports.append(TokenReport(self.step.entries.seq_ids.item(index), Toy.name, 0, rows))


@dataclass
class Toy(Feature):
    """Has the sequences that ask for it by its name, and writes down the rows that it gets."""

    name = "toy"
    sequence_type = ToySequence
    rows: list[tuple[int, str]] = field(default_factory=list)  # (seq_id of the entry, request_id of the feature)

    __hash__ = object.__hash__

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> ToySequence:
        return ToySequence(spec.request_id)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> ToyRows:
        seq_ids = step.entries.seq_ids[rows.indexes].tolist()
        self.rows += [(seq_id, each.request_id) for seq_id, each in zip(seq_ids, rows.features, strict=True)]
        return ToyRows(step, rows)


class Attention(FakeAttention):
    """With a channel for a real runner. A plan that closes a sequence frees its two blocks, if these are scarce."""

    def __init__(self, num_freed_blocks: int = 0) -> None:
        super().__init__(bad_step=0)
        self.num_freed_blocks = num_freed_blocks
        vars(self.channel).update(vars(CHANNEL), check=lambda: None)
        self.opened: list[int] = []
        self.attachment: Attachment | None = None

    def open(self, attachment: Attachment, new: NewSequence) -> None:
        assert self.engine is not None
        self.attachment = attachment
        self.opened.append(new.seq_id)
        self.engine.on_answer(attachment, SequenceOpened(new.seq_id))

    def run(self, attachment: Attachment, plan: StepPlan) -> None:
        assert self.engine is not None
        if plan.close_seq_ids:
            self.engine.on_answer(attachment, PlanAccepted(plan.step_id, self.num_freed_blocks))


class Run:
    """An engine and a runner that know the feature from the list only."""

    def __init__(self, limits: SchedulerLimits = LIMITS, num_blocks: int = 100, num_freed_blocks: int = 0) -> None:
        self.toy, self.attention = Toy(), Attention(num_freed_blocks)
        backend, sampler = NextNumber(), Sampler(limits.max_num_seqs, VOCAB_SIZE, "cpu")
        runner = ModelRunner(backend, sampler, NUM_LAYERS, limits.max_num_seqs, [self.toy])  # type: ignore[arg-type]
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.engine: Engine = started_engine(
            runner, self.attention, self.reports, TIMEOUT_S, limits, num_blocks, [self.toy]
        )
        self.reported: list[tuple[int, list[int]]] = []

    def submit(self, seq_id: int, num_prompt_tokens: int, max_tokens: int, *, is_toy: bool) -> Sequence:
        sampling, prompt = SamplingParams(temperature=0.0), list(range(num_prompt_tokens))
        options = {"features": {Toy.name: b""}} if is_toy else {}
        sequence = new_sequence(seq_id, f"r{seq_id}", prompt, sampling, max_tokens, **options)
        if self.toy.name in sequence.spec.asked_features:
            sequence.features = (self.toy.admit(sequence.spec, dense_pb2.Submit(), stream=1),)
        self.engine.submit(sequence)
        return sequence

    def report(self) -> StepReport:
        report = self.reports.get(timeout=TIMEOUT_S)
        assert report.step_id >= 0, "the engine failed"
        self.reported += [(sequence.seq_id, each.rows[:, 0].tolist()) for sequence, each in report.reports]
        return report

    def run_to_end(self, num_sequences: int) -> None:
        num_ends = 0
        while num_ends < num_sequences:
            num_ends += sum(output.finish_reason is not None for output in self.report().outputs)
        self.engine.stop(TIMEOUT_S)

    def reported_of(self, sequence: Sequence) -> list[int]:
        return [token_id for seq_id, token_ids in self.reported if seq_id == sequence.seq_id for token_id in token_ids]


def events_of(sequence: Sequence) -> list[Any]:
    [feature] = sequence.features
    return feature.events


def test_it_gets_exactly_its_rows_and_its_reports_go_to_its_clients() -> None:
    run = Run()
    sequences = [run.submit(seq_id, 3, 4 + seq_id, is_toy=seq_id != 2) for seq_id in (1, 2, 3)]
    run.run_to_end(3)
    assert set(run.toy.rows) == {(1, "r1"), (3, "r3")}
    for sequence in (sequences[0], sequences[2]):
        assert events_of(sequence) == ["enter", [], "leave"]
        assert run.reported_of(sequence) == sequence.output_token_ids
    assert run.reported_of(sequences[1]) == [] and len(sequences[1].output_token_ids) == 6


def test_it_starts_again_when_the_attention_worker_has_died() -> None:
    run = Run()
    sequence = run.submit(1, 3, 40, is_toy=True)
    while len(run.reported) < 3:
        run.report()
    attachment = run.attention.attachment
    assert attachment is not None
    run.engine.on_detached(attachment, AttachmentEnd("it has died", is_crash=True))
    run.engine.on_attached(make_attachment(run.attention, 2))
    run.run_to_end(1)
    first, begun, left, second, restored, last = events_of(sequence)
    assert (first, begun, left, second, last) == ("enter", [], "leave", "enter", "leave")
    assert len(restored) >= 3 and restored == sequence.output_token_ids[: len(restored)]
    assert sequence.output_token_ids == [*range(3, 43)] and run.reported_of(sequence) == sequence.output_token_ids


def test_it_starts_again_after_a_preemption() -> None:
    """Two sequences of two blocks each grow together in a cache of four: the second one has to go."""
    run = Run(SchedulerLimits(4, 16, 16, 100, "max_utilization"), num_blocks=4, num_freed_blocks=2)
    sequences = [run.submit(seq_id, 4, 6, is_toy=True) for seq_id in (1, 2)]
    run.run_to_end(2)
    assert events_of(sequences[0]) == ["enter", [], "leave"]
    *before, last = events_of(sequences[1])
    assert before[:4] == ["enter", [], "leave", "enter"] and last == "leave"
    assert before[4] == sequences[1].output_token_ids[: len(before[4])] and before[4]
    assert sequences[1].output_token_ids == [*range(4, 10)] == run.reported_of(sequences[1])


@pytest.mark.parametrize("num_steps", [0, 2])
def test_it_ends_with_a_sequence_that_is_cancelled(num_steps: int) -> None:
    run = Run()
    sequence = run.submit(1, 3, 50, is_toy=True)
    while len(run.reported) < num_steps:
        run.report()
    run.engine.cancel(1)
    run.submit(2, 3, 2, is_toy=False)
    run.run_to_end(1)
    assert events_of(sequence).count("enter") == events_of(sequence).count("leave")
