"""`GrpcResumption`: resumable requests over gRPC. Its items are the messages that a client gets."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from services.common.errors import InvalidRequest
from services.gateway.access.reception import current_caller
from services.gateway.access.slow_reader import SlowReaders
from services.gateway.core.generation import Generation
from services.gateway.request.read_request import MAX_REQUEST_ID_CHARACTERS, check_name
from services.gateway.resources.memory_budget import BYTES_PER_BODY_BYTE, HeldMemory, MemoryBudget
from services.gateway.resume.recording import AnswerReader, Received, Recording
from services.gateway.resume.resumption import Call, Resumption
from services.pb import gateway_pb2

STREAM, WHOLE = "grpc.stream", "grpc.whole"
Encode = Callable[[Generation, Recording], Awaitable[None]]  # adds the answer's messages to the recording
Start = Callable[[gateway_pb2.GenerateRequest], Awaitable[Generation]]


@dataclass(frozen=True, slots=True)
class Way:
    """How requests of one kind are answered."""

    kind: str  # part of the name
    start: Start
    encode: Encode
    response_type: Any  # of each message


class GrpcResumption:
    """Runs in the event loop; each call is handled by a task whose caller is known."""

    def __init__(self, resumption: Resumption | None, memory: MemoryBudget, slow_readers: SlowReaders) -> None:
        """`resumption`: None if it is off."""
        self._resumption = resumption
        self._memory = memory
        self._slow_readers = slow_readers

    async def answer(
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext, way: Way
    ) -> AsyncIterator[Any]:
        """The messages of a resumable request from the first one on."""
        if not request.request_id:
            raise InvalidRequest("a resumable request needs a request_id", "request_id")
        async for message in self._answer(request.request_id, context, way, None, request):
            yield message

    async def rest(
        self, request: gateway_pb2.ResumeRequest, context: grpc.aio.ServicerContext, way: Way
    ) -> AsyncIterator[Any]:
        """The messages behind those that the client has received."""
        received = Received(request.num_received, request.digest if request.HasField("digest") else None)
        async for message in self._answer(request.request_id, context, way, received):
            yield message

    async def _answer(
        self,
        request_id: str,
        context: grpc.aio.ServicerContext,
        way: Way,
        received: Received | None,
        request: gateway_pb2.GenerateRequest | None = None,
    ) -> AsyncIterator[Any]:
        if self._resumption is None:
            raise InvalidRequest("requests cannot be resumed here: gateway.resume is off", "resumable")
        check_name("request_id", request_id, MAX_REQUEST_ID_CHARACTERS)  # before others are asked for it

        async def produce(recording: Recording) -> None:
            recording.begin(b"", is_stream=way.kind == STREAM)
            generation = await way.start(gateway_pb2.GenerateRequest.FromString(recording.record.message))
            try:
                await way.encode(generation, recording)
            finally:
                generation.close()

        held = HeldMemory(self._memory, current_caller().client_id)
        fingerprint, data = None, b""
        if request is not None:
            fingerprint, data = fingerprint_of(request), request.SerializeToString()
        try:
            await held.reserve(BYTES_PER_BODY_BYTE * len(data), "its message")
            name = (current_caller().owner, way.kind, request_id)
            call = Call(name, fingerprint, received, produce, held, request_id, data)
            reader = await self._resumption.read(call)
        finally:
            held.release()
        async for message in self._messages(reader, request_id, context, way.response_type):
            yield message

    async def _messages(
        self, reader: AnswerReader, request_id: str, context: grpc.aio.ServicerContext, response_type: Any
    ) -> AsyncIterator[Any]:
        # Closed here, because a handler that is cancelled while it sends is only garbage collected.
        context.add_done_callback(lambda _: reader.close())
        await reader.begin()
        with self._slow_readers.watching(context, request_id) as call:
            while (item := await reader.next()) is not None:
                call.sending_since = time.monotonic()
                yield response_type.FromString(item)
                call.sending_since = None


def fingerprint_of(request: gateway_pb2.GenerateRequest) -> bytes:
    """A hash of a request, without its trace, which differs from call to call."""
    copy = gateway_pb2.GenerateRequest()
    copy.CopyFrom(request)
    copy.traceparent = ""
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).digest()
