"""An abort of NCCL while a shard captures a graph. CUDA and NCCL are played: an abort in a capture breaks it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common import cuda_graphs
from services.common.cuda_graphs import StepGraphs
from services.common.errors import PeerError
from services.common.rank import Rank
from services.dense_worker.ranks import cuda_shard_runner, nccl_group
from services.dense_worker.ranks.cuda_shard_runner import CudaShardRunner
from services.dense_worker.ranks.nccl_group import NcclGroup
from services.step import StepPlan
from tests.support.dense.without_cuda import FakeChannel, TorchWithoutCuda

LIMIT_S = 10.0
CPU = torch.device("cpu")


class Capture:
    """`torch.cuda.graph`. There is one at a time."""

    present: Capture | None = None

    def __init__(self, graph: object, **options: object) -> None:
        self.is_broken = False

    def __enter__(self) -> None:
        Capture.present = self

    def __exit__(self, *error: object) -> None:
        Capture.present = None
        if self.is_broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class Nccl:
    """`ProcessGroupNCCL`."""

    Options = SimpleNamespace

    def __init__(self, *arguments: object) -> None:
        self.has_ended = threading.Event()

    def allreduce(self, *arguments: object) -> None: ...

    def abort(self) -> None:
        if Capture.present is not None:
            Capture.present.is_broken = True
        self.has_ended.set()


class Torch(TorchWithoutCuda):
    cuda = SimpleNamespace(
        **vars(TorchWithoutCuda.cuda),
        graph=Capture,
        graph_pool_handle=lambda: None,
        CUDAGraph=lambda: SimpleNamespace(reset=lambda: None, replay=lambda: None),
    )


@pytest.fixture
def make_group(monkeypatch: pytest.MonkeyPatch) -> Callable[[], NcclGroup]:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_group.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(nccl_group, "_warn_of_slow_links", lambda rank, device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cuda_shard_runner, "torch", Torch())
    monkeypatch.setattr(cuda_graphs, "torch", Torch())
    store: Any = None
    return lambda: NcclGroup(store, Rank(1, 2), CPU, LIMIT_S)


class Shard:
    """A `CudaShardRunner` with two sums in each step; `between` runs between them in a capture."""

    def __init__(self) -> None:
        self._group: NcclGroup | None = None
        self.between: Callable[[], object] = lambda: None
        operations: Any = SimpleNamespace(use_group=self._use, share_tokens=lambda token_ids: None)
        self.runner = CudaShardRunner(self._backend(), operations, num_layers=1, max_num_tokens=32, device=CPU)

    def attach(self, group: NcclGroup) -> None:
        channels: Any = {0: FakeChannel()}
        self.runner.attach(channels, [group])

    def capture(self, num_rows: int) -> None:
        self.runner.run_step(StepPlan(0), num_rows, num_sampled=1)

    def _use(self, group: NcclGroup) -> None:
        self._group = group

    def _backend(self) -> Any:
        def last(*arguments: object) -> torch.Tensor:
            assert self._group is not None
            self._group.add(torch.zeros(1))
            if Capture.present is not None:
                self.between()
            self._group.add(torch.zeros(1))
            return torch.zeros(1, 1)

        return SimpleNamespace(
            begin_step=lambda *arguments: None,
            first=lambda token_ids, qkv, *_: torch.zeros(len(token_ids), 1),
            last=last,
            always_ends=False,
        )


def test_an_abort_in_a_capture_ends_the_attachment_and_not_the_shard(make_group: Callable[[], NcclGroup]) -> None:
    """A `PeerError` is no fault of its GPU. The next attachment captures the same size."""
    shard, group = Shard(), make_group()
    nccl: Any = group._group
    shard.attach(group)
    shard.capture(8)
    shard.between = lambda: (group.abort(), nccl.has_ended.wait(0.1))
    with pytest.raises(PeerError, match="given up"):
        shard.capture(4)
    assert nccl.has_ended.wait(LIMIT_S), "it only came later"
    shard.between = lambda: None
    with pytest.raises(PeerError, match="given up"):
        shard.capture(4)
    shard.attach(make_group())
    shard.capture(4)
    shard.runner.run_step(StepPlan(0), 4, num_sampled=1)


def test_an_abort_at_the_end_of_a_capture_waits_for_it(
    make_group: Callable[[], NcclGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a capture makes the graph, which takes some milliseconds."""
    shard, group = Shard(), make_group()
    nccl: Any = group._group
    shard.attach(group)
    exit_ = Capture.__exit__

    def exit_after_abort(capture: Capture, *error: object) -> None:
        group.abort()
        nccl.has_ended.wait(0.1)
        exit_(capture, *error)

    monkeypatch.setattr(Capture, "__exit__", exit_after_abort)
    shard.capture(8)
    assert nccl.has_ended.wait(LIMIT_S)


def test_an_abort_does_not_wait_long_for_a_capture_that_stands_still(make_group: Callable[[], NcclGroup]) -> None:
    """Then the capture fails, and with it the process, in whose place another one comes."""
    shard, group = Shard(), make_group()
    nccl: Any = group._group
    shard.attach(group)
    shard.between = lambda: (group.abort(), nccl.has_ended.wait(LIMIT_S))
    with pytest.raises(RuntimeError, match=r"^CUDA error: operation failed due to a previous error during capture"):
        shard.capture(8)


def test_a_capture_begins_when_the_device_is_idle_before_it_keeps_an_abort_waiting(
    make_group: Callable[[], NcclGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the abort for whose sake the device becomes idle."""
    group, order = make_group(), list[str]()
    nccl: Any = group._group
    monkeypatch.setattr(
        Capture, "__enter__", lambda self: (group.abort(), order.append(str(nccl.has_ended.wait(LIMIT_S))))
    )
    graphs = StepGraphs[int](SimpleNamespace(), lambda _: None, order.append, undisturbed=group.capturing)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="given up"):
        graphs.capture(1)
    assert order == ["True"]


