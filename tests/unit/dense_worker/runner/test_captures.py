"""When a GPU's dense worker captures its graphs: in idle moments, or when a step needs them; ranks and
lanes at their start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.batch_buckets import token_buckets
from services.common.cuda_graphs import StepGraphs
from services.common.errors import CapacityError
from services.dense_worker.runner import cuda_model_runner
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner
from services.dense_worker.sampling.sampler import Sampler
from tests.support.dense.without_cuda import FakeChannel, TorchWithoutCuda

MAX_NUM_SEQS, MAX_NUM_TOKENS = 4, 32


class CountedGraphs:
    """`StepGraphs` that notes which numbers of rows are captured at once, and which later."""

    at_once: list[list[int]]
    later: list[list[int]]

    def __init__(self, stream: object, warm_up: object, run: Callable[[Any], None], *, undisturbed: object) -> None: ...

    def capture_all(self, sizes: Iterable[Any]) -> None:
        self.at_once.append(sorted({size.num_rows for size in sizes}))

    def capture_later(self, sizes: Iterable[Any]) -> None:
        self.later.append(sorted({size.num_rows for size in sizes}))


@pytest.mark.parametrize(("has_ranks", "num_lanes"), [(False, 1), (True, 1), (False, 2)])
@pytest.mark.parametrize("captures_lazily", [False, True])
def test_no_attachment_waits_for_graphs_but_the_first_one_of_ranks_or_lanes(
    monkeypatch: pytest.MonkeyPatch, captures_lazily: bool, has_ranks: bool, num_lanes: int
) -> None:
    """A worker that attaches again has streams that wait: another worker could not take over from it, say."""
    monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_model_runner, "StepGraphs", CountedGraphs)
    monkeypatch.setattr(cuda_model_runner.ModelRunner, "attach", lambda *_: None)
    monkeypatch.setattr(CountedGraphs, "at_once", [], raising=False)
    monkeypatch.setattr(CountedGraphs, "later", [], raising=False)
    config: Any = SimpleNamespace(num_layers=1, vocab_size=10, qkv_size=1, attn_size=1, num_middle_kinds=1)
    backend: Any = SimpleNamespace()
    sampler = Sampler(MAX_NUM_SEQS, config.vocab_size, "cpu")
    sizes = (MAX_NUM_SEQS, MAX_NUM_TOKENS)
    options = {"captures_lazily": captures_lazily, "num_lanes": num_lanes}
    runner = CudaModelRunner(backend, sampler, config, torch.float32, *sizes, **options)
    channel: Any = FakeChannel()
    ranks: Any = SimpleNamespace(group=SimpleNamespace(capturing=nullcontext)) if has_ranks else None
    for _ in range(3):
        runner.attach([channel], ranks)
    every, has_others = token_buckets(*sizes), has_ranks or num_lanes > 1
    assert CountedGraphs.at_once == ([every] if has_others and not captures_lazily else [])
    assert CountedGraphs.later == ([] if has_others or captures_lazily else 3 * [every])


def test_products_are_chosen_before_a_number_of_rows_is_captured_or_runs_for_a_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a graph has captured does not change any more."""
    warm_ups: list[Callable[[Any], None]] = []
    seen: list[object] = []

    def make_graphs(stream: object, warm_up: Callable[[Any], None], run: object, **options: object) -> Any:
        warm_ups.append(warm_up)
        return SimpleNamespace(capture_later=lambda sizes: None)

    monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_model_runner, "StepGraphs", make_graphs)
    monkeypatch.setattr(cuda_model_runner.ModelRunner, "attach", lambda *_: None)
    monkeypatch.setattr(CudaModelRunner, "_warm_up", lambda self, channel, size: seen.append(f"run {size.num_rows}"))
    monkeypatch.setattr(CudaModelRunner, "_run_segments", lambda self, qkv, *_: seen.append(f"run {len(qkv)}"))
    config: Any = SimpleNamespace(num_layers=1, vocab_size=10, qkv_size=1, attn_size=1, num_middle_kinds=1)
    backend: Any = SimpleNamespace()
    sampler, sizes = Sampler(MAX_NUM_SEQS, config.vocab_size, "cpu"), (MAX_NUM_SEQS, MAX_NUM_TOKENS)
    options: Any = {"captures_lazily": False, "before_capture": seen.append}
    runner = CudaModelRunner(backend, sampler, config, torch.float32, *sizes, **options)
    runner.attach([FakeChannel()])  # type: ignore[list-item]
    [warm_up] = warm_ups
    [size] = runner._sizes([4])[:1]
    warm_up(size)
    assert seen == [4, "run 4"]
    seen.clear()
    runner.warm_up()
    firsts = [seen.index(each) < seen.index(f"run {each}") for each in token_buckets(*sizes)]
    assert all(firsts)


class OneSizeAtATime(StepGraphs[int]):
    """Captures nothing, but notes what it would; there is room for `room` graphs."""

    def __init__(self, room: int) -> None:
        self.captured: list[int] = []
        self._room = room
        super().__init__(None, lambda _: None, lambda _: None)  # type: ignore[arg-type]

    def capture(self, size: int) -> Any:
        if len(self.captured) == self._room:
            raise CapacityError("no room")
        self.captured.append(size)
        self._graphs[size] = graph = object()  # type: ignore[assignment]
        return graph


@pytest.fixture(autouse=True)
def _without_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))


def test_sizes_left_for_later_come_one_at_a_time_but_those_that_a_step_needed_before() -> None:
    graphs = OneSizeAtATime(room=9)
    graphs.capture_later([8, 4, 2, 1])
    assert graphs.capture_next()
    graphs.find(2)
    assert graphs.captured == [8, 2]
    assert [graphs.capture_next() for _ in range(4)] == [True, True, False, False]
    assert graphs.captured == [8, 2, 4, 1]


def test_without_room_for_more_graphs_the_rest_is_left_to_the_steps_that_need_them() -> None:
    graphs = OneSizeAtATime(room=2)
    graphs.capture_later([8, 4, 2, 1])
    assert [graphs.capture_next() for _ in range(4)] == [True, True, False, False]
    assert graphs.captured == [8, 4]
    with pytest.raises(CapacityError, match="no room"):
        graphs.find(1)
    assert graphs.find(4) is not None
