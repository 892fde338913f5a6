"""`GatewayPeers`: the other gateway processes of this server. The kernel distributes connections, not requests.

A client's Abort may reach another process than its request, and all processes must serve the same adapters. They tell
each other at sockets of their own (`protos/gateway_peers.proto`), in the launcher's directory, which only the server's
user may enter. So a caller is known there by its name, not by its key, and no client can speak for another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import structlog

from services.common.errors import PeerError
from services.gateway.request.generation_request import Owner
from services.pb import gateway_peers_pb2, gateway_peers_pb2_grpc
from services.rpc.client import open_channel

log = structlog.get_logger()

TIMEOUT_S = 2.0
ADAPTER_TIMEOUT_S = 60.0  # a peer reads the files of an adapter
LOCK_RETRY_S = 0.02
MAX_UNFINISHED_BYTES = 2**20

T = TypeVar("T")


class GatewayPeers:
    """Used in the event loop. Keeps no connections, because peers may restart and calls are few.

    What clients can ask for as often as they like is bounded by the caller: see `AllProcesses`.
    """

    def __init__(
        self, addresses: Sequence[str] = (), max_message_bytes: int = 2**20, change_lock: Path | None = None
    ) -> None:
        """`change_lock`: the file that a process locks while it changes adapters; None if there are no peers."""
        self._addresses = addresses
        self._max_message_bytes = max_message_bytes
        self._change_lock = change_lock

    async def abort(self, owner: Owner, request_id: str | None, *, with_batch: bool = False) -> bool:
        """Ends a request of an owner, or with None all. Returns whether there was any at a peer.

        `with_batch`: also the requests of a batch with this name.
        """
        request = gateway_peers_pb2.AbortHereRequest(
            owner=encode_owner(owner), request_id=request_id, all=request_id is None, with_batch=with_batch
        )
        outcomes = await self._ask(lambda stub: stub.AbortHere(request, timeout=TIMEOUT_S))
        return any(reply.was_running for reply in _answers(outcomes))

    async def stop(self, owner: Owner, client_id: str) -> None:
        """Ends the owner's inference requests with this id at all peers that answer in time."""
        request = gateway_peers_pb2.StopHereRequest(owner=encode_owner(owner), id=client_id)
        _answers(await self._ask(lambda stub: stub.StopHere(request, timeout=TIMEOUT_S)))

    @property
    def has_any(self) -> bool:
        """Whether there are peers."""
        return bool(self._addresses)

    async def measure(self, *, has_metrics: bool) -> list[gateway_peers_pb2.MeasureResponse]:
        """What each peer measures that answers in time."""
        request = gateway_peers_pb2.MeasureRequest(has_metrics=has_metrics)
        return _answers(await self._ask(lambda stub: stub.Measure(request, timeout=TIMEOUT_S)))

    async def stage_adapter(self, adapter: gateway_peers_pb2.PeerAdapter) -> None:
        """Has all peers read an adapter. If one cannot, none keeps it: raises `PeerError` with names and reasons."""
        outcomes = await self._ask(lambda stub: stub.StageAdapter(adapter, timeout=ADAPTER_TIMEOUT_S))
        failed = _failed(outcomes.items())
        if failed:
            forget = gateway_peers_pb2.UnstageAdapterRequest()
            await self._ask(lambda stub: stub.UnstageAdapter(forget, timeout=TIMEOUT_S))
            raise PeerError(f"adapter {adapter.name!r} is not loaded, because not all gateways can: {failed}")

    async def serve_adapter(self, adapter: gateway_peers_pb2.PeerAdapter) -> None:
        """Has all peers serve an adapter. Raises `PeerError` with the names of those that may not.

        One that has ended since will load it when it starts, because it is recorded.
        """
        outcomes = await self._ask(lambda stub: stub.ServeAdapter(adapter, timeout=ADAPTER_TIMEOUT_S))
        if failed := _failed(_of_living(outcomes)):
            raise PeerError(f"adapter {adapter.name!r} is not loaded, because not all gateways serve it: {failed}")

    async def forget_adapter(self, owner: str, name: str) -> None:
        """Has all peers forget an adapter. Raises `PeerError` with the names of those that may still serve it."""
        request = gateway_peers_pb2.ForgetAdapterRequest(owner=owner, name=name)
        outcomes = await self._ask(lambda stub: stub.ForgetAdapter(request, timeout=TIMEOUT_S))
        if failed := _failed(_of_living(outcomes)):
            raise PeerError(f"adapter {name!r} is not forgotten in {failed}: unload it again")

    @property
    def has_unfinished_change(self) -> bool:
        """Whether a process is in `changing` now, or has ended there."""
        return self._change_lock is not None and self._change_lock.exists() and self._change_lock.stat().st_size > 0

    @contextlib.asynccontextmanager
    async def changing(self, what: str = "", *, waits: bool = True) -> AsyncIterator[list[str]]:
        """A context that only one process is in; waits for it. A process that ends, however it does, leaves it.

        Yields what such processes were changing, which is to be finished first. `what` is changed here: a line of text.
        What is left in the list at the end is for the next one, and so is `what` if that ends with a `PeerError`.
        Without `waits` nothing is to be finished here while another process is in it, since that one does so. Raises
        `PeerError` if there is no room to note what is changed.
        """
        if self._change_lock is None:
            yield []
            return
        with _names_file(self._change_lock):
            file = os.open(self._change_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _lock(file):  # another process holds it
                if not waits:
                    yield []
                    return
                await asyncio.sleep(LOCK_RETRY_S)
            with _names_file(self._change_lock):
                unfinished = os.pread(file, MAX_UNFINISHED_BYTES, 0).decode()
                os.pwrite(file, f"{what}\n".encode(), len(unfinished.encode()))
            left = list(filter(None, unfinished.split("\n")))
            try:
                yield left
            except Exception as error:  # but not the end of this process
                _write_lines(file, [*left, what] if isinstance(error, PeerError) else left)
                raise
            _write_lines(file, left)
        finally:
            os.close(file)

    async def _ask(
        self, call: Callable[[gateway_peers_pb2_grpc.GatewayPeersStub], Awaitable[T]]
    ) -> dict[str, T | grpc.aio.AioRpcError]:
        """What the call returns or raises at each peer, by address."""

        async def outcome(address: str) -> T | grpc.aio.AioRpcError:
            async with open_channel(address, self._max_message_bytes) as channel:
                try:
                    return await call(gateway_peers_pb2_grpc.GatewayPeersStub(channel))
                except grpc.aio.AioRpcError as error:
                    return error

        return dict(zip(self._addresses, await asyncio.gather(*map(outcome, self._addresses)), strict=True))


def encode_owner(owner: Owner) -> gateway_peers_pb2.Owner:
    """The message for whose a request is."""
    key_name, client = owner
    return gateway_peers_pb2.Owner(key_name=key_name, client=client)


def decode_owner(message: gateway_peers_pb2.Owner) -> Owner:
    """The owner of a message."""
    return message.key_name, message.client


def _write_lines(file: int, lines: Iterable[str]) -> None:
    """Replaces what the file has; lines for which it has no room are left out."""
    text = b""
    for line in dict.fromkeys(filter(None, lines)):
        more = f"{line}\n".encode()
        text += more if len(text) + len(more) <= MAX_UNFINISHED_BYTES else b""
    os.ftruncate(file, 0)
    os.pwrite(file, text, 0)


@contextlib.contextmanager
def _names_file(path: Path) -> Iterator[None]:
    """Turns an `OSError` into a `PeerError` that names the file."""
    try:
        yield
    except OSError as error:
        raise PeerError(f"adapters cannot be changed now: {path}: {error.strerror}") from error


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _answers(outcomes: dict[str, Any]) -> list[Any]:
    """The answers; a peer without one, which is restarting, has no requests."""
    for address, outcome in outcomes.items():
        if isinstance(outcome, grpc.aio.AioRpcError):
            log.warning("a peer did not answer", address=address, reason=outcome.details())
    return [outcome for outcome in outcomes.values() if not isinstance(outcome, grpc.aio.AioRpcError)]


def _of_living(outcomes: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Without those of peers that do not run now. One that hangs may be as unavailable, and goes on later."""
    for address, outcome in outcomes.items():
        is_unavailable = isinstance(outcome, grpc.aio.AioRpcError) and outcome.code() is grpc.StatusCode.UNAVAILABLE
        if not is_unavailable or _is_listened_at(address):
            yield address, outcome


def _is_listened_at(address: str) -> bool:
    """Whether a process listens at a Unix socket, hanging or not."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.removeprefix("unix:"))
        except BlockingIOError:  # too many wait there
            return True
        except OSError:
            return False
    return True


def _failed(outcomes: Iterable[tuple[str, Any]]) -> str:
    """Names and reasons of the peers that failed; empty if none did."""
    return ", ".join(
        f"the gateway at {address} ({outcome.details()})"
        for address, outcome in outcomes
        if isinstance(outcome, grpc.aio.AioRpcError)
    )
