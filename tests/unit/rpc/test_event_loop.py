"""All events of gRPC that have come are handled with one wake-up of the event loop."""

from __future__ import annotations

import asyncio
import functools
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc import server
from services.rpc.server import EventLoop, GrpcServer
from tests.support.cluster import REPOSITORY

NUM_EVENTS = 200  # as many bytes fit into a socket pair


class EventQueue:
    """What gRPC has: events, a byte for each, and a reader that takes one byte and all events."""

    def __init__(self, wakeups: socket.socket) -> None:
        self.events = deque[int]()
        self.handled = list[int]()
        self.num_calls = 0
        self._wakeups = wakeups

    def handle_events(self, loop: asyncio.AbstractEventLoop) -> None:
        assert len(self._wakeups.recv(1)) == 1
        self.num_calls += 1
        while self.events:
            self.handled.append(self.events.popleft())


def test_all_wake_ups_that_have_come_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cygrpc, "PollerCompletionQueue", EventQueue)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        reading, writing = socket.socketpair()
        with reading, writing:
            queue = EventQueue(reading)
            loop.add_reader(reading, functools.partial(queue.handle_events, loop))
            for first in (0, NUM_EVENTS):
                for number in range(first, first + NUM_EVENTS):
                    queue.events.append(number)
                    writing.send(b"1")
                for _ in range(NUM_EVENTS // 2):  # iterations; one for each byte would not be enough
                    await asyncio.sleep(0)
                assert queue.handled == list(range(first + NUM_EVENTS))
                reading.setblocking(False)
                with pytest.raises(BlockingIOError):
                    reading.recv(1)
                reading.setblocking(True)
            assert queue.num_calls == 2
            loop.remove_reader(reading)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(test())


def test_the_reader_of_grpc_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    handle, num_wakeups = server._handle_events, 0

    def count(*arguments: object) -> None:
        nonlocal num_wakeups
        num_wakeups += 1
        handle(*arguments)

    monkeypatch.setattr(server, "_handle_events", count)

    async def test() -> None:
        grpc_server = GrpcServer(f"unix:{tmp_path}/server.sock", [], 2**20)
        async with grpc.aio.insecure_channel(await grpc_server.start()) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        await grpc_server.stop(0.0)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(test())
    assert num_wakeups > 0


def test_services_run_in_such_a_loop() -> None:
    program = (
        "import asyncio; from services.rpc.server import run_service\n"
        "async def main(): print(type(asyncio.get_running_loop()).__name__)\n"
        "run_service(main())"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["EventLoop"], ended.stderr
