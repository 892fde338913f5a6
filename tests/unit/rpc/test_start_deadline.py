"""The time that a start may take, which each progress of a build extends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from services.common.config import PeerSection
from services.common.errors import PeerError
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.start_deadline import MAX_REPEATS, StartDeadline

BUILDING = "[2/3] middle 1-16@4: building, no plan yet"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def status(loading: str) -> dense_pb2.DenseStatus:
    return dense_pb2.DenseStatus(state=dense_pb2.DenseStatus.LOADING, loading=loading)


def test_without_progress_it_ends_after_the_timeout() -> None:
    clock = Clock()
    deadline = StartDeadline(10.0, clock)
    deadline.note(status(""))
    clock.now += 9.9
    deadline.check("the gateway does not serve")
    clock.now += 0.1
    with pytest.raises(PeerError, match=r"^the gateway does not serve within 10 s$"):
        deadline.check("the gateway does not serve")


def test_each_new_progress_extends_it_and_a_repeated_one_does_not() -> None:
    clock = Clock()
    deadline = StartDeadline(10.0, clock)
    for line in ("[1/3] first: building", "[1/3] first: built", BUILDING):
        clock.now += 9.0
        deadline.note(status(line))
        deadline.check("late")
    for _ in range(3):
        clock.now += 3.0
        deadline.note(status(BUILDING))
        deadline.check("late")
    clock.now += 1.0
    with pytest.raises(PeerError) as error:
        deadline.check("late")
    assert BUILDING in str(error.value) and "launch.start_timeout_s" in str(error.value)


def test_a_worker_that_loads_again_and_again_does_not_extend_it_without_end() -> None:
    clock = Clock()
    deadline = StartDeadline(10.0, clock)
    num_loads = 0
    with pytest.raises(PeerError, match="late"):
        while num_loads < 100:
            for percent in range(0, 100, 25):
                clock.now += 9.0
                deadline.note_progress(f"rank 1: weights: {percent} %")
                deadline.check("late")
            num_loads += 1
    assert num_loads == MAX_REPEATS


class LoadingWorker(dense_pb2_grpc.DenseWorkerServicer):
    async def GetStatus(
        self, request: dense_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseStatus:
        return status(BUILDING)


def test_it_asks_the_dense_worker_also_if_that_listens_later(tmp_path: Path) -> None:
    async def main() -> None:
        clock, address = Clock(), f"unix:{tmp_path}/dense.sock"
        deadline = StartDeadline(10.0, clock)
        watching = asyncio.create_task(deadline.watch(address, PeerSection()))
        server = grpc.aio.server()
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(LoadingWorker(), server)
        await asyncio.sleep(0)
        server.add_insecure_port(address)
        await server.start()
        clock.now += 9.0
        while not deadline._progress:  # noqa: ASYNC110  the test's own timeout bounds it
            await asyncio.sleep(0.01)
        clock.now += 9.0
        deadline.check("late")
        watching.cancel()
        await asyncio.wait([watching])
        await server.stop(None)

    asyncio.run(main())
