"""All outcomes of a replacement of the dense worker: which worker serves at the end, and which calls were made."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from services.common.child_options import ChildOptions
from services.common.config import Config, dump_config, load_config
from services.common.errors import ConfigError, InvalidRequest, RolledBack, TwostrokeError
from services.launch.children import Children
from services.launch.dense_address import DenseAddress
from services.launch.replace import DenseReplacer
from services.launch.service_configs import with_dense_address
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc

State = dense_pb2.DenseStatus


class FakeChild(dense_pb2_grpc.DenseWorkerServicer):
    """A dense worker and its `Child` in one object. It records calls in `calls`, which all of them share."""

    tls = None

    def __init__(self, name: str, config: Config, options: ChildOptions, calls: list[str], directory: Path) -> None:
        self.name, self.role, self.calls = name, "dense_worker", calls
        self.config_file = directory / f"{name}.toml"
        self.config, self.options = config, options
        self.config_file.write_text(dump_config(config))
        self.pid = sum(name.encode())
        self.last_end = ""
        self.may_restart, self.num_restarts, self.num_starts = False, 0, 0
        self.state = State.STANDBY if options.is_standby else State.SERVING
        self.weights_hash = "c0ffee"
        self.loading: Iterator[str] = iter(())  # what it reports, one answer after the other, before it has loaded
        self.refuses: set[str] = set()  # calls that fail
        self.on_call: dict[str, Callable[[], Awaitable[None]]] = {}
        self.first_output = dense_pb2.StepOutput(ended=[dense_pb2.SequenceEnd(reason=dense_pb2.SequenceEnd.LENGTH)])
        self._is_stopping = False
        self._is_over = asyncio.Event()

    def leave_standby(self) -> None:
        self.options = self.options.model_copy(update={"is_standby": False})

    async def watch(self) -> None:
        server = grpc.aio.server()
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(self, server)
        server.add_insecure_port(self.config.dense.address)
        await server.start()
        self.num_starts += 1
        await self._is_over.wait()
        await server.stop(None)

    async def die(self) -> None:
        self.last_end = "signal SIGKILL"
        self._is_over.set()
        self._is_over = asyncio.Event()

    def retire(self) -> None:
        self._is_stopping = True

    def undo_retire(self) -> None:
        self._is_stopping = False

    def stop(self) -> None:
        if not self._is_over.is_set():
            self.calls.append(f"{self.name} stop")
        self._is_over.set()

    def kill(self, reason: str) -> None:
        self.calls.append(f"{self.name} kill: {reason}")

    async def wait(self, grace_s: float) -> None:
        await self._is_over.wait()
        if "wait" in self.on_call:
            await self.on_call["wait"]()

    async def _called(self, call: str, context: grpc.aio.ServicerContext) -> None:
        self.calls.append(f"{self.name} {call}")
        if call in self.on_call:
            await self.on_call[call]()
        if call in self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"no {call} today")

    async def GetStatus(
        self, request: dense_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseStatus:
        if "status" in self.on_call:
            await self.on_call["status"]()
        for line in self.loading:
            return dense_pb2.DenseStatus(state=State.LOADING, loading=line)
        return dense_pb2.DenseStatus(state=self.state, weights_hash=self.weights_hash)

    async def GetInfo(
        self, request: dense_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseInfo:
        return dense_pb2.DenseInfo(backend=f"backend of {self.name}")

    async def Leave(self, request: dense_pb2.LeaveRequest, context: grpc.aio.ServicerContext) -> dense_pb2.LeaveReply:
        await self._called("leave", context)
        self.state = State.STANDBY
        return dense_pb2.LeaveReply()

    async def TakeOver(
        self, request: dense_pb2.TakeOverRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.TakeOverReply:
        await self._called("take over", context)
        self.state = State.SERVING
        return dense_pb2.TakeOverReply()

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        await self._called("compute", context)
        yield self.first_output
        await asyncio.Event().wait()


class FakeAttention(attn_pb2_grpc.AttentionWorkerServicer):
    """Completes `steps_per_status` steps between two calls of GetStatus."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.steps_per_status = 0

    async def GetStatus(
        self, request: attn_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> attn_pb2.AttentionStatus:
        self.num_steps += self.steps_per_status
        return attn_pb2.AttentionStatus(num_steps=self.num_steps)


class World:
    """A launcher with the dense worker `old`. The replacement is `new`; `prepare` may make either of them fail."""

    def __init__(self, directory: Path, prepare: Callable[[World], None]) -> None:
        self.calls: list[str] = []
        self.link = directory / "dense.sock"
        config = load_config(None, ["peers.rpc_timeout_s=2", "channel.wait_timeout_s=20"])
        dense_address = DenseAddress(f"unix:{self.link}", directory)
        address = dense_address.new_address()
        dense_address.point_to(address)
        self.old = FakeChild("old", with_dense_address(config, address), ChildOptions(), self.calls, directory)
        self.new: FakeChild | None = None
        self.attention = FakeAttention()
        self.children = Children()
        self.change_new: Callable[[FakeChild], None] = lambda child: None

        def make_child(name: str, role: str, config: Config, options: ChildOptions) -> FakeChild:
            assert self.new is None and options.is_standby
            self.new = FakeChild("new", config, options, self.calls, directory)
            self.change_new(self.new)
            return self.new

        attention_address = f"unix:{directory}/attention.sock"
        self._server = grpc.aio.server()
        attn_pb2_grpc.add_AttentionWorkerServicer_to_server(self.attention, self._server)
        self._server.add_insecure_port(attention_address)
        self.replacer = DenseReplacer(self.children, dense_address, attention_address, make_child)
        prepare(self)

    @property
    def serves(self) -> str:
        """The name of the worker at the address that gateways use."""
        [present] = [child for child in (self.old, self.new) if child and self.link.readlink() == path_of(child)]
        return present.name

    async def replace(self, *overrides: str, **caches: bool) -> str:
        """Replaces the worker; returns the new backend. Stops everything at the end."""
        await self._server.start()
        self.children.start(self.old)
        while not self.old.num_starts:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            replacement = await self.replacer.replace(overrides, **({"drops_caches": False} | caches))
            return replacement.backend
        finally:
            self.members = [child.name for child in self.children]
            await self.children.stop(1.0)
            await self._server.stop(None)


def path_of(child: FakeChild) -> Path:
    return Path(child.config.dense.address.removeprefix("unix:"))


def nothing(world: World) -> None:
    """Changes nothing."""


def run(
    directory: Path, prepare: Callable[[World], None], *overrides: str, **caches: bool
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
    assert not world.new.options.is_standby, "after a restart it must attach at once"
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


def test_a_worker_that_keeps_caches_states_the_present_hash_also_after_a_restart(tmp_path: Path) -> None:
    world, result = run(tmp_path, nothing, "dense.quantization=fp8", keeps_caches=True)
    assert result == "backend of new" and world.new is not None
    assert world.new.options.stated_weights_hash == "c0ffee" and not world.new.options.is_standby


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
        changed = old.config.launch.model_copy(update={"start_timeout_s": 1.0})
        old.config_file.write_text(dump_config(old.config.model_copy(update={"launch": changed})))
        lines = (f"plan {i}" for i in range(80)) if makes_progress else itertools.repeat("plan 1")  # 80 last 1.6 s
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
            r"present dense worker, process \d+, has not answered within 2.5 s, the limit \(peers.rpc_t",
        ),
        (
            "leave",
            r"present dense worker, process \d+, has not left within 3 s, the limit \(channel.wait_t",
        ),
        ("take over", r"new dense worker, process \d+, has not taken over within 3 s, the limit \(channel"),
    ],
)
def test_a_worker_that_hangs_is_named_with_the_limit(tmp_path: Path, call: str, message: str) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    def prepare(world: World) -> None:
        old = world.old
        channel = old.config.channel.model_copy(update={"wait_timeout_s": 0.5})
        peers = old.config.peers.model_copy(update={"rpc_timeout_s": 2.5})
        old.config = old.config.model_copy(update={"channel": channel, "peers": peers})
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
        world.replacer._dense_address = DenseAddress("127.0.0.1:50052", tmp_path)

    _, result = run(tmp_path, prepare)
    assert isinstance(result, ConfigError) and "only a dense worker at a Unix socket" in str(result)
