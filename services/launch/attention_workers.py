"""`AttentionWorkers`: attention workers that `ctl` adds to those of a running server, or takes away.

The dense worker may die at any time. Its successor is asked again, and once more after it has been decided what those
that are started later attach to: so there is none that misses a worker, or waits for one that has left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import structlog

from services.common.child_options import ChildOptions
from services.common.config import Config
from services.common.errors import InvalidRequest, PeerError, TwostrokeError
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE, Child, MakeChild, dense_stub
from services.launch.children import Children
from services.launch.service_configs import attention_worker_config
from services.launch.standby import Standby
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.error_details import error_of
from services.rpc.server import uninterrupted

log = structlog.get_logger()

_RETRY_S = 0.1  # between two looks for a dense worker that is back
# Of the dense worker: about the attention worker at an address, within so many seconds; and the limit of the call.
_Ask = Callable[[dense_pb2_grpc.DenseWorkerStub, str, float, float], Coroutine[Any, Any, None]]


class AttentionWorkers:
    """Of a launcher that has started the dense worker, too. One change at a time."""

    def __init__(
        self,
        children: Children,
        make_child: MakeChild,
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
            try:
                child = self._make_child(name, ATTENTION_ROLE, config, ChildOptions(attention_index=index))
            except OSError as error:  # its file of configuration cannot be written: the disk is full
                raise PeerError(f"no attention worker was added: {_describe(error)}") from error
            child.start()
            try:
                await self._attach(child)
            except BaseException as error:
                await uninterrupted(self._undo_add(child))
                raise PeerError(f"no attention worker was added: {_describe(error)}") from error
            await uninterrupted(self._keep(child))  # the dense worker has it now, whatever the caller wants
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
            try:
                await self._ask_dense(_remove, child.address, timeout_s)
            except BaseException as error:
                is_answer = isinstance(error, grpc.aio.AioRpcError) and error_of(error) is not None
                if not is_answer:
                    await uninterrupted(self._undo(_add, child))
                if isinstance(error, grpc.aio.AioRpcError):
                    raise PeerError(f"{name} was not drained: {_describe(error)}") from error
                raise
            await uninterrupted(self._end(child, timeout_s))  # the dense worker has left it, whatever the caller wants

    async def _keep(self, child: Child) -> None:
        try:
            await self._tell_successors(lambda addresses: (*addresses, child.address))
        except OSError as error:
            await self._undo_add(child)
            raise PeerError(f"no attention worker was added: {_describe(error)}") from error
        self._children.adopt(child)
        await self._ask_again(_add, child, child.config.launch.start_timeout_s)
        log.info("attention worker added", name=child.name, pid=child.pid)

    async def _undo_add(self, child: Child) -> None:
        await child.end()
        await self._undo(_remove, child)

    async def _end(self, child: Child, timeout_s: float) -> None:
        try:
            await self._tell_successors(lambda addresses: tuple(each for each in addresses if each != child.address))
        except OSError as error:
            await self._undo(_add, child)
            raise PeerError(f"{child.name} was not drained: {_describe(error)}") from error
        await self._ask_again(_remove, child, timeout_s)
        child.stop()
        await child.wait(child.config.launch.stop_grace_s)
        await self._children.forget(child)
        log.info("attention worker drained", name=child.name)

    async def _attach(self, child: Child) -> None:
        """Lets the dense worker attach to a worker that starts. Raises the worker's error if it ends before that."""
        timeout_s = child.config.launch.start_timeout_s
        adding = asyncio.ensure_future(self._ask_dense(_add, child.address, timeout_s))
        try:
            await asyncio.wait([adding, child.watching], return_when=asyncio.FIRST_COMPLETED)
            if child.watching.done():  # also if it has been attached before
                raise PeerError(f"it ended: {child.last_end}")
            adding.result()
            child.may_restart = True  # before anything else: it may die at any time from now on
        finally:
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)

    async def _ask_dense(self, ask: _Ask, address: str, timeout_s: float) -> None:
        """Asks the dense worker, or its successor if it dies meanwhile. Raises an error of gRPC."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(_RETRY_S, deadline - time.monotonic())
            try:
                async with self._dense_stub() as stub:
                    await ask(stub, address, left_s, left_s + self._config.peers.rpc_timeout_s)
                return
            except grpc.aio.AioRpcError as error:
                if not _is_gone(error):
                    raise
                log.warning("the dense worker is asked again about an attention worker", reason=error.details())
                while not await self._is_dense_serving():
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(_RETRY_S)

    async def _is_dense_serving(self) -> bool:
        try:
            async with self._dense_stub() as stub:
                request = dense_pb2.GetStatusRequest()
                status = await stub.GetStatus(request, timeout=self._config.peers.rpc_timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(status.state == dense_pb2.DenseStatus.SERVING)

    async def _ask_again(self, ask: _Ask, child: Child, timeout_s: float) -> None:
        """Asks a dense worker that may have started before its successors were told; for any other it is done."""
        try:
            await self._ask_dense(ask, child.address, timeout_s)
        except grpc.aio.AioRpcError as error:
            log.warning("the dense worker was not asked again", name=child.name, reason=_describe(error))

    async def _undo(self, ask: _Ask, child: Child) -> None:
        """Asks for the opposite: the dense worker may have done what it was asked, although nobody got its answer."""
        limit_s = self._config.peers.rpc_timeout_s
        try:
            async with self._dense_stub() as stub:
                await ask(stub, child.address, limit_s, limit_s)
        except grpc.aio.AioRpcError as error:
            log.warning("a change of attention workers was not undone", name=child.name, reason=_describe(error))

    async def _tell_successors(self, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
        """A dense worker that is started from now on attaches to the present attention workers.

        Raises `OSError` if that cannot be written because the disk is full: then nothing has changed.
        """
        async with self._dense_standby.suspended(is_taken=False):
            [dense] = self._children.of_role(DENSE_ROLE)
            addresses = change(dense.config.attention.addresses)
            dense.reconfigure(dense.config.with_values("attention", addresses=addresses))

    def _dense_stub(self) -> AbstractAsyncContextManager[dense_pb2_grpc.DenseWorkerStub]:
        [dense] = self._children.of_role(DENSE_ROLE)
        return dense_stub(dense)


async def _add(stub: dense_pb2_grpc.DenseWorkerStub, address: str, within_s: float, timeout_s: float) -> None:
    request = dense_pb2.AddAttentionWorkerRequest(address=address, timeout_ms=round(1000 * within_s))
    await stub.AddAttentionWorker(request, timeout=timeout_s)


async def _remove(stub: dense_pb2_grpc.DenseWorkerStub, address: str, within_s: float, timeout_s: float) -> None:
    request = dense_pb2.RemoveAttentionWorkerRequest(address=address, timeout_ms=round(1000 * within_s))
    await stub.RemoveAttentionWorker(request, timeout=timeout_s)


def _is_gone(error: grpc.aio.AioRpcError) -> bool:
    """Whether the dense worker has ended."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and error_of(error) is None


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        if _is_gone(error):
            return f"the dense worker has ended, or does not answer: {error.details()}"
        return error.details() or error.code().name
    return str(error) if isinstance(error, TwostrokeError | OSError) else repr(error)
