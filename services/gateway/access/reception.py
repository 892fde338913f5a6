"""`Reception`: checks a gRPC call's API key before its message is read, and limits the reading.

By default gRPC reads and parses the message of a unary call first, whoever sent it, and waits for it for ever. Here
each handler reads the message itself: after the caller is known, within a time limit, and with a limited number of
others. Calls that need no key may last for ever, so their number is limited too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.common.errors import CapacityError, DeadlineExceeded, InvalidRequest, RequestAborted
from services.common.fairness import Client
from services.gateway.access.access import Access, Caller
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES, HeavyWork, work_for
from services.gateway.resources.memory_budget import BYTES_PER_BODY_BYTE, HeldMemory, MemoryBudget, hold_body

# Open calls that need no key, such as health watches. The connections with such calls share the maximum evenly, but
# each may have at least the minimum. One call takes about 16 KiB.
MAX_KEYLESS_CALLS = 256
MIN_KEYLESS_CALLS = 4
# Streams that wait for a further request; each may hold the beginning of a message.
MAX_OPEN_STREAMS = 1024
READ_S = 0.25  # for a message that has come with its call, but has not been read yet, since many come at once

_caller: ContextVar[Caller] = ContextVar("caller")  # the caller of the call that this task handles


@dataclass(frozen=True, slots=True)
class StreamedRequest:
    """One message of a stream of requests. Call `release` when it has been answered."""

    message: Any
    held: HeldMemory
    open_requests: set[HeldMemory]  # of the stream

    def release(self) -> None:
        """Gives back the memory that its message takes."""
        self.held.release()
        self.open_requests.discard(self.held)


def current_caller() -> Caller:
    """The caller of the current call. Raises `LookupError` outside the calls of guarded services."""
    return _caller.get()


def traceparent_of(context: grpc.aio.ServicerContext) -> str:
    """The caller's W3C trace context; empty if the call has none."""
    metadata = context.invocation_metadata() or ()
    return next((str(value) for name, value in metadata if name == "traceparent"), "")


def held_by_answer(context: grpc.aio.ServicerContext, budget: MemoryBudget) -> HeldMemory:
    """What holds the memory of the answer to the current call, until that has been sent."""
    held = HeldMemory(budget, current_caller().client_id)
    context.add_done_callback(lambda _: held.release())
    return held


class Reception(grpc.aio.ServerInterceptor):
    """The interceptor between `GrpcServer`'s own, which turns errors into statuses, and the handlers."""

    def __init__(
        self,
        access: Access,
        guarded_services: list[str],
        timeout_s: float,
        max_receiving: int,
        memory: MemoryBudget,
        heavy_work: HeavyWork,
    ) -> None:
        """Calls of `guarded_services` (full proto names) need a key if there are keys.

        A message must arrive within `timeout_s`. If more than `max_receiving` messages arrive at once, one is dropped:
        the oldest one of the client that sends most, if it is not complete `READ_S` later. Nearly all messages arrive
        together with their headers, but they count until they have been read. Calls of other services, health and
        reflection, share `MAX_KEYLESS_CALLS`.
        """
        self._access = access
        self._guarded = tuple(f"/{name}/" for name in guarded_services)
        self._timeout_s = timeout_s
        self._receiving = _Waiting(max_receiving)
        self._open_streams = _Waiting(MAX_OPEN_STREAMS)  # that wait for a further message
        self._keyless_calls = Counter[str]()  # open calls, by connection
        self._memory = memory
        self._heavy_work = heavy_work

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if not handler_call_details.method.startswith(self._guarded):
            return grpc.stream_stream_rpc_method_handler(
                self._keyless(handler), response_serializer=handler.response_serializer
            )

        async def receive(context: grpc.aio.ServicerContext) -> Any:
            held = HeldMemory(self._memory, self._identify(context))
            hold_body(held)
            context.add_done_callback(lambda _: held.release())
            return await self._receive_one(context, handler, held)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._guarded_stream(handler), response_serializer=handler.response_serializer
            )
        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(
                _after(receive, handler.unary_unary), response_serializer=handler.response_serializer
            )
        after = _after if inspect.iscoroutinefunction(handler.unary_stream) else _stream_after
        return grpc.stream_stream_rpc_method_handler(
            after(receive, handler.unary_stream), response_serializer=handler.response_serializer
        )

    def _keyless(self, handler: grpc.RpcMethodHandler) -> Callable[..., Awaitable[None]]:
        """A handler that ends only after the client has read the whole answer: unread answers take memory."""

        async def requests(context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            while (message := await self._receive(context)) is not grpc.aio.EOF:  # each within the time limit
                yield await self._parse(message, handler.request_deserializer)

        async def handle(_: object, context: grpc.aio.ServicerContext) -> None:
            with self._keyless_call(context.peer()):
                if handler.request_streaming:  # reflection
                    async for response in handler.stream_stream(requests(context), context):
                        await context.write(response)
                elif handler.response_streaming:  # a health watch, which writes its messages itself
                    await handler.unary_stream(await self._receive_one(context, handler), context)
                else:
                    response = await handler.unary_unary(await self._receive_one(context, handler), context)
                    await context.write(response)

        return handle

    def _guarded_stream(self, handler: grpc.RpcMethodHandler) -> Callable[..., Awaitable[None]]:
        """A handler of a stream of requests: the first message has the time limit of a single message.

        Its behaviour is a coroutine that gets a `StreamedRequest` for each, writes the responses itself and ends
        streams that rest for too long.
        """

        async def requests(
            context: grpc.aio.ServicerContext, client: Client, open_requests: set[HeldMemory]
        ) -> AsyncIterator[StreamedRequest]:
            message = await self._receive(context)
            while message is not grpc.aio.EOF:
                held = HeldMemory(self._memory, client)
                open_requests.add(held)
                await _count(held, message)
                parsed = await self._parse(message, handler.request_deserializer)
                del message
                yield StreamedRequest(parsed, held, open_requests)
                message = await self._receive_later(context)

        async def handle(_: object, context: grpc.aio.ServicerContext) -> None:
            client, open_requests = self._identify(context), set[HeldMemory]()
            try:
                await handler.stream_stream(requests(context, client, open_requests), context)
            finally:
                for held in open_requests:
                    held.release()

        return handle

    def _identify(self, context: grpc.aio.ServicerContext) -> Client:
        """Finds the caller, for whom the current task works from now on. Raises `Unauthenticated`."""
        caller = self._access.identify_call(context)
        _caller.set(caller)
        work_for(caller.client_id)
        return caller.client_id

    async def _receive_later(self, context: grpc.aio.ServicerContext) -> Any:
        """A further message of a stream, or `EOF`. Beyond `MAX_OPEN_STREAMS` a stream ends."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                with self._open_streams.one_more(_caller.get().client_id, limit):
                    return await context.read()
        except TimeoutError:
            raise CapacityError(f"{MAX_OPEN_STREAMS} streams wait for requests, the limit") from None

    @contextlib.contextmanager
    def _keyless_call(self, peer: str) -> Iterator[None]:
        """Counts an open call of the connection `peer`. Raises `CapacityError` beyond the connection's limit.

        A call that waits for its client cannot be ended. So the limit of each connection leaves calls for later ones.
        """
        calls = self._keyless_calls
        calls[peer] += 1
        try:
            limit = max(MIN_KEYLESS_CALLS, MAX_KEYLESS_CALLS // len(calls))
            if calls[peer] > limit:
                raise CapacityError(
                    f"{calls[peer]} calls without an API key are open in this connection, the limit is {limit} "
                    f"while {len(calls)} connections have such calls"
                )
            yield
        finally:
            calls[peer] -= 1
            if not calls[peer]:
                del calls[peer]

    async def _receive(self, context: grpc.aio.ServicerContext) -> Any:
        """The bytes of the next message, or `EOF`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                caller = _caller.get(None)
                with self._receiving.one_more(None if caller is None else caller.client_id, limit):
                    message = await context.read()
        except TimeoutError:
            if limit.when() != deadline:
                raise CapacityError(
                    f"the message was not complete when {self._receiving.most} others began, the limit"
                ) from None
            raise DeadlineExceeded(f"the message was not complete within {self._timeout_s:g} s") from None
        return message

    async def _receive_one(
        self, context: grpc.aio.ServicerContext, handler: grpc.RpcMethodHandler, held: HeldMemory | None = None
    ) -> Any:
        """The message of a unary call; `held` counts it."""
        message = await self._receive(context)
        if message is grpc.aio.EOF:
            raise RequestAborted("the call has no message")
        if held is not None:
            await _count(held, message)
        return await self._parse(message, handler.request_deserializer)

    async def _parse(self, data: bytes, deserialize: Callable[[bytes], Any]) -> Any:
        try:
            if len(data) <= MAX_INLINE_BYTES:
                await self._heavy_work.beginning()
                return deserialize(data)
            await self._heavy_work.turn()
            message = deserialize(data)
            await self._heavy_work.turn()  # for whoever reads the message
            return message
        except DecodeError as error:
            raise InvalidRequest(f"the message of {len(data)} bytes cannot be parsed: {error}") from None


class _Waiting:
    """Calls that wait for their clients. One more than there may be ends the oldest of the client that has most."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._limits: dict[Client | None, dict[asyncio.Timeout, None]] = {}  # oldest first; None: who needs no key
        self._count = 0

    @contextlib.contextmanager
    def one_more(self, client: Client | None, limit: asyncio.Timeout) -> Iterator[None]:
        """A context in which a call waits, whose time limit ends it if it is the one."""
        self._limits.setdefault(client, {})[limit] = None
        self._count += 1
        try:
            if self._count > self.most:
                largest = max(self._limits, key=lambda each: len(self._limits[each]))
                oldest = next(iter(self._limits[largest]))
                self._leave(largest, oldest)
                if not oldest.expired():  # otherwise it ends anyway
                    end_s, latest_s = asyncio.get_running_loop().time() + READ_S, oldest.when()
                    oldest.reschedule(end_s if latest_s is None else min(end_s, latest_s))
            yield
        finally:
            self._leave(client, limit)

    def _leave(self, client: Client | None, limit: asyncio.Timeout) -> None:
        """Does nothing the second time."""
        if limit in (limits := self._limits.get(client, {})):
            del limits[limit]
            self._count -= 1
            if not limits:
                del self._limits[client]


async def _count(held: HeldMemory, message: bytes) -> None:
    """Counts a message that is here already, and then what will be made of it."""
    held.add(len(message))
    await held.reserve_body((BYTES_PER_BODY_BYTE - 1) * len(message), "what is made of its message")
    held.end_body()


def _after(receive: Callable[..., Awaitable[Any]], behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    async def handle(_: object, context: grpc.aio.ServicerContext) -> Any:
        return await behaviour(await receive(context), context)

    return handle


def _stream_after(
    receive: Callable[..., Awaitable[Any]], behaviour: Callable[..., AsyncIterator[Any]]
) -> Callable[..., Any]:
    async def handle(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async for response in behaviour(await receive(context), context):
            yield response

    return handle
