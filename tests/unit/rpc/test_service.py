"""A service is started, run, and always stopped, even after an error in its start."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.rpc.server import GrpcServer, serve
from tests.support.cluster import REPOSITORY


class RecordedService:
    """Records its calls. The one named `failing` fails; `run` waits to be cancelled."""

    def __init__(self, failing: str | None = None) -> None:
        self.calls: list[str] = []
        self._failing = failing

    async def start(self) -> None:
        self._record("start")

    async def run(self) -> None:
        self._record("run")
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self._record("stop")

    def _record(self, name: str) -> None:
        self.calls.append(name)
        if name == self._failing:
            raise RuntimeError(f"{name} fails")


@pytest.mark.parametrize(("failing", "calls"), [("start", ["start", "stop"]), ("run", ["start", "run", "stop"])])
def test_a_service_that_fails_is_stopped_and_its_error_raised(failing: str, calls: list[str]) -> None:
    service = RecordedService(failing)
    with pytest.raises(RuntimeError, match=f"{failing} fails"):
        asyncio.run(serve(lambda: service))
    assert service.calls == calls


def test_a_service_that_is_cancelled_is_stopped() -> None:
    service = RecordedService()

    async def cancel_it() -> None:
        serving = asyncio.create_task(serve(lambda: service))
        while "run" not in service.calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(cancel_it())
    assert service.calls == ["start", "run", "stop"]


def test_a_service_that_is_cancelled_again_while_it_stops_is_stopped_to_the_end() -> None:
    class SlowService(RecordedService):
        async def stop(self) -> None:
            self._record("stop")
            await may_end.wait()
            self._record("stopped")

    service, may_end = SlowService(), asyncio.Event()

    async def cancel_it_twice() -> None:
        serving = asyncio.create_task(serve(lambda: service))
        for call in ("run", "stop"):
            while call not in service.calls:  # noqa: ASYNC110
                await asyncio.sleep(0)
            serving.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(cancel_it_twice())
    assert service.calls == ["start", "run", "stop", "stopped"]


def test_a_call_that_came_just_before_the_end_has_begun_when_its_server_has_stopped(tmp_path: Path) -> None:
    async def test() -> None:
        server, begun, tasks = GrpcServer(f"unix:{tmp_path}/server.sock", [], 2**20), asyncio.Event(), []
        await server.start()
        stop = server.server.stop

        async def stop_late(grace_s: float) -> None:
            await stop(grace_s)
            tasks.append(asyncio.create_task(begin()))  # as gRPC does for each call

        async def begin() -> None:
            begun.set()

        server.server.stop = stop_late
        await server.stop(0.0)
        assert begun.is_set()

    asyncio.run(test())


def test_a_bug_in_a_constructor_ends_the_process_like_any_other_bug() -> None:
    program = "from services.rpc.server import run_service, serve; run_service(serve(lambda: 1 / 0))"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 70  # EX_SOFTWARE of sysexits.h
    assert "ZeroDivisionError" in ended.stdout + ended.stderr


def test_a_grpc_server_that_cannot_listen_says_why_and_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, sentence in (
            (f"127.0.0.1:{port}", "port in use; stop the other server, or choose another port by --set dense.address="),
            ("192.0.2.1:9", "address not of this host; choose one of its own by --set dense.address=HOST:9"),
        ):

            async def start(address: str = address) -> None:
                await GrpcServer(address, [], 4096, setting="dense.address").start()

            with pytest.raises(ConfigError, match=re.escape(f"cannot listen on dense.address {address}: {sentence}")):
                asyncio.run(start())
