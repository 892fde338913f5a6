"""A feature whose rows need other kernels: on a GPU, steps with and without its rows have graphs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.errors import CapacityError
from services.common.sampling_params import SamplingParams
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.dense_worker.runner import cuda_model_runner
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.step import PlanEntry
from tests.support.dense.sequences import make_state
from tests.support.dense.without_cuda import EagerGraphs, FakeChannel, TorchWithoutCuda
from tests.support.plans import plan_of
from tests.unit.dense_worker.runner.test_runner_sequences import VOCAB_SIZE, NextNumber

MAX_NUM_SEQS, MAX_NUM_TOKENS = 4, 32
CHANNEL: Any = FakeChannel()


class Kernels(Feature):
    """Writes down for which steps its kernels are on, and which rows it is told of."""

    sequence_type = SequenceFeature
    has_kernels = True

    def __init__(self) -> None:
        self.is_active = False
        self.begun: list[tuple[bool, int]] = []  # whether the step has its rows, and the number of rows

    def prepare_step(self, step: StepView, rows: FeatureRows) -> StepPart:
        return StepPart()

    def begin_step(self, part: StepPart | None, num_rows: int) -> None:
        self.begun.append((part is not None, num_rows))

    @contextmanager
    def activated(self, is_active: bool) -> Iterator[None]:
        was_active, self.is_active = self.is_active, is_active
        yield
        self.is_active = was_active


class RecordingGraphs(EagerGraphs):
    """`StepGraphs` that notes what is captured ahead, and the graphs of steps."""

    ahead: list[Any]
    found: list[Any]

    def capture_later(self, sizes: Any) -> None:
        self.ahead.extend(sizes)

    def find(self, size: Any) -> SimpleNamespace:
        self.found.append(size)
        return super().find(size)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[RecordingGraphs]:
    monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_model_runner, "StepGraphs", RecordingGraphs)
    monkeypatch.setattr(RecordingGraphs, "ahead", [], raising=False)
    monkeypatch.setattr(RecordingGraphs, "found", [], raising=False)
    return RecordingGraphs


def make_runner(backend: Any, features: list[Feature], *, captures_lazily: bool = True) -> CudaModelRunner:
    config: Any = SimpleNamespace(num_layers=1, vocab_size=VOCAB_SIZE, qkv_size=1, attn_size=1, num_middle_kinds=1)
    sampler = Sampler(MAX_NUM_SEQS, VOCAB_SIZE, "cpu")
    runner = CudaModelRunner(
        backend,
        sampler,
        config,
        torch.float32,
        MAX_NUM_SEQS,
        MAX_NUM_TOKENS,
        captures_lazily=captures_lazily,
        features=features,
    )
    runner.attach([CHANNEL])
    return runner


def open_both(runner: ModelRunner) -> None:
    """Sequence 1 is plain, sequence 2 has the feature."""
    sampling = SamplingParams(temperature=0.0)
    runner.open(make_state(1, (5, 6), 2, sampling))
    runner.open(make_state(2, (7, 8), 2, sampling, features=[SequenceFeature()]))


def test_plain_steps_run_the_graphs_of_plain_steps(graphs: type[RecordingGraphs]) -> None:
    active: list[bool] = []

    class Backend(NextNumber):
        def first(self, token_ids: torch.Tensor, qkv: torch.Tensor, input_embeds: object = None) -> torch.Tensor:
            active.append(kernels.is_active)
            return super().first(token_ids, qkv)

    kernels = Kernels()
    runner = make_runner(Backend(), [kernels])
    open_both(runner)
    steps = [[1], [1, 2], [2], [1]]
    positions = dict.fromkeys((1, 2), 0)
    for step_id, seq_ids in enumerate(steps, 1):
        entries = [PlanEntry(each, positions[each], 1 if positions[each] else 2, 1) for each in seq_ids]
        result = runner.launch(plan_of(step_id, *entries), CHANNEL).collect()
        for entry, token_ids in zip(entries, result.token_ids.rows(), strict=True):
            positions[entry.seq_id] = entry.position + entry.num_tokens
            assert len(token_ids) == 1
    with_rows = [2 in seq_ids for seq_ids in steps]
    assert [kernels in size.active for size in graphs.found] == with_rows
    assert active == with_rows, "a graph is captured with the kernels that its steps need"
    assert [has_rows for has_rows, _ in kernels.begun] == with_rows, "it is told of every step"
    assert [num_rows for _, num_rows in kernels.begun] == [size.num_rows for size in graphs.found], "padding included"


def test_only_features_with_kernels_have_graphs_of_their_own(graphs: type[RecordingGraphs]) -> None:
    make_runner(SimpleNamespace(), [], captures_lazily=False)
    plain, graphs.ahead[:] = list(graphs.ahead), []
    without_kernels = Kernels()
    without_kernels.has_kernels = False
    make_runner(SimpleNamespace(), [without_kernels], captures_lazily=False)
    assert graphs.ahead == plain
    graphs.ahead.clear()
    kernels = Kernels()
    make_runner(SimpleNamespace(), [kernels], captures_lazily=False)
    found = [(*size[:2], kernels in size.active) for size in graphs.ahead]
    assert found == [(*size[:2], is_active) for size in plain for is_active in (False, True)]


def test_steps_for_whose_graphs_memory_has_no_room_give_their_tokens_all_the_same(
    graphs: type[RecordingGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(runner: ModelRunner) -> list[list[list[int]]]:
        open_both(runner)
        plans = [plan_of(1, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 2, 1))]
        plans += [plan_of(each, PlanEntry(1, each, 1, 1), PlanEntry(2, each, 1, 1)) for each in (2, 3, 4)]
        results = [runner.launch(plan, CHANNEL).collect() for plan in plans]
        return [[list(row) for row in result.token_ids.rows()] for result in results]

    tried: list[Any] = []

    def refuse(_: object, size: Any) -> None:
        tried.append(size)
        raise CapacityError("the GPU has no room for the CUDA graphs of steps")

    expected = run(make_runner(NextNumber(), [Kernels()]))
    monkeypatch.setattr(RecordingGraphs, "find", refuse)
    assert run(make_runner(NextNumber(), [Kernels()])) == expected
    assert len(tried) == len(set(tried)), "a capture waits for the device"
