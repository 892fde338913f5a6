"""A launcher whose dense workers are scripted: for replacements of one by another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from services.common.child_options import ChildOptions
from services.common.config import Config, dump_config, load_config
from services.launch.child import Child
from services.launch.children import Children
from services.launch.replace import DenseReplacer
from services.launch.service_configs import with_address
from services.launch.standby import Standby
from services.launch.switched_address import SwitchedAddress
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc

State = dense_pb2.DenseStatus
ERROR_GRACE_S = 0.1


class FakeChild(dense_pb2_grpc.DenseWorkerServicer):
    """A dense worker and its `Child` in one object. It records calls in `calls`, which all of them share."""

    start, end, open_channel = Child.start, Child.end, Child.open_channel

    def __init__(self, name: str, config: Config, options: ChildOptions, calls: list[str], directory: Path) -> None:
        self.name, self.role, self.calls = name, "dense_worker", calls
        self.config_file = directory / f"{name}.toml"
        self.config, self.options = config, options
        self.config_file.write_text(dump_config(config))
        self.pid = sum(name.encode())
        self.last_end, self.last_return_code = "", -9
        self.is_running = True
        self.may_restart, self.num_restarts, self.num_starts = False, 0, 0
        self.state = State.STANDBY if options.standby else State.SERVING
        self.weights_hash = "c0ffee"
        self.loading: Iterator[str] = iter(())  # what it reports, one answer after the other, before it has loaded
        self.refuses: set[str] = set()  # calls that fail
        self.on_call: dict[str, Callable[[], Awaitable[None]]] = {}
        self.first_output = dense_pb2.StepOutput(ended=[dense_pb2.SequenceEnd(reason=dense_pb2.SequenceEnd.LENGTH)])
        self._is_stopping = False
        self._is_over = asyncio.Event()

    def leave_standby(self, old: FakeChild) -> None:
        self.options = self.options.model_copy(update={"standby": None})
        self.may_restart, self.num_restarts = True, old.num_restarts

    async def watch(self) -> None:
        server = grpc.aio.server()
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(self, server)
        server.add_insecure_port(self.config.dense.address)
        await server.start()
        self.num_starts += 1
        await self._is_over.wait()
        await server.stop(None)

    async def die(self, reason: str = "signal SIGKILL") -> None:
        self.last_end, self.is_running = reason, False
        self._is_over.set()
        self._is_over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    @property
    def address(self) -> str:
        return self.config.dense.address

    def retire(self) -> None:
        self._is_stopping = True

    def undo_retire(self) -> None:
        self._is_stopping = False

    def stop(self) -> None:
        if not self._is_over.is_set():
            self.calls.append(f"{self.name} stop")
        self._is_over.set()

    async def kill_hanging(self, reason: str) -> None:
        self.kill(reason)

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

    async def Drain(self, request: dense_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> dense_pb2.DrainReply:
        await self._called(f"drain for {request.timeout_ms} ms", context)
        return dense_pb2.DrainReply()

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
        dense_address = SwitchedAddress(f"unix:{self.link}")
        address = dense_address.new_address()
        dense_address.point_to(address)
        config = with_address(config, "dense_worker", address)
        self.old = FakeChild("old", config, ChildOptions(), self.calls, directory)
        self.new: FakeChild | None = None
        self.attention = FakeAttention()
        self.children = Children()
        self.change_new: Callable[[FakeChild], None] = lambda child: None

        def make_child(name: str, role: str, config: Config, options: ChildOptions) -> FakeChild:
            assert self.new is None and options.standby == "loaded"
            self.new = FakeChild("new", config, options, self.calls, directory)
            self.change_new(self.new)
            return self.new

        attention_address = f"unix:{directory}/attention.sock"
        self._server = grpc.aio.server()
        attn_pb2_grpc.add_AttentionWorkerServicer_to_server(self.attention, self._server)
        self._server.add_insecure_port(attention_address)
        standby = Standby("dense_worker", "off", self.children, dense_address, make_child, config.launch)
        self.replacer = DenseReplacer(
            self.children, dense_address, attention_address, make_child, standby, ERROR_GRACE_S
        )
        prepare(self)

    @property
    def serves(self) -> str:
        """The name of the worker at the address that gateways use."""
        [present] = [child for child in (self.old, self.new) if child and self.link.resolve() == path_of(child)]
        return present.name

    async def replace(self, *overrides: str, **caches: Any) -> str:
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
