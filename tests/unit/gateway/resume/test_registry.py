"""What a gateway process says to the launcher about resumable requests, and what waits while the launcher hangs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from services.gateway.access.client_address import number_of
from services.gateway.resources.repeatable import Repeatable
from services.gateway.resume import registry as registry_module
from services.gateway.resume.recording import Name, Record
from services.gateway.resume.registry import Registry
from services.launch.resumables import SERVICE_NAME, Resumables, ResumablesServicer
from services.pb import resumables_pb2, resumables_pb2_grpc
from services.rpc.server import GrpcServer
from tests.support.running_gateway import run, until


class Launcher(ResumablesServicer):
    """The launcher's service, which notes what it reads, and reads nothing while it hangs."""

    def __init__(self) -> None:
        self.resumables = Resumables(max_number=10_000, max_bytes=2**30, timeout_s=30.0)
        self.heard: list[resumables_pb2.AttachMessage] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        super().__init__(self.resumables)

    async def Attach(
        self, requests: AsyncIterator[resumables_pb2.AttachMessage], context: grpc.aio.ServicerContext
    ) -> None:
        await super().Attach(self._hear(requests), context)

    async def _hear(
        self, requests: AsyncIterator[resumables_pb2.AttachMessage]
    ) -> AsyncIterator[resumables_pb2.AttachMessage]:
        async for message in requests:
            await self.goes_on.wait()
            self.heard.append(message)
            yield message

    def counts(self) -> Counter[str | None]:
        """How many messages of each kind it has read."""
        return Counter(message.WhichOneof("message") for message in self.heard)


def name_of(text: str) -> Name:
    return ("", number_of("address", "unix")), "http", text


def record_of(text: str, num_bytes: int = 10) -> Record:
    return Record(b"f", Repeatable(text), b"m" * num_bytes)


def with_launcher(directory: Path, test: Callable[[Registry, Launcher], Awaitable[None]]) -> None:
    async def body() -> None:
        launcher = Launcher()
        server = GrpcServer(f"unix:{directory}/control.sock", [SERVICE_NAME], 1 << 20)
        resumables_pb2_grpc.add_ResumablesServicer_to_server(launcher, server.server)
        await server.start()
        registry = Registry(f"unix:{directory}/control.sock", "process", 1 << 20)
        running = asyncio.create_task(registry.run(lambda name: None))
        try:
            await test(registry, launcher)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop(0.0)

    run(body())


async def claim(registry: Registry, text: str, num_bytes: int = 10) -> bool:
    """Claims a new request; returns whether the launcher keeps it. It may run in any case."""
    record = record_of(text, num_bytes)
    claimed = await registry.claim(name_of(text), b"f", record)
    assert claimed.record is record
    return claimed.is_kept


def test_what_is_said_to_a_launcher_that_hangs_is_bounded_and_what_it_keeps_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_CLAIMS", 8)

    async def test(registry: Registry, launcher: Launcher) -> None:
        for index in range(5):
            assert await claim(registry, f"kept {index}")
        monkeypatch.setattr(registry_module, "TIMEOUT_S", 0.2)
        launcher.goes_on.clear()
        for group in range(5):  # each claim but the first eight is answered at once
            texts = [f"unknown {group} {index}" for index in range(20)]
            assert not any(await asyncio.gather(*[claim(registry, text) for text in texts]))
            for text in texts:
                registry.forget(name_of(text))
        for index in range(3):
            registry.forget(name_of(f"kept {index}"))
            registry.forget(name_of(f"kept {index}"))  # once is enough
        launcher.goes_on.set()
        monkeypatch.setattr(registry_module, "TIMEOUT_S", 20.0)
        await until(lambda: launcher.counts()["forget"] == 3)
        assert launcher.counts() == {"process": 1, "claim": 5 + 8, "release": 8, "forget": 3}
        assert len(launcher.resumables) == 5 - 3 + 8, "it keeps what was released until its time is over"
        assert await claim(registry, "later")  # its reply is not one of the earlier claims'
        registry.release(name_of("later"))
        await until(lambda: launcher.counts()["release"] == 9)

    with_launcher(tmp_path, test)


def test_the_bytes_of_claims_without_a_reply_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_CLAIM_BYTES", 25_000)

    async def test(registry: Registry, launcher: Launcher) -> None:
        for index in range(5):  # their replies have come, so they do not count
            assert await claim(registry, f"kept {index}", 10_000)
        monkeypatch.setattr(registry_module, "TIMEOUT_S", 0.2)
        launcher.goes_on.clear()
        assert not any(await asyncio.gather(*[claim(registry, f"unknown {index}", 10_000) for index in range(5)]))
        assert not await claim(registry, "small", 10)
        launcher.goes_on.set()
        await until(lambda: launcher.counts()["release"] == 3)
        assert launcher.counts() == {"process": 1, "claim": 5 + 2 + 1, "release": 3}

    with_launcher(tmp_path, test)
