"""Rows that several attention workers share, through the kernels of the dense worker's seam: merged as on CPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from services.channel import ChannelSpec, Flag
from services.channel.log_sums import log_sums_of
from services.dense_worker.attention_workers.joined_channel import LayerSizes
from services.dense_worker.attention_workers.split_context.shared_rows import SharedRows
from tests.support.dense.without_cuda import TorchWithoutCuda

if TYPE_CHECKING:
    from services.dense_worker.attention_workers.split_context.cuda_shared_channel import CudaSharedChannel

NUM_HEADS, HEAD_DIM = 6, 20
SIZES = LayerSizes((NUM_HEADS + 2 * 2) * HEAD_DIM, NUM_HEADS * HEAD_DIM, NUM_HEADS)
NUM_ROWS = 8  # the last one is padding
# Rows 1 and 4 are of all workers, 5 and 6 of two, and the others of one.
ROWS = {0: np.array([0, 1, 4, 6]), 7: np.array([1, 3, 4, 5, 6]), 9: np.array([1, 2, 4, 5])}


class Worker:
    """An attention worker's region, and what it makes of a step."""

    def __init__(self, cache_id: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(cache_id)
        num_rows = len(ROWS[cache_id])
        self.qkv = torch.zeros(NUM_ROWS, SIZES.qkv, dtype=dtype, device=device)
        self.attn_out = torch.zeros(NUM_ROWS, SIZES.attn_out, dtype=dtype, device=device)
        self.slot_addresses = (self.qkv.data_ptr(), self.attn_out.data_ptr(), 0, 0, 0, 0)
        self.output = torch.randn(num_rows, SIZES.attn_out, generator=generator).to(dtype)
        self.log_sums = 5 * torch.randn(num_rows, NUM_HEADS, generator=generator)
        self.given: torch.Tensor | None = None
        self.is_aborted = self.is_retired = self.is_closed = False

    def attend(self) -> None:
        num_rows = len(self.output)
        self.given = self.qkv[:num_rows].cpu().clone()
        self.attn_out[:num_rows] = self.output.to(self.qkv.device)
        log_sums_of(self.qkv[:num_rows], SIZES.attn_out, NUM_HEADS)[:] = self.log_sums.to(self.qkv.device)

    def check(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def retire(self) -> None:
        assert self.is_aborted, "steps under way wait for nobody"
        self.is_retired = True


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def workers(request: pytest.FixtureRequest, kernel_device: torch.device) -> dict[int, Worker]:
    made = {each: Worker(each, request.param, kernel_device) for each in ROWS}
    made[7].log_sums[ROWS[7] == 1] = -torch.inf  # it sees no key of this part
    made[7].output[ROWS[7] == 1] = torch.nan
    for each in (7, 9):
        made[each].log_sums[ROWS[each] == 5] = -torch.inf
    return made


@pytest.fixture(scope="module")
def _bindings(kernel_device: torch.device) -> Iterator[None]:
    """On a CPU, modules that import CUDA's bindings can be imported."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        if kernel_device.type == "cpu":
            for name in ("cuda", "cuda.bindings"):
                patch.setitem(sys.modules, name, MagicMock())
        yield
        if kernel_device.type == "cpu":
            for name in set(sys.modules) - before:
                if name.startswith("services."):
                    del sys.modules[name]


@pytest.fixture
def channel(
    workers: dict[int, Worker], kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, _bindings: None
) -> CudaSharedChannel:
    from services.dense_worker.attention_workers import cuda_joined_channel  # needs triton
    from services.dense_worker.attention_workers.split_context.cuda_shared_channel import CudaSharedChannel

    def attend() -> None:
        for each in workers.values():
            each.attend()

    def make_flags(device: torch.device, table: torch.Tensor, counts: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(signal=attend, wait=lambda: None)

    monkeypatch.setattr(cuda_joined_channel, "SlotFlags", make_flags)
    if kernel_device.type == "cpu":
        monkeypatch.setattr(cuda_joined_channel, "torch", TorchWithoutCuda())
    dtype = workers[0].qkv.dtype
    spec = ChannelSpec(NUM_ROWS, SIZES.qkv, SIZES.attn_out, dtype)
    members: Any = dict(workers)
    return CudaSharedChannel(spec, [SIZES], members, lambda cache_id, reason: None, kernel_device)


@pytest.fixture
def run_step(workers: dict[int, Worker], channel: CudaSharedChannel) -> Callable[[], torch.Tensor]:
    """Runs a layer and returns attn_out."""
    channel.qkv.copy_(torch.randn(NUM_ROWS, SIZES.qkv, generator=torch.Generator().manual_seed(1)))
    channel.attn_out.fill_(3.0)

    def run() -> torch.Tensor:
        channel.expect(1, ROWS)
        channel.begin_step(1, NUM_ROWS)
        channel.begin_layers(NUM_ROWS)
        channel.signal(Flag.QKV_READY)
        channel.wait(Flag.ATTENTION_READY)
        for cache_id, each in workers.items():
            assert each.given is not None
            assert torch.equal(each.given, channel.qkv.cpu()[ROWS[cache_id]])
        return channel.fetch_attn_out(NUM_ROWS).cpu()

    return run


def test_shared_rows_are_merged_and_others_copied(
    workers: dict[int, Worker], run_step: Callable[[], torch.Tensor]
) -> None:
    taken = run_step()
    for row, cache_id in ((0, 0), (3, 7), (2, 9)):
        assert torch.equal(taken[row], workers[cache_id].output[np.flatnonzero(ROWS[cache_id] == row)[0]])
    assert (taken[7] == 3.0).all(), "a row of nobody stays as it was"
    shared = SharedRows([torch.from_numpy(each) for each in ROWS.values()], NUM_ROWS)
    assert shared.rows.tolist() == [1, 4, 5, 6]
    expected = shared.merge([(each.output, each.log_sums) for each in workers.values()])
    assert not expected[2].any(), "row 5 sees no key at all"
    tolerance = 1e-6 if expected.dtype == torch.float32 else 1e-3  # orders of addition; roundings
    torch.testing.assert_close(taken[shared.rows], expected, rtol=tolerance, atol=tolerance)


def test_a_worker_that_is_gone_is_unmapped_when_another_one_comes(
    workers: dict[int, Worker], channel: CudaSharedChannel
) -> None:
    """Not in a step, for which all streams wait."""
    channel.lose(7)
    channel.expect(1, {0: np.array([0])})
    channel.begin_step(1, 1)
    assert [cache_id for cache_id, each in workers.items() if each.is_retired] == [7]
    assert not any(each.is_closed for each in workers.values())
    come: Any = Worker(7, channel.qkv.dtype, channel.qkv.device)
    channel.add(11, come)
    assert [cache_id for cache_id, each in workers.items() if each.is_closed] == [7]
    channel.lose(9)
    channel.expect(2, {0: np.array([0])})
    channel.begin_step(2, 1)
    channel.close()
    assert all(each.is_closed for each in (*workers.values(), come))


def test_a_worker_that_is_gone_is_unmapped_soon_although_no_other_one_comes(
    workers: dict[int, Worker], channel: CudaSharedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have no room for its KV cache or its region before."""
    from services.dense_worker.attention_workers import cuda_joined_channel

    now_s = 100.0
    monkeypatch.setattr(cuda_joined_channel, "time", SimpleNamespace(monotonic=lambda: now_s), raising=False)
    closed = []
    for step_id, lost, passed_s in ((1, 7, 0.0), (2, None, 0.2), (3, 9, 0.0), (4, None, 0.2), (5, None, 0.2)):
        now_s += passed_s
        if lost is not None:
            channel.lose(lost)
        channel.expect(step_id, {0: np.array([0])})
        channel.begin_step(step_id, 1)
        closed.append([cache_id for cache_id, each in workers.items() if each.is_closed])
    assert closed == [[], [], [], [], [7, 9]], "not just after a death"
