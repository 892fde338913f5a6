"""Attention workers that `ctl` adds or drains, when it goes away in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from services.common.child_options import ChildOptions
from services.common.config import MAX_MESSAGE_BYTES, Config
from services.common.errors import PeerError
from services.launch.attention_workers import AttentionWorkers
from services.launch.child import ATTENTION_ROLE
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.client import open_channel

LIMIT_S = 30.0


class Dense(dense_pb2_grpc.DenseWorkerServicer):
    """Does what it is asked, and notes it."""

    def __init__(self, events: list[str], answers: bool = True) -> None:
        self._events, self._answers = events, answers
        self.was_asked = asyncio.Event()

    async def _answer(self, event: str) -> None:
        self.was_asked.set()
        if not self._answers:
            await asyncio.Event().wait()
        self._events.append(event)

    async def AddAttentionWorker(
        self, request: dense_pb2.AddAttentionWorkerRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.AddAttentionWorkerReply:
        await self._answer("asked to add")
        return dense_pb2.AddAttentionWorkerReply()

    async def RemoveAttentionWorker(
        self, request: dense_pb2.RemoveAttentionWorkerRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.RemoveAttentionWorkerReply:
        await self._answer("asked to remove")
        return dense_pb2.RemoveAttentionWorkerReply()

    async def GetStatus(
        self, request: dense_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseStatus:
        return dense_pb2.DenseStatus(state=dense_pb2.DenseStatus.SERVING)


@contextlib.asynccontextmanager
async def serving(dense: Dense, address: str) -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server()
    dense_pb2_grpc.add_DenseWorkerServicer_to_server(dense, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


class Launcher:
    """What `AttentionWorkers` uses of a launcher. `events` has what it does, in order."""

    def __init__(self, directory: Path) -> None:
        self.events = list[str]()
        self.is_disk_full = False
        self.is_telling, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.may_go_on.set()
        self.address = f"unix:{directory}/dense.sock"
        config = Config()
        note = self.events.append
        self.dense: Any = SimpleNamespace(
            open_channel=lambda: open_channel(self.address, MAX_MESSAGE_BYTES),
            config=config,
            reconfigure=self._reconfigure,
        )

        async def wait(grace_s: float) -> None:
            note("ended")

        is_stopped = asyncio.Event()

        def stop() -> None:
            note("stopped")
            is_stopped.set()

        def start() -> None:
            self.child.watching = asyncio.ensure_future(is_stopped.wait())

        async def end() -> None:
            stop()
            await wait(0.0)

        async def forget(child: object) -> None:
            note("forgotten")

        self.child: Any = SimpleNamespace(
            name=f"{ATTENTION_ROLE}-1",
            role=ATTENTION_ROLE,
            options=ChildOptions(attention_index=1),
            address=f"unix:{directory}/attn.sock",
            config=config,
            pid=1,
            stop=stop,
            wait=wait,
            start=start,
            end=end,
        )
        self.children: Any = Children([self.child], self.dense)
        self.children.forget = forget
        self.children.adopt = lambda child: child.watching.cancel()
        standby: Any = SimpleNamespace(suspended=self._suspended)
        self.workers = AttentionWorkers(self.children, self._make_child, standby, config, directory)

    def _make_child(self, *arguments: object) -> Any:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.child

    def _reconfigure(self, config: Config) -> None:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.events.append("told")
        self.dense.config = config

    @contextlib.asynccontextmanager
    async def _suspended(self, *, is_taken: bool) -> AsyncIterator[None]:
        self.is_telling.set()
        await self.may_go_on.wait()
        yield


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT_S))


def test_a_worker_that_was_drained_is_stopped_even_if_the_caller_goes_away(tmp_path: Path) -> None:
    async def drain() -> None:
        launcher = Launcher(tmp_path)
        launcher.may_go_on.clear()
        async with serving(Dense(launcher.events), launcher.address):
            draining = asyncio.create_task(launcher.workers.drain(launcher.child.name, LIMIT_S))
            await launcher.is_telling.wait()
            draining.cancel()
            await asyncio.sleep(0)
            launcher.may_go_on.set()
            await asyncio.gather(draining, return_exceptions=True)
        assert launcher.events == ["asked to remove", "told", "asked to remove", "stopped", "ended", "forgotten"]

    run(drain())


class Silent(Dense):
    """Does what it is asked first, but nobody gets the answer."""

    async def _answer(self, event: str) -> None:
        self._events.append(event)
        if not self.was_asked.is_set():
            self.was_asked.set()
            await asyncio.Event().wait()


def test_a_change_whose_caller_goes_away_before_the_answer_is_undone(tmp_path: Path) -> None:
    async def cancel() -> None:
        launcher = Launcher(tmp_path)
        for change, expected in (
            (lambda: launcher.workers.drain(launcher.child.name, LIMIT_S), ["asked to remove", "asked to add"]),
            (launcher.workers.add, ["asked to add", "stopped", "ended", "asked to remove"]),
        ):
            launcher.events.clear()
            dense = Silent(launcher.events)
            async with serving(dense, launcher.address):
                changing = asyncio.ensure_future(change())
                await dense.was_asked.wait()
                changing.cancel()
                await asyncio.gather(changing, return_exceptions=True)
            assert launcher.events == expected

    run(cancel())


@pytest.mark.parametrize("num_turns", range(10))
def test_a_worker_that_dies_when_it_has_just_been_attached_is_started_again_or_not_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """After so many turns of the event loop. A child that may not restart would end the launcher with its error."""

    async def add() -> None:
        launcher = Launcher(tmp_path)
        child, loop = launcher.child, asyncio.get_running_loop()
        child.may_restart, child.last_end, has_died = False, "signal SIGKILL", loop.create_future()
        child.start = lambda: setattr(child, "watching", loop.create_future())
        launcher.children.adopt = lambda child: launcher.events.append("adopted")

        def die(num_left: int) -> None:
            if num_left:
                loop.call_soon(die, num_left - 1)
                return
            if not child.may_restart:
                child.watching.set_exception(PeerError("attn_worker ended before the cluster could serve"))
            has_died.set_result(child.may_restart)

        async def attach(*_: object) -> None:
            if not has_died.done() and "asked" not in launcher.events:
                launcher.events.append("asked")
                loop.call_soon(die, num_turns)

        monkeypatch.setattr(launcher.workers, "_ask_dense", attach)
        try:
            await launcher.workers.add()
        except PeerError as error:
            assert "it ended: signal SIGKILL" in str(error) and "adopted" not in launcher.events
        else:
            assert await has_died and "adopted" in launcher.events

    run(add())


def test_the_successor_of_a_dense_worker_that_dies_meanwhile_is_asked_to_drain(tmp_path: Path) -> None:
    async def drain() -> None:
        launcher = Launcher(tmp_path)
        dies = Dense([], answers=False)
        async with serving(dies, launcher.address) as server:
            draining = asyncio.create_task(launcher.workers.drain(launcher.child.name, LIMIT_S))
            await dies.was_asked.wait()
            await server.stop(0)
        async with serving(Dense(launcher.events), launcher.address):
            await draining
        assert launcher.events == ["asked to remove", "told", "asked to remove", "stopped", "ended", "forgotten"]

    run(drain())


def test_a_dense_worker_that_starts_before_its_successors_are_told_is_asked_to_add(tmp_path: Path) -> None:
    async def add() -> None:
        launcher = Launcher(tmp_path)
        launcher.may_go_on.clear()
        async with serving(Dense([]), launcher.address):
            adding = asyncio.create_task(launcher.workers.add())
            await launcher.is_telling.wait()
        async with serving(Dense(launcher.events), launcher.address):  # another one, which does not know of it
            launcher.may_go_on.set()
            await adding
        assert launcher.events == ["told", "asked to add"]
        assert launcher.dense.config.attention.addresses == (launcher.child.address,)

    run(add())


def test_on_a_full_disk_no_worker_is_added_or_drained(tmp_path: Path) -> None:
    async def change() -> None:
        launcher = Launcher(tmp_path)
        launcher.is_disk_full = True
        async with serving(Dense(launcher.events), launcher.address):
            with pytest.raises(PeerError, match=r"no attention worker was added: .*No space left"):
                await launcher.workers.add()
            assert launcher.events == []
            with pytest.raises(PeerError, match=r"attn_worker-1 was not drained: .*No space left"):
                await launcher.workers.drain(launcher.child.name, LIMIT_S)
        assert launcher.events == ["asked to remove", "asked to add"]

    run(change())


def test_on_a_disk_that_becomes_full_meanwhile_no_worker_is_added(tmp_path: Path) -> None:
    async def add() -> None:
        launcher = Launcher(tmp_path)
        launcher.may_go_on.clear()
        launcher.children.adopt = lambda child: launcher.events.append("adopted")
        async with serving(Dense(launcher.events), launcher.address):
            adding = asyncio.create_task(launcher.workers.add())
            await launcher.is_telling.wait()
            launcher.is_disk_full = True
            launcher.may_go_on.set()
            with pytest.raises(PeerError, match=r"no attention worker was added: .*No space left"):
                await adding
        assert launcher.events == ["asked to add", "stopped", "ended", "asked to remove"]

    run(add())


class Children(list[Any]):
    def __init__(self, workers: list[Any], dense: Any) -> None:
        super().__init__(workers)
        self._dense = dense

    def of_role(self, role: str) -> list[Any]:
        return [self._dense]
