"""The life cycle of a gRPC service: bind, report health, serve, drain, stop.

Only here do the errors of `services.common.errors` become gRPC statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
import uvloop
from grpc._cython import cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.addresses import BALANCED_SCHEMES
from services.common.config import PeerSection
from services.common.errors import ConfigError, RequestAborted, TwostrokeError
from services.pb import stall_pb2
from services.rpc.bindable import check_bindable, check_socket_free
from services.rpc.client import read_peer_tls
from services.rpc.error_details import rich_status
from services.rpc.health import HealthServicer
from services.rpc.reflection import add_reflection
from services.rpc.tls import TlsFiles, warn_if_exposed

log = structlog.get_logger()

MIN_PING_INTERVAL_MS = 5_000  # clients may not send keep-alive pings more often
MAX_WAKEUPS = 2**16  # bytes; a socket pair holds fewer
STOP_GRACE_S = 1.0  # for calls of the other services to end
LIVENESS = "liveness"  # health name for the supervisor: SERVING as long as a restart would not help

Request = TypeVar("Request")
Handler = Callable[[Any, grpc.aio.ServicerContext], Any]


class GrpcServer:
    """A listening server with health service and reflection.

    `service_names` are full proto names; they report SERVING between `set_serving(True)` and `(False)`.
    """

    def __init__(
        self,
        address: str,
        service_names: list[str],
        max_message_bytes: int,
        tls: TlsFiles | None = None,
        local_address: str | None = None,
        options: Sequence[tuple[str, object]] = (),
        *,
        shares_port: bool = False,
        setting: str = "",
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`local_address` is a second address: a Unix socket without TLS. `shares_port` allows other processes on the
        same port.

        `setting` is the key of the config that `address` is from, for errors; empty: of none.

        `max_message_bytes` limits incoming messages; the receivers limit outgoing ones. Errors that `interceptors`
        raise become statuses too.
        """
        self._address = address
        self._setting = setting
        self._tls = tls
        self._local_address = local_address
        self._service_names = service_names
        self._is_serving = False
        self._stall: stall_pb2.Stall | None = None
        self.server = grpc.aio.server(
            interceptors=[_ErrorInterceptor(), *interceptors],
            options=[
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
                *options,
                ("grpc.so_reuseport", int(shares_port)),  # if 0, a second server on the same port is an error
                ("grpc.max_receive_message_length", max_message_bytes),
            ],
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        add_reflection(self.server, [*service_names, health.SERVICE_NAME])

    async def start(self) -> str:
        """Binds and serves; returns the address with the real port. Raises `ConfigError` if the address is in use."""
        if self._address.startswith(BALANCED_SCHEMES):
            raise ConfigError(f"cannot listen on {self._address}: that is a name for clients")
        port = self._bind(self._address, self._tls)
        if self._local_address is not None:
            self._bind(self._local_address, None)
        if self._tls is None:
            warn_if_exposed(self._address)
        await self.set_serving(False)
        self._set_health([LIVENESS], is_serving=True)
        await self.server.start()
        if self._address.startswith("unix:"):
            return self._address
        return f"{self._address.rpartition(':')[0]}:{port}"

    def _bind(self, address: str, tls: TlsFiles | None) -> int:
        if address.startswith("unix:"):
            check_socket_free(address.removeprefix("unix:"))
        try:
            if tls is None:
                return self.server.add_insecure_port(address)
            return self.server.add_secure_port(address, tls.server_credentials())
        except RuntimeError as error:
            check_bindable(address, self._setting if address == self._address else "")  # gRPC does not say why
            raise ConfigError(f"cannot listen on {address}: {error}") from error

    async def set_serving(self, is_serving: bool) -> None:
        """Sets the health of the whole server and of each service. A stalled server reports NOT_SERVING anyway."""
        self._is_serving = is_serving
        self._set_health(["", *self._service_names], is_serving and self._stall is None)

    async def set_stall(self, stall: stall_pb2.Stall | None) -> None:
        """Makes a stalled server NOT_SERVING, and also not live if it waits for nobody: a restart may then help."""
        self._stall = stall
        self._set_health([LIVENESS], stall is None or bool(stall.waits_for))
        await self.set_serving(self._is_serving)

    def _set_health(self, names: list[str], is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self._health.set(names, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running calls `grace_s` seconds to end, then cancels them."""
        self._health.shut()
        await self.server.stop(grace_s)
        await asyncio.sleep(0)  # a call's task that the end of the loop cancels before it has begun prints a traceback


async def until_over(requests: AsyncIterator[Request]) -> AsyncIterator[Request]:
    """A call's requests. The iterator ends when the call ends, on whichever side and for whatever reason."""
    # gRPC raises UsageError to a reader of an ended call, and AbortError if the call ended with an error.
    with contextlib.suppress(grpc.aio.UsageError, grpc.aio.AbortError):
        async for request in requests:
            yield request


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a raised `TwostrokeError` into its gRPC status, and anything else into a logged INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary, _guard_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream, _guard_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary, _guard_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream, _guard_stream),
        }
        make_handler, behaviour, guard = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
        if inspect.iscoroutinefunction(behaviour):
            guard = _guard_unary  # streams may also be coroutines that write, as in the health service
        return make_handler(
            guard(behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guard_unary(behaviour: Handler) -> Handler:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            status = _status_of(error)
        del request  # else the error that gRPC raises here keeps it until the next garbage collection
        await context.abort(status.code, status.details, status.trailing_metadata)

    return guarded


def _guard_stream(behaviour: Handler) -> Handler:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
            return
        except Exception as error:
            status = _status_of(error)
        del request
        await context.abort(status.code, status.details, status.trailing_metadata)

    return guarded


def _status_of(error: Exception) -> grpc.Status:
    """The status with which to abort a call. Raises the error itself if the call has been aborted already."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TwostrokeError):
        return rich_status(error)
    if isinstance(error, grpc.aio.InternalError):  # of a write to a client that has gone, which is no fault of ours
        log.debug("a client has gone before its answer", reason=str(error))
        return rich_status(RequestAborted("the client has gone"))
    log.error("unexpected error in a call", exc_info=error)
    return rich_status(TwostrokeError(f"internal error: {type(error).__name__}"))


def make_peer_server(
    address: str,
    service_name: str,
    peers: PeerSection,
    *,
    setting: str,
    options: Sequence[tuple[str, object]] = (),
) -> GrpcServer:
    """The server of a worker for the other services, which does not listen yet. The arguments are as `GrpcServer`'s."""
    tls = read_peer_tls(peers)
    return GrpcServer(
        address, [service_name], peers.max_message_bytes, tls and tls.files, options=options, setting=setting
    )


class Service:
    """A service that a process runs."""

    def __init__(self) -> None:
        self._opened = contextlib.AsyncExitStack()  # what `stop` closes

    async def start(self) -> None:
        """Opens all parts in the order of their dependencies."""
        raise NotImplementedError

    async def run(self) -> None:
        """Serves until cancelled. Raises the error of a part that fails."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Closes everything that `start` opened, in reverse order, also after a start that failed."""
        await self._opened.aclose()


AnyService = TypeVar("AnyService", bound=Service)


async def serve(make_service: Callable[[], AnyService], on_started: Callable[[AnyService], None] | None = None) -> None:
    """Makes, starts, runs and stops a service. Raises the error that ended it, its constructor's too."""
    service = make_service()
    try:
        await service.start()
        if on_started is not None:
            on_started(service)
        await service.run()
    finally:
        await uninterrupted(service.stop())  # signals that come again change nothing


class EventLoop(uvloop.Loop):
    """uvloop's, which takes all of gRPC's wake-ups at once. For processes with one event loop.

    For each of its events (a message was written, a call has come) gRPC's thread writes a byte into a socket. What it
    gives the loop to read them handles all events that there are, but reads one byte in an iteration. If there are more
    events than iterations, unread bytes fill the socket after some 280. Then the thread has to wait for an iteration
    before each further event, and a new call waits behind all messages.
    """

    def add_reader(self, fileobj: Any, callback: Callable[..., object], *arguments: Any) -> None:
        """Like uvloop's; gRPC's reader finds a single byte."""
        owner = getattr(getattr(callback, "func", callback), "__self__", None)
        if isinstance(owner, cygrpc.PollerCompletionQueue):
            callback = functools.partial(_handle_events, fileobj, callback)
        super().add_reader(fileobj, callback, *arguments)


def _handle_events(wakeups: socket.socket, handle: Callable[[], object]) -> None:
    num_waiting = len(wakeups.recv(MAX_WAKEUPS, socket.MSG_PEEK))
    if num_waiting > 1:
        wakeups.recv(num_waiting - 1)
    handle()  # reads the last one


def run_service(main: Coroutine[Any, Any, None], drain: asyncio.Event | None = None) -> NoReturn:
    """Runs a service's main coroutine on uvloop; SIGTERM and SIGINT cancel it. Expected errors exit with status 1.

    With `drain`, the first SIGTERM only sets this event: the service ends itself when its requests have ended.
    """
    status = 0
    try:
        uvloop.run(_cancel_on_signal(main, drain), loop_factory=EventLoop)
    except TwostrokeError as error:
        log.error("stopped by an error", kind=type(error).__name__, error=str(error))
        status = 1
    except Exception as error:
        log.critical("stopped by a bug", exc_info=error)
        status = 70  # EX_SOFTWARE
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the stream has no reader any more
            stream.flush()
    os._exit(status)  # everything is closed; a regular exit would take a second to unload torch


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, even if the caller is cancelled meanwhile. `work` must have its own time limit."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all coroutines to their ends. If one fails, cancels the others and raises its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_until(end: Coroutine[Any, Any, None], *coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all coroutines until `end` returns, then cancels them. If one fails, raises its error."""
    others = asyncio.ensure_future(run_together(*coroutines))
    until = asyncio.ensure_future(end)
    try:
        done, _ = await asyncio.wait([others, until], return_when=asyncio.FIRST_COMPLETED)
        if until not in done:
            others.result()  # raises their error; if all returned without one, `end` decides
            await until
        else:
            until.result()
    finally:
        for task in (others, until):
            task.cancel()
        await asyncio.gather(others, until, return_exceptions=True)


async def _cancel_on_signal(main: Coroutine[Any, Any, None], drain: asyncio.Event | None) -> None:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        if drain is None or drain.is_set():
            task.cancel()
        else:
            drain.set()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("stopped by a signal")
