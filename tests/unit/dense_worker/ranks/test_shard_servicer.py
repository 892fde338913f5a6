"""What ends the process of a shard."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.channel import ChannelSpec
from services.common.errors import DeviceError, InvalidRequest, PeerError, RequestAborted
from services.common.rank import Rank
from services.dense_worker.ranks.join_group import RankStore
from services.dense_worker.ranks.shard_servicer import ShardServicer, _Attachment
from services.lora.adapter import Adapter, encode_adapter
from services.pb import shard_pb2

CPU = torch.device("cpu")
SPEC = ChannelSpec(max_tokens=1, qkv_size=1, attn_size=1, dtype=torch.float32)
LIMIT_S = 10.0
STALL_S = 2.0


def make_servicer() -> ShardServicer:
    servicer = ShardServicer(Rank(1, 2), SPEC, CPU, LIMIT_S, STALL_S)
    servicer._engine.start()
    return servicer


@pytest.mark.parametrize(
    ("error", "is_end"),
    [(DeviceError("its device has failed"), True), (ValueError("a bug"), True), (PeerError("gone"), False)],
)
def test_a_shard_ends_when_its_device_has_failed(error: Exception, is_end: bool) -> None:
    async def run() -> bool:
        servicer = make_servicer()

        def fail() -> None:
            raise error

        with pytest.raises(type(error)):
            await servicer._run(fail)
        servicer._engine.stop(LIMIT_S)
        ends = asyncio.ensure_future(servicer.wait_failure())
        done, _ = await asyncio.wait([ends], timeout=0.01)
        if done:
            with pytest.raises(type(error)):
                ends.result()
        ends.cancel()
        return bool(done)

    assert asyncio.run(run()) == is_end


@pytest.mark.parametrize(
    ("error", "told", "is_end"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700), RuntimeError, True),
        (torch.OutOfMemoryError("no room for its tensors"), RequestAborted, False),
        (IndexError("a file that nobody expected"), RequestAborted, False),
        (InvalidRequest("rank 99 is too large"), InvalidRequest, False),
    ],
)
def test_an_adapter_that_a_shard_cannot_load_ends_the_shard_only_if_its_device_has_failed(
    error: Exception, told: type[Exception], is_end: bool
) -> None:
    """The first rank fails the adapter's sequences at once, or loses the shard at once."""

    class FailingLoader:
        def load_part(self, slot: int, adapter: Adapter) -> Future[None]:
            future = Future[None]()
            future.set_exception(error)
            return future

    async def run() -> bool:
        servicer = make_servicer()
        servicer._runner = cast(Any, SimpleNamespace(finish_steps=lambda: None))
        servicer._loader = cast(Any, FailingLoader())
        servicer._attachment = _Attachment(7, {}, ())
        request = shard_pb2.LoadAdapterRequest(attachment_id=7, adapter=encode_adapter(Adapter("a", "0" * 64, "/a")))
        with pytest.raises(told, match=str(error)):
            await servicer.LoadAdapter(request, cast(Any, None))
        servicer._engine.stop(LIMIT_S)
        return servicer._failure.done() and servicer._failure.exception() is error

    assert asyncio.run(run()) == is_end


async def watch(servicer: ShardServicer) -> None:
    """Longer than a stall may take, on the watchdog's clock."""
    for index in range(12):
        await servicer.watchdog.check(index * STALL_S / 4)


def test_a_shard_whose_engine_thread_is_stuck_ends() -> None:
    async def run() -> None:
        servicer, may_end = make_servicer(), threading.Event()
        await watch(servicer)
        assert not servicer._failure.done(), "it has nothing to do"
        call = asyncio.ensure_future(servicer._run(may_end.wait, LIMIT_S))
        await asyncio.sleep(0)
        await watch(servicer)
        with pytest.raises(DeviceError, match="has made no progress for 2"):
            await servicer.wait_failure()
        may_end.set()
        await call
        servicer._engine.stop(LIMIT_S)

    asyncio.run(run())


def test_a_shard_that_waits_for_the_first_rank_goes_on() -> None:
    async def run() -> None:
        servicer, store = make_servicer(), RankStore.create()
        call = asyncio.ensure_future(servicer._run(servicer._join_groups, store.port, 1))
        while not servicer._is_meeting:  # noqa: ASYNC110  the test's limit bounds it
            await asyncio.sleep(0.001)
        await watch(servicer)
        assert servicer.watchdog.stall is not None and servicer.watchdog.stall.waits_for == "dense_worker"
        assert not servicer._failure.done()
        store.fail("enough")
        with pytest.raises(PeerError, match="enough"):
            await call
        servicer._engine.stop(LIMIT_S)

    asyncio.run(run())
