"""What `WorkerLoad` reports for workers that answer, are missing or slow, and with many readers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from services.common.config import PeerSection
from services.gateway.link import worker_load
from services.gateway.link.worker_load import CacheLoad, Load, RequestLoad, ServiceLoad, WorkerLoad
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc, launch_pb2, launch_pb2_grpc
from tests.support.running_gateway import run


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives workers more time to answer, since the machine may be busy with other tests."""
    monkeypatch.setattr(worker_load, "ANSWER_TIMEOUT_S", 20.0)


class BusyDense(dense_pb2_grpc.DenseWorkerServicer):
    def __init__(self) -> None:
        self.num_asked = 0

    async def GetStatus(
        self, request: dense_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseStatus:
        self.num_asked += 1
        return dense_pb2.DenseStatus(num_running=3, num_waiting=2, num_steps=9, num_preemptions=1)


class BusyAttention(attn_pb2_grpc.AttentionWorkerServicer):
    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def GetStatus(
        self, request: attn_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> attn_pb2.AttentionStatus:
        await asyncio.sleep(self.delay_s)
        return attn_pb2.AttentionStatus(num_blocks=100, num_free_blocks=60, num_cached_blocks=7, num_cached_tokens=5)


REQUESTS, CACHE = RequestLoad(3, 2, 9, 1), CacheLoad(100, 60, 0, 7, 0, 5)


class Launcher(launch_pb2_grpc.LauncherServicer):
    async def GetStatus(
        self, request: launch_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> launch_pb2.LauncherStatus:
        status = launch_pb2.LauncherStatus()
        dense = {"role": "dense_worker", "name": "dense_worker"}
        status.services.add(**dense, pid=7, num_restarts=2, last_end="killed by SIGKILL")
        status.services.add(role="gateway", name="gateway", num_restarts=1)
        status.standbys.add(**dense, state=launch_pb2.StandbyStatus.READY)
        return status


@contextlib.asynccontextmanager
async def running_workers(
    directory: Path, dense: BusyDense | None, attention: BusyAttention | None, *, has_launcher: bool = False
) -> AsyncIterator[WorkerLoad]:
    server = grpc.aio.server()
    if dense is not None:
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(dense, server)
    if attention is not None:
        attn_pb2_grpc.add_AttentionWorkerServicer_to_server(attention, server)
    launch_pb2_grpc.add_LauncherServicer_to_server(Launcher(), server)
    address = f"unix:{directory}/workers.sock"
    server.add_insecure_port(address)
    await server.start()
    load = WorkerLoad(address, address, PeerSection(), launcher_address=address if has_launcher else None)
    try:
        yield load
    finally:
        await load.close()
        await server.stop(None)


def test_the_load_of_both_workers_is_reported(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_workers(tmp_path, BusyDense(), BusyAttention()) as load:
            assert await load.read() == Load(REQUESTS, CACHE)

    run(test())


def test_the_launcher_tells_restarts_and_standbys_and_nothing_more(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_workers(tmp_path, BusyDense(), BusyAttention(), has_launcher=True) as load:
            services = (await load.read()).services
        assert services == (
            ServiceLoad("dense_worker", 2, is_running=True, standby="ready"),
            ServiceLoad("gateway", 1, is_running=False, standby=None),
        )

    run(test())


def test_the_load_of_a_missing_worker_is_none(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_workers(tmp_path, BusyDense(), None) as load:
            assert await load.read() == Load(REQUESTS, None)

    run(test())


def test_the_load_of_a_slow_worker_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_load, "ANSWER_TIMEOUT_S", 0.5)

    async def test() -> None:
        async with running_workers(tmp_path, BusyDense(), BusyAttention(delay_s=60.0)) as load:
            assert (await load.read()).kv_cache is None

    run(test())


def test_many_readers_cause_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_load, "MAX_AGE_S", 3600.0)

    async def test() -> None:
        dense = BusyDense()
        async with running_workers(tmp_path, dense, BusyAttention()) as load:
            loads = await asyncio.gather(*(load.read() for _ in range(20)))
            loads.append(await load.read())
        assert loads == [Load(REQUESTS, CACHE)] * 21
        assert dense.num_asked == 1

    run(test())


def test_an_old_reading_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_load, "MAX_AGE_S", 0.0)

    async def test() -> None:
        dense = BusyDense()
        async with running_workers(tmp_path, dense, BusyAttention()) as load:
            await load.read()
            await load.read()
        assert dense.num_asked == 2

    run(test())


def test_a_cancelled_reader_does_not_cancel_other_readers(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_workers(tmp_path, BusyDense(), BusyAttention(delay_s=0.2)) as load:
            first = asyncio.create_task(load.read())
            second = asyncio.create_task(load.read())
            await asyncio.sleep(0)
            first.cancel()
            assert (await second).kv_cache == CACHE

    run(test())


def test_closing_cancels_a_running_reading(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_workers(tmp_path, BusyDense(), BusyAttention(delay_s=60.0)) as load:
            reader = asyncio.create_task(load.read())
            await asyncio.sleep(0.05)
            await load.close()
            with pytest.raises(asyncio.CancelledError):
                await reader

    run(test())
