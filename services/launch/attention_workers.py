"""`AttentionWorkers`: attention workers that `ctl` adds to those of a running server, or takes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import structlog

from services.common.child_options import ChildOptions
from services.common.config import Config
from services.common.errors import InvalidRequest, PeerError, TwostrokeError
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE, Child
from services.launch.children import Children
from services.launch.service_configs import attention_worker_config, with_attention
from services.launch.standby import Standby
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.client import open_channel
from services.rpc.error_details import error_of
from services.rpc.uninterrupted import uninterrupted

log = structlog.get_logger()


class AttentionWorkers:
    """Of a launcher that has started the dense worker, too. One change at a time."""

    def __init__(
        self,
        children: Children,
        make_child: Callable[[str, str, Config, ChildOptions], Child],
        dense_standby: Standby,
        config: Config,
        run_dir: Path,
    ) -> None:
        """`config`: that of all services."""
        self._children = children
        self._make_child = make_child
        self._dense_standby = dense_standby
        self._config = config
        self._run_dir = run_dir
        self._next_index = config.attention.workers
        self._changing = asyncio.Lock()

    async def add(self) -> Child:
        """Starts a worker and attaches the dense worker to it. Raises `PeerError`; then nothing has changed."""
        async with self._changing:
            index, self._next_index = self._next_index, self._next_index + 1
            name = f"{ATTENTION_ROLE}-{index}"
            address = f"unix:{self._run_dir}/{name}.sock"
            config = attention_worker_config(self._config, index, address)
            child = self._make_child(name, ATTENTION_ROLE, config, ChildOptions(attention_index=index))
            watcher = asyncio.create_task(child.watch())
            try:
                await self._attach(child, watcher)
            except BaseException as error:
                child.stop()
                await uninterrupted(child.wait(config.launch.stop_grace_s))
                await asyncio.gather(watcher, return_exceptions=True)
                raise PeerError(f"no attention worker was added: {_describe(error)}") from error
            await uninterrupted(self._keep(child, watcher))  # the dense worker has it now, whatever the caller wants
            return child

    async def drain(self, name: str, timeout_s: float) -> None:
        """Lets the sequences of a worker move to the others, and stops it.

        Raises `InvalidRequest` for an unknown name or the last worker, and `PeerError` if others have no room in time.
        """
        async with self._changing:
            present = [child for child in self._children if child.role == ATTENTION_ROLE]
            child = next((each for each in present if each.name == name), None)
            if child is None:
                names = ", ".join(each.name for each in present)
                raise InvalidRequest(f"there is no attention worker {name!r}; there are {names}")
            if child.options.attention_index == 0:
                raise InvalidRequest(f"{name} stays as long as the launcher: drain another one")
            request = dense_pb2.RemoveAttentionWorkerRequest(address=child.address, timeout_ms=round(1000 * timeout_s))
            try:
                async with self._dense_stub() as stub:
                    await stub.RemoveAttentionWorker(request, timeout=timeout_s + child.config.peers.rpc_timeout_s)
            except grpc.aio.AioRpcError as error:
                raise PeerError(f"{name} was not drained: {_describe(error)}") from error
            await uninterrupted(self._end(child))  # the dense worker has left it, whatever the caller wants

    async def _keep(self, child: Child, watcher: asyncio.Task[None]) -> None:
        child.may_restart = True
        self._children.adopt(child, watcher)
        await self._tell_successors(lambda addresses: (*addresses, child.address))
        log.info("attention worker added", name=child.name, pid=child.pid)

    async def _end(self, child: Child) -> None:
        await self._tell_successors(lambda addresses: tuple(each for each in addresses if each != child.address))
        child.stop()
        await child.wait(child.config.launch.stop_grace_s)
        await self._children.forget(child)
        log.info("attention worker drained", name=child.name)

    async def _attach(self, child: Child, watcher: asyncio.Task[None]) -> None:
        """Lets the dense worker attach to a worker that starts. Raises the worker's error if it ends before that."""
        timeout_s = child.config.launch.start_timeout_s
        request = dense_pb2.AddAttentionWorkerRequest(address=child.address, timeout_ms=round(1000 * timeout_s))
        async with self._dense_stub() as stub:
            adding = asyncio.ensure_future(_called(stub, request, timeout_s + child.config.peers.rpc_timeout_s))
            try:
                await asyncio.wait([adding, watcher], return_when=asyncio.FIRST_COMPLETED)
                if not adding.done():
                    raise PeerError(f"it ended: {child.last_end}")
                adding.result()
            finally:
                adding.cancel()
                await asyncio.gather(adding, return_exceptions=True)

    async def _tell_successors(self, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
        """A dense worker that is started from now on attaches to the present attention workers."""
        async with self._dense_standby.suspended(is_taken=False):
            [dense] = self._children.of_role(DENSE_ROLE)
            addresses = change(dense.config.attention.addresses)
            dense.reconfigure(with_attention(dense.config, addresses=addresses))

    @contextlib.asynccontextmanager
    async def _dense_stub(self) -> AsyncIterator[dense_pb2_grpc.DenseWorkerStub]:
        [dense] = self._children.of_role(DENSE_ROLE)
        async with open_channel(dense.address, dense.config.peers.max_message_bytes, dense.tls) as channel:
            yield dense_pb2_grpc.DenseWorkerStub(channel)


async def _called(
    stub: dense_pb2_grpc.DenseWorkerStub, request: dense_pb2.AddAttentionWorkerRequest, timeout_s: float
) -> None:
    await stub.AddAttentionWorker(request, timeout=timeout_s)


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.UNAVAILABLE and error_of(error) is None:
            return f"the dense worker has ended, or does not answer: {error.details()}"
        return error.details() or error.code().name
    return str(error) if isinstance(error, TwostrokeError) else repr(error)
