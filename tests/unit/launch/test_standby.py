"""A standby's spare: when it is started, when it takes over, and when there is none."""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.common.child_options import ChildOptions
from services.common.config import Config, load_config
from services.common.errors import ConfigError, PeerError
from services.launch import standby
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE, SECTIONS, Child
from services.launch.children import Children
from services.launch.ctl import describe_standby
from services.launch.early_services import EarlyServices
from services.launch.service import Launcher
from services.launch.service_configs import with_address
from services.launch.standby import Standby
from services.launch.switched_address import SwitchedAddress
from services.pb import launch_pb2
from tests.support.workers.replaced_workers import FakeChild, State, path_of

TIMEOUT_S = 30.0


class World:
    """A launcher with a dense worker `first` and its standby, whose spares are in `spares`."""

    def __init__(
        self, directory: Path, mode: str, change: Callable[[FakeChild], None], overrides: Sequence[str]
    ) -> None:
        self.calls: list[str] = []
        self.link = directory / "dense.sock"
        self.children = Children()
        self.spares: list[FakeChild] = []
        self.running: asyncio.Task[None]
        usual = ["peers.rpc_timeout_s=1", "launch.max_restarts=2", "launch.start_timeout_s=20"]
        config = load_config(None, [*usual, *overrides])
        address = SwitchedAddress(f"unix:{self.link}")
        config = with_address(config, "dense_worker", address.new_address())
        address.point_to(config.dense.address)

        def make_child(name: str, role: str, config: Config, options: ChildOptions) -> FakeChild:
            child = FakeChild(name, config, options, self.calls, directory)
            child.weights_hash = "" if mode == "imports" else child.weights_hash
            self.spares.append(child)
            change(child)
            return child

        self.first = FakeChild("first", config, ChildOptions(stated_weights_hash="beef"), self.calls, directory)
        self.standby = Standby("dense_worker", mode, self.children, address, make_child, config.launch)

    @property
    def state(self) -> launch_pb2.StandbyStatus.State:
        return self.standby.status().state

    async def until(self, is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_ready(self) -> FakeChild:
        await self.until(lambda: self.state == launch_pb2.StandbyStatus.READY)
        return self.spares[-1]

    async def die(self, child: FakeChild) -> bool:
        """Kills the present worker; returns whether a standby takes over."""
        await child.die()
        return self.standby.succeed(child)


@asynccontextmanager
async def world(
    directory: Path,
    mode: str = "auto",
    change: Callable[[FakeChild], None] = lambda child: None,
    overrides: Sequence[str] = (),
) -> AsyncIterator[World]:
    made = World(directory, mode, change, overrides)
    made.children.start(made.first)
    running = made.running = asyncio.create_task(made.standby.run())
    try:
        yield made
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.standby.close()
        await made.children.stop(1.0)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "POLL_S", 0.01)
    monkeypatch.setattr(standby, "RETRY_S", 0.01)


def run(test: Callable[[], object]) -> None:
    asyncio.run(test())


def test_a_spare_is_started_when_the_worker_serves_and_takes_over_when_it_dies(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as it:
            it.first.state = State.LOADING
            await asyncio.sleep(0.1)
            assert not it.spares
            it.first.state = State.SERVING
            spare = await it.until_ready()
            assert spare.options.standby == "auto" and spare.options.has_predecessor
            assert spare.options.stated_weights_hash == "beef", "it must go on with the same keys and values"
            assert it.link.resolve() == path_of(it.first)
            it.first.num_restarts = 3
            assert await it.die(it.first)
            assert it.link.resolve() == path_of(spare)
            assert list(it.children) == [spare]
            assert spare.num_restarts == 4 and spare.options.standby is None
            await it.until(lambda: f"{spare.name} take over" in it.calls)
            await it.until(lambda: len(it.spares) == 2)
            assert it.standby.status().num_take_overs == 1

    run(main)


def test_without_a_spare_that_is_ready_the_worker_is_restarted(tmp_path: Path) -> None:
    def load(child: FakeChild) -> None:
        child.state = State.LOADING

    async def main() -> None:
        async with world(tmp_path, change=load) as it:
            assert not it.standby.succeed(it.first), "there is no spare yet"
            await it.until(lambda: bool(it.spares))
            await asyncio.sleep(0.1)
            assert it.state == launch_pb2.StandbyStatus.STARTING
            assert not it.standby.succeed(it.first)
            assert it.link.resolve() == path_of(it.first)

    run(main)


def test_a_spare_that_dies_is_replaced_a_bounded_number_of_times(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as it:
            for number in (1, 2, 3):
                await it.until(lambda number=number: len(it.spares) == number)
                spare = await it.until_ready()
                await spare.die()
            await it.until(lambda: it.state == launch_pb2.StandbyStatus.OFF)
            assert "3 times within 60 s, the limit is 2 restarts" in it.standby.status().reason
            assert "none, it ended 3 times" in describe_standby(it.standby.status())
            assert not await it.die(it.first)

    run(main)


@pytest.mark.parametrize("num_failures", [2, 3])
def test_a_spare_that_cannot_be_started_counts_as_one_that_has_died(tmp_path: Path, num_failures: int) -> None:
    def fill(child: FakeChild) -> None:
        if len(it.spares) <= num_failures:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        nonlocal it
        async with world(tmp_path, change=fill) as it:
            await it.until(lambda: it.state != launch_pb2.StandbyStatus.STARTING)
            assert len(it.spares) == 3, "launch.max_restarts is 2"
            assert it.state == (launch_pb2.StandbyStatus.OFF if num_failures == 3 else launch_pb2.StandbyStatus.READY)
            assert ("No space left" in it.standby.status().reason) == (num_failures == 3)

    it: World
    run(main)


def test_a_worker_whose_address_cannot_be_switched_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with world(tmp_path) as it:
            spare = await it.until_ready()
            with monkeypatch.context() as patched:
                patched.setattr(Path, "symlink_to", fill)
                assert not await it.die(it.first)
            assert it.link.resolve() == path_of(it.first) and list(it.children) == [it.first]
            assert it.standby.succeed(it.first) and it.link.resolve() == path_of(spare), "there is room again"

    run(main)


def test_the_end_of_a_spare_is_logged_with_its_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as it:
            spare = await it.until_ready()
            with capture_logs() as entries:
                await spare.die()
                await it.until(lambda: len(it.spares) == 2)
            [end] = [each for each in entries if each["event"] == "the standby has ended"]
            assert end["pid"] == spare.pid and isinstance(spare.pid, int)

    run(main)


def test_spares_that_never_get_ready_are_given_up_however_long_each_takes(tmp_path: Path) -> None:
    def never_load(child: FakeChild) -> None:
        child.state = State.LOADING

    async def main() -> None:
        # The window is shorter than what a spare gets to be ready, as by default.
        overrides = ["launch.start_timeout_s=0.2", "launch.restart_window_s=0.1"]
        async with world(tmp_path, change=never_load, overrides=overrides) as it:
            for number in (1, 2, 3):
                await it.until(lambda number=number: len(it.spares) == number)
                spare = it.spares[-1]
                await it.until(lambda spare=spare: any(f"{spare.name} kill" in call for call in it.calls))
                await spare.die("not ready")
            await it.until(lambda: it.state == launch_pb2.StandbyStatus.OFF)
            assert "3 times before it was ready, the limit is 2 restarts" in it.standby.status().reason

    run(main)


def test_spares_that_were_ready_count_only_within_the_window(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, overrides=["launch.restart_window_s=0.001"]) as it:
            for number in range(1, 6):
                await it.until(lambda number=number: len(it.spares) == number)
                await (await it.until_ready()).die()
            await it.until(lambda: len(it.spares) == 6)
            assert not it.standby.status().reason

    run(main)


def test_a_spare_that_refuses_to_take_over_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, change=lambda child: child.refuses.add("take over")) as it:
            spare = await it.until_ready()
            assert await it.die(it.first)
            await it.until(lambda: any(f"{spare.name} kill: it does not take over" in call for call in it.calls))

    run(main)


@pytest.mark.parametrize("mode", ["auto", "loaded"])
def test_what_a_spare_lacks_is_an_error_if_it_was_asked_for_explicitly(tmp_path: Path, mode: str) -> None:
    def fail(child: FakeChild) -> None:
        child.state, child.last_return_code = State.LOADING, 1
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(child.die("no room for 5 bytes")))

    async def main() -> None:
        async with world(tmp_path, mode, fail) as it:
            await it.until(lambda: it.state == launch_pb2.StandbyStatus.OFF or bool(it.running.done()))
            assert it.standby.status().reason == ("no room for 5 bytes" if mode == "auto" else "")
            assert len(it.spares) == 1

    if mode == "auto":
        run(main)
    else:
        with pytest.raises(PeerError, match=r"launch\.standby_dense is 'loaded', and the standby ended: no room for 5"):
            run(main)


@pytest.mark.parametrize(("mode", "is_taken"), [("loaded", True), ("loaded", False), ("imports", True)])
def test_a_replacement_takes_a_spare_with_weights_or_stops_it(tmp_path: Path, mode: str, is_taken: bool) -> None:
    async def main() -> None:
        async with world(tmp_path, mode) as it:
            spare = await it.until_ready()
            async with it.standby.suspended(is_taken=is_taken) as taken:
                if mode == "loaded" and is_taken:
                    assert taken is not None and taken is spare and not spare.is_over
                else:
                    assert taken is None and spare.is_over
                assert it.standby.spare is None
                await asyncio.sleep(0.1)
                assert len(it.spares) == 1, "no other one is started meanwhile"
            await it.until(lambda: len(it.spares) == 2)
            if taken is not None:
                await taken.die()

    run(main)


def test_a_worker_at_a_port_has_a_standby_only_by_mistake(tmp_path: Path) -> None:
    async def main() -> None:
        address = SwitchedAddress("127.0.0.1:50052")
        section = load_config(None).launch
        with pytest.raises(ConfigError, match=r"launch\.standby_dense is 'loaded': it needs a worker at a Unix socket"):
            Standby("dense_worker", "loaded", Children(), address, FakeChild, section)
        status = Standby("dense_worker", "auto", Children(), address, FakeChild, section).status()
        assert status.state == launch_pb2.StandbyStatus.OFF and "TCP port" in status.reason

    run(main)


def expect_one_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services and the spares of both workers are stopped at the same time, or the test fails."""
    stopping: list[object] = []
    are_stopping = asyncio.Event()

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        async def stop(self: object, *arguments: Any) -> None:
            stopping.append(self)
            if len(stopping) == 3:
                are_stopping.set()
            try:
                await asyncio.wait_for(are_stopping.wait(), TIMEOUT_S)
            finally:
                await method(self, *arguments)

        return stop

    monkeypatch.setattr(Standby, "close", wrap(Standby.close))
    monkeypatch.setattr(Children, "stop", wrap(Children.stop))


def test_in_a_launcher_a_ready_spare_is_the_worker_that_has_died_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "module", "tests.support.workers.scripted_service")
    keys = ("attention.address", "dense.address", "gateway.address", "gateway.http_address")
    config = load_config(None, ["launch.stop_grace_s=5", *(f"{key}=unix:{tmp_path}/{key}" for key in keys)])
    arguments = argparse.Namespace(prompt=None, sample_prompt=None, api_key=None)
    launcher = Launcher(config, arguments, asyncio.Event(), "twostroke chat", EarlyServices())

    async def until(is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def are_ready() -> bool:
        return all(each.status().state == launch_pb2.StandbyStatus.READY for each in launcher._standbys.values())

    async def main() -> None:
        expect_one_grace_period(monkeypatch)
        await launcher.start()
        running = asyncio.create_task(launcher.run())
        standbys, children = launcher._standbys, launcher._children
        try:
            await until(are_ready)
            for role in (DENSE_ROLE, ATTENTION_ROLE):
                [present], spare = children.of_role(role), standbys[role, 0].spare
                assert spare is not None and present.pid is not None
                os.kill(present.pid, signal.SIGKILL)
                await until(lambda role=role, present=present: children.of_role(role) != [present])
                assert children.of_role(role) == [spare] and spare.is_running and present.num_restarts == 0
                assert standbys[role, 0].status().num_take_overs == 1
                link = tmp_path / f"{SECTIONS[role]}.address"
                assert str(link.resolve()) == spare.address.removeprefix("unix:")
            await until(are_ready)
            unhandled: list[object] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
            dead = standbys[DENSE_ROLE, 0].spare
            assert dead is not None and dead.pid is not None
            os.kill(dead.pid, signal.SIGKILL)
            await until(lambda: standbys[DENSE_ROLE, 0].spare not in (dead, None))
            await until(are_ready)
            gc.collect()
            assert not unhandled, "the end of a spare is an event that is logged in one line"
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await launcher.stop()

    run(main)
