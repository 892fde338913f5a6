"""When a GPU's attention worker captures its graphs, and what it does for which memory has no room, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from services.attn_worker.layers import DECODE_ONLY
from services.attn_worker.runner import cuda_layer_runner
from services.attn_worker.runner.cuda_layer_runner import CudaLayerRunner
from services.common.attention.learned import Learned
from services.common.errors import CapacityError
from tests.support.dense.without_cuda import FakeChannel, TorchWithoutCuda

MAX_NUM_SEQS = 4


class Graphs:
    """`StepGraphs` without room; what it is asked for is noted."""

    calls: list[str]

    def __init__(self, stream: object, warm_up: object, run: Callable[[Any], None]) -> None: ...

    def capture_all(self, sizes: Iterable[Any]) -> None:
        self.calls.append(f"all {sorted({size.num_rows for size in sizes})}")

    def capture_later(self, sizes: Iterable[Any]) -> None:
        self.calls.append(f"later {sorted({size.num_rows for size in sizes})}")

    def find(self, size: Any) -> None:
        self.calls.append(f"find {size.num_rows}")
        raise CapacityError("no room")


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_layer_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_layer_runner, "StepGraphs", Graphs)
    monkeypatch.setattr(Graphs, "calls", [], raising=False)


def make_runner(backend: Any, **options: bool) -> CudaLayerRunner:
    backend.captured_shapes, backend.use_learned = [DECODE_ONLY], lambda learned: None
    return CudaLayerRunner(backend, 1, MAX_NUM_SEQS, **options)


@pytest.mark.parametrize("has_other_lanes", [False, True])
@pytest.mark.parametrize("captures_lazily", [False, True])
def test_no_attachment_waits_for_graphs_but_the_first_one_of_lanes(
    captures_lazily: bool, has_other_lanes: bool
) -> None:
    runner = make_runner(SimpleNamespace(), captures_lazily=captures_lazily, has_other_lanes=has_other_lanes)
    for _ in range(3):
        runner.attach([FakeChannel()], Learned())  # type: ignore[list-item]
    expected = ["all [1, 2, 4]"] if has_other_lanes else 3 * ["later [1, 2, 4]"]
    assert Graphs.calls == ([] if captures_lazily else expected)


def test_a_step_runs_kernel_by_kernel_if_memory_has_no_room_for_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Any, ...]] = []
    backend = SimpleNamespace(
        captured_shape=lambda step: DECODE_ONLY, begin_step=lambda *arguments: begun.append(arguments)
    )
    monkeypatch.setattr(cuda_layer_runner, "run_layers", lambda *arguments: None)
    runner, channel = make_runner(backend, captures_lazily=True), FakeChannel()
    runner.attach([channel], Learned())  # type: ignore[list-item]
    step: Any = SimpleNamespace(positions=[0, 0, 0], num_rows=3)
    for _ in range(2):
        assert runner.launch(step, channel).is_done()  # type: ignore[arg-type]
    assert begun == [(step,), (step,)] and Graphs.calls == ["find 4"], "memory is not asked for again at each step"
