"""All outcomes of a replacement of the dense worker: which worker serves at the end, and which calls were made."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.common.config import dump_config, load_config
from services.common.errors import ConfigError, InvalidRequest, PeerError, RolledBack, TwostrokeError
from services.launch.switched_address import SwitchedAddress
from services.pb import dense_pb2
from services.pb.launch_pb2 import ReplaceDenseRequest
from tests.support.workers.replaced_workers import FakeChild, State, World


def nothing(world: World) -> None:
    """Changes nothing."""


def run(
    directory: Path, prepare: Callable[[World], None], *overrides: str, **caches: Any
) -> tuple[World, str | TwostrokeError]:
    async def main() -> tuple[World, str | TwostrokeError]:
        world = World(directory, prepare)
        try:
            return world, await world.replace(*overrides, **caches)
        except TwostrokeError as error:
            return world, error

    return asyncio.run(main())


def test_the_new_worker_takes_over_after_the_old_one_has_left(tmp_path: Path) -> None:
    world, backend = run(tmp_path, nothing, "dense.num_threads=1")
    assert backend == "backend of new"
    assert world.calls[:4] == ["old leave", "new take over", "new compute", "old stop"]
    assert world.serves == "new" and world.members == ["new"]
    assert world.new is not None
    assert world.new.options.standby is None, "after a restart it must attach at once"
    assert world.new.options.has_predecessor, "after a restart, too, the old one may still end"
    assert load_config(world.new.config_file).dense.num_threads == 1
    assert world.new.may_restart


@pytest.mark.parametrize("drops_caches", [False, True])
def test_other_weights_are_refused_before_the_old_worker_leaves(tmp_path: Path, drops_caches: bool) -> None:
    def prepare(world: World) -> None:
        world.change_new = lambda child: setattr(child, "weights_hash", "0ther")

    world, result = run(tmp_path, prepare, drops_caches=drops_caches)
    if drops_caches:
        assert result == "backend of new" and world.serves == "new"
    else:
        assert isinstance(result, RolledBack) and "0ther" in str(result) and "c0ffee" in str(result)
        assert world.calls[0] == "new stop" and "old leave" not in world.calls
        assert world.serves == "old" and world.members == ["old"]


def test_running_requests_end_before_the_old_worker_leaves_if_the_change_waits(tmp_path: Path) -> None:
    def prepare(world: World) -> None:
        world.change_new = lambda child: setattr(child, "weights_hash", "0ther")

    wait = ReplaceDenseRequest.WAIT
    world, result = run(tmp_path, prepare, open_requests=wait, wait_timeout_s=2.5)
    assert result == "backend of new" and world.new is not None
    assert world.calls[:3] == ["old drain for 2500 ms", "old leave", "new take over"]
    assert world.new.options.continues_sequences, "those that waited go on with the new weights"


def test_a_worker_whose_requests_do_not_end_in_time_goes_on(tmp_path: Path) -> None:
    def prepare(world: World) -> None:
        world.old.refuses.add("drain for 2500 ms")

    world, result = run(tmp_path, prepare, open_requests=ReplaceDenseRequest.WAIT, wait_timeout_s=2.5)
    assert isinstance(result, RolledBack) and "no drain for 2500 ms today" in str(result)
    assert "old leave" not in world.calls and world.serves == "old"


@pytest.mark.parametrize(("mode", "continues"), [("KEEP", True), ("ABORT", False)])
def test_what_becomes_of_open_requests_with_other_weights(tmp_path: Path, mode: str, continues: bool) -> None:
    def prepare(world: World) -> None:
        world.change_new = lambda child: setattr(child, "weights_hash", "0ther")

    world, result = run(tmp_path, prepare, open_requests=ReplaceDenseRequest.OpenRequests.Value(mode))
    assert result == "backend of new" and world.new is not None
    assert world.new.options.continues_sequences == continues
    assert not any("drain" in call for call in world.calls)


def test_a_worker_that_keeps_caches_states_the_present_hash_also_after_a_restart(tmp_path: Path) -> None:
    world, result = run(tmp_path, nothing, "dense.quantization=fp8", keeps_caches=True)
    assert result == "backend of new" and world.new is not None
    assert world.new.options.stated_weights_hash == "c0ffee" and world.new.options.standby is None


def test_caches_are_not_both_dropped_and_kept(tmp_path: Path) -> None:
    world, result = run(tmp_path, nothing, drops_caches=True, keeps_caches=True)
    assert isinstance(result, InvalidRequest) and "exclude each other" in str(result)
    assert world.new is None and world.serves == "old"


@pytest.mark.parametrize("keeps_caches", [False, True])
@pytest.mark.parametrize("state", [State.LOADING, State.ATTACHING])
def test_nothing_is_started_while_the_present_worker_does_not_serve(
    tmp_path: Path, state: State.State, keeps_caches: bool
) -> None:
    world, result = run(tmp_path, lambda world: setattr(world.old, "state", state), keeps_caches=keeps_caches)
    name = State.State.Name(state).lower()
    assert isinstance(result, RolledBack) and f"does not serve now: it is {name}; nothing was changed" in str(result)
    assert world.new is None and world.serves == "old"


@pytest.mark.parametrize("makes_progress", [True, False])
def test_a_new_worker_may_build_for_as_long_as_it_makes_progress(tmp_path: Path, makes_progress: bool) -> None:
    def prepare(world: World) -> None:
        old = world.old
        old.config_file.write_text(dump_config(old.config.with_values("launch", start_timeout_s=1.0)))
        lines = (f"plan {i}" for i in range(40)) if makes_progress else itertools.repeat("plan 1")  # 40 last 2 s
        world.change_new = lambda child: setattr(child, "loading", lines)

    world, result = run(tmp_path, prepare)
    if makes_progress:
        assert result == "backend of new" and world.serves == "new"
    else:
        assert isinstance(result, RolledBack) and "last progress: plan 1" in str(result)
        assert world.serves == "old" and "old leave" not in world.calls


@pytest.mark.parametrize("call", ["take over", "compute"])
def test_if_the_new_worker_fails_late_the_old_one_continues(tmp_path: Path, call: str) -> None:
    def prepare(world: World) -> None:
        world.change_new = lambda child: child.refuses.add(call)

    world, result = run(tmp_path, prepare)
    assert isinstance(result, RolledBack)
    assert f"no {call} today" in str(result) and f"process {world.old.pid}, goes on" in str(result)
    # The new worker stops before the old one attaches again; otherwise they would replace each other.
    assert world.calls.index("old leave") < world.calls.index("new stop") < world.calls.index("old take over")
    assert world.serves == "old" and world.members == ["old"]


def test_nothing_changes_if_the_new_worker_cannot_be_started(tmp_path: Path) -> None:
    def prepare(world: World) -> None:
        def fill(child: FakeChild) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        world.change_new = fill

    world, result = run(tmp_path, prepare)
    assert isinstance(result, RolledBack) and "No space left" in str(result)
    assert world.serves == "old" and world.members == ["old"] and "old leave" not in world.calls


def test_an_old_worker_continues_if_its_address_cannot_be_switched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(world: World) -> None:
        def fill(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "symlink_to", fill)

    world, result = run(tmp_path, prepare)
    assert isinstance(result, RolledBack) and "No space left" in str(result)
    assert world.serves == "old" and world.members == ["old"] and "old leave" not in world.calls
    assert not world.old._is_stopping, "it is restarted when it dies"


@pytest.mark.parametrize("fails_in", ["take over", "compute"])
def test_an_old_worker_comes_back_to_its_address_although_the_disk_has_become_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def become_full() -> None:
        monkeypatch.setattr(Path, "symlink_to", fill)

    def prepare(world: World) -> None:
        def spoil(child: FakeChild) -> None:
            child.on_call[fails_in] = become_full
            child.refuses.add(fails_in)

        world.change_new = spoil

    world, result = run(tmp_path, prepare)
    assert isinstance(result, RolledBack) and f"no {fails_in} today" in str(result)
    assert world.calls.index("new stop") < world.calls.index("old take over")
    assert world.serves == "old" and world.members == ["old"]
    assert not world.old._is_stopping, "it is restarted when it dies"


@pytest.mark.parametrize("num_turns", range(10))
def test_a_new_worker_that_dies_when_it_has_just_taken_over_does_not_end_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """After so many turns of the event loop: either the old one goes on, or the new one is started again."""

    async def main() -> tuple[World, bool]:
        world = World(tmp_path, nothing)
        monkeypatch.setattr(world.replacer, "_check_service", check)
        world.change_new = lambda child: monkeypatch.setattr(child, "start", partial(start, child))
        try:
            await world.replace()
        except RolledBack:
            return world, True
        return world, False

    def start(child: FakeChild) -> None:
        servers.append(asyncio.create_task(child.watch()))
        child.watching = asyncio.get_running_loop().create_future()

    async def check(new: FakeChild, stub: object) -> dense_pb2.DenseInfo:
        die_after(new, num_turns)
        return dense_pb2.DenseInfo()

    def die_after(new: FakeChild, num_left: int) -> None:
        if num_left:
            asyncio.get_running_loop().call_soon(die_after, new, num_left - 1)
        elif not new.may_restart:
            new.last_end = "signal SIGKILL"
            new.watching.set_exception(PeerError("dense_worker ended before the cluster could serve"))

    servers = list[asyncio.Task[None]]()
    world, was_undone = asyncio.run(main())
    assert world.serves == ("old" if was_undone else "new")
    assert not world.children._failure.done()


def test_an_old_worker_that_cannot_leave_continues(tmp_path: Path) -> None:
    def prepare(world: World) -> None:
        world.old.refuses.add("leave")

    world, result = run(tmp_path, prepare)
    assert isinstance(result, RolledBack) and "no leave today" in str(result)
    assert "new take over" not in world.calls and "old take over" in world.calls
    assert world.serves == "old"


def test_an_old_worker_that_dies_in_standby_is_started_again_if_the_new_one_fails(tmp_path: Path) -> None:
    def prepare(world: World) -> None:
        def spoil(child: FakeChild) -> None:
            child.on_call["compute"] = world.old.die
            child.refuses.add("compute")

        world.change_new = spoil

    world, result = run(tmp_path, prepare)
    assert isinstance(result, RolledBack)
    assert world.old.num_starts == 2 and world.members == ["old"] and world.serves == "old"


@pytest.mark.parametrize(("steps", "is_replaced"), [(3, True), (0, False)])
def test_a_worker_too_busy_for_the_probe_must_complete_steps(tmp_path: Path, steps: int, is_replaced: bool) -> None:
    def prepare(world: World) -> None:
        world.attention.steps_per_status = steps
        world.change_new = lambda child: setattr(child, "first_output", dense_pb2.StepOutput())

    world, result = run(tmp_path, prepare)
    assert (result == "backend of new") is is_replaced
    assert world.serves == ("new" if is_replaced else "old")
    if not is_replaced:
        assert "completed no step" in str(result)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "status",
            r"present dense worker, process \d+, has not answered within 1 s, the limit \(peers.rpc_t",
        ),
        (
            "leave",
            r"present dense worker, process \d+, has not left within 1.5 s, the limit \(channel.wait_t",
        ),
        ("take over", r"new dense worker, process \d+, has not taken over within 1.5 s, the limit \(channel"),
    ],
)
def test_a_worker_that_hangs_is_named_with_the_limit(tmp_path: Path, call: str, message: str) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    def prepare(world: World) -> None:
        old = world.old
        old.config = old.config.with_values("channel", wait_timeout_s=0.5).with_values("peers", rpc_timeout_s=1.0)
        if call == "take over":
            world.change_new = lambda child: child.on_call.update({call: hang})
        else:
            old.on_call[call] = hang

    world, result = run(tmp_path, prepare)
    assert isinstance(result, RolledBack) and re.search(message, str(result)), result
    assert world.serves == "old"


def test_a_cancelled_replacement_is_undone(tmp_path: Path) -> None:
    async def main() -> World:
        is_computing = asyncio.Event()

        async def hang() -> None:
            is_computing.set()
            await asyncio.Event().wait()

        world = World(tmp_path, lambda world: None)
        world.change_new = lambda child: child.on_call.update({"take over": hang})
        task = asyncio.create_task(world.replace())
        async with asyncio.timeout(20):
            await is_computing.wait()
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()
        return world

    world = asyncio.run(main())
    assert world.serves == "old" and world.members == ["old"]
    assert world.calls.index("new stop") < world.calls.index("old take over")


def test_a_cancelled_call_still_waits_for_the_end_of_the_old_worker(tmp_path: Path) -> None:
    async def main() -> World:
        is_ending, has_ended = asyncio.Event(), asyncio.Event()

        async def end_late() -> None:
            is_ending.set()
            await has_ended.wait()
            world.calls.append("old has ended")

        world = World(tmp_path, lambda world: None)
        world.old.on_call["wait"] = end_late
        task = asyncio.create_task(world.replace())
        async with asyncio.timeout(20):
            await is_ending.wait()
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            has_ended.set()
            await asyncio.wait([task])
        return world

    world = asyncio.run(main())
    assert world.serves == "new" and world.members == ["new"]
    assert "old has ended" in world.calls


@pytest.mark.parametrize(
    "override", ["gateway.max_n=3", "dense.address=unix:/x", "dense.standby=false", "dense.nonsense=1", "no key"]
)
def test_settings_that_cannot_change_are_refused_before_anything_starts(tmp_path: Path, override: str) -> None:
    world, result = run(tmp_path, nothing, override)
    assert isinstance(result, InvalidRequest)
    assert world.new is None and world.serves == "old"


def test_a_worker_at_a_port_cannot_be_replaced(tmp_path: Path) -> None:
    def prepare(world: World) -> None:
        world.replacer._dense_address = SwitchedAddress("127.0.0.1:50052")

    _, result = run(tmp_path, prepare)
    assert isinstance(result, ConfigError) and "only a dense worker at a Unix socket" in str(result)
