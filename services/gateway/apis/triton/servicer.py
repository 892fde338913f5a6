"""The gRPC service of Triton's protocol: converts messages; `Triton` does the rest."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import structlog
from google.protobuf.json_format import ParseDict

from services.common.errors import DeadlineExceeded, TwostrokeError, UnknownModel
from services.gateway.access.access import Caller
from services.gateway.access.reception import StreamedRequest, current_caller, held_by_answer, traceparent_of
from services.gateway.access.slow_reader import SlowReaders, WatchedCall
from services.gateway.apis.triton.inference import InferRequest, Triton, server_metadata
from services.gateway.apis.triton.messages import decode_infer_request, encode_response
from services.gateway.apis.triton.models import find_model
from services.gateway.apis.triton.tensors import Tensor
from services.gateway.core.chunks import MAX_INLINE_VALUES
from services.gateway.resources.memory_budget import hold_body
from services.pb import triton_pb2, triton_pb2_grpc

log = structlog.get_logger()

TRITON_SERVICE_NAME = triton_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
MAX_STREAM_REQUESTS = 1024  # of one stream at the same time; further ones are not read before one has ended


class TritonServicer(triton_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers clients that `Reception` accepts. Its errors become statuses in `services.rpc.server`."""

    def __init__(self, triton: Triton) -> None:
        section = triton.service.section
        self._triton = triton
        self._slow_readers = SlowReaders(section.slow_reader_timeout_s)
        self._idle_timeout_s = section.grpc_idle_timeout_s  # how long a stream may be open without a request

    async def ServerLive(
        self, request: triton_pb2.ServerLiveRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.ServerLiveResponse:
        return triton_pb2.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: triton_pb2.ServerReadyRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.ServerReadyResponse:
        return triton_pb2.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(
        self, request: triton_pb2.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.ModelReadyResponse:
        with contextlib.suppress(UnknownModel):
            find_model(request.name, request.version)
            return triton_pb2.ModelReadyResponse(ready=self._is_ready)
        return triton_pb2.ModelReadyResponse(ready=False)

    async def ServerMetadata(
        self, request: triton_pb2.ServerMetadataRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.ServerMetadataResponse:
        return ParseDict(server_metadata(), triton_pb2.ServerMetadataResponse())

    async def ModelMetadata(
        self, request: triton_pb2.ModelMetadataRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.ModelMetadataResponse:
        model = find_model(request.name, request.version)
        return ParseDict(model.metadata(), triton_pb2.ModelMetadataResponse())

    async def ModelConfig(
        self, request: triton_pb2.ModelConfigRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.ModelConfigResponse:
        configuration = find_model(request.name, request.version).configuration(self._triton.limits.max_batch_size)
        return triton_pb2.ModelConfigResponse(config=ParseDict(configuration, triton_pb2.ModelConfig()))

    async def ModelStatistics(
        self, request: triton_pb2.ModelStatisticsRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.ModelStatisticsResponse:
        names = [find_model(request.name, request.version).name] if request.name else list(self._triton.statistics)
        found = {"model_stats": [self._triton.statistics[name].describe(name) for name in names]}
        return ParseDict(found, triton_pb2.ModelStatisticsResponse(), ignore_unknown_fields=True)

    async def RepositoryIndex(
        self, request: triton_pb2.RepositoryIndexRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.RepositoryIndexResponse:
        models = [each for each in self._triton.index() if not request.ready or each["state"] == "READY"]
        return ParseDict({"models": models}, triton_pb2.RepositoryIndexResponse())

    async def ModelInfer(
        self, message: triton_pb2.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> triton_pb2.ModelInferResponse:
        """The single response to a request. It ends when the call is cancelled."""
        caller = current_caller()
        request = self._decode(message, context)
        if request.is_stop:
            await self._triton.stop_at_peers(request.id, caller.owner)
            # TensorRT-LLM's client expects this answer before that of the stopped request.
            context.add_done_callback(lambda _: self._triton.stop(request.id, caller.owner))
            return encode_response(request.model.name, request.id, ())
        async with self._triton.infer(request, caller) as outputs:
            response = await self._encode(request, outputs)
        held_by_answer(context, self._triton.service.memory).add(response.ByteSize())
        return response

    async def ModelStreamInfer(
        self, requests: AsyncIterator[StreamedRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Runs each request as it comes. The error of a request is a message, and the others go on."""
        caller, lock = current_caller(), asyncio.Lock()
        running: set[asyncio.Task[None]] = set()
        with self._slow_readers.watching(context, "") as call:
            try:
                async for request in self._until_idle(requests, running):
                    task = asyncio.create_task(self._run(request, call, lock, caller))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    task.add_done_callback(lambda _, request=request: request.release())
                while running:
                    await asyncio.wait(running)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    @property
    def _is_ready(self) -> bool:
        return self._triton.service.unready_reason() is None

    def _decode(
        self, message: triton_pb2.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> InferRequest:
        return decode_infer_request(message, self._triton.limits, traceparent_of(context))

    async def _until_idle(
        self, requests: AsyncIterator[StreamedRequest], running: set[asyncio.Task[None]]
    ) -> AsyncIterator[StreamedRequest]:
        """The requests. Raises `DeadlineExceeded` if no request runs and none comes for `idle_timeout_s`."""
        reader = asyncio.ensure_future(anext(requests, None))
        try:
            while True:
                if len(running) >= MAX_STREAM_REQUESTS:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                done, _ = await asyncio.wait({reader}, timeout=self._idle_timeout_s)
                if not done and not running:
                    raise DeadlineExceeded(f"the stream had no request for {self._idle_timeout_s:g} s, the limit")
                if done:
                    request = reader.result()
                    if request is None:
                        return
                    yield request
                    reader = asyncio.ensure_future(anext(requests, None))
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _run(self, streamed: StreamedRequest, call: WatchedCall, lock: asyncio.Lock, caller: Caller) -> None:
        """Answers one request of a stream."""
        hold_body(streamed.held)
        message: triton_pb2.ModelInferRequest = streamed.message
        try:
            request = self._decode(message, call.context)
            if request.is_stop:
                await self._triton.stop_at_peers(request.id, caller.owner)
                self._triton.stop(request.id, caller.owner)
                await self._send(await self._encode(request, (), is_final=True), "", call, lock)
                return
            async with contextlib.aclosing(self._triton.stream(request, caller)) as responses:
                async for each in responses:
                    await self._send(await self._encode(request, each.outputs, is_final=each.is_final), "", call, lock)
        except TwostrokeError as error:
            await self._send_error(message, str(error), call, lock)
        except (grpc.aio.UsageError, grpc.aio.InternalError):  # the call has ended while a response was sent
            log.debug("client is gone", request_id=message.id)
        except Exception as error:
            log.error("unexpected error in a stream", exc_info=error)
            await self._send_error(message, f"internal error: {type(error).__name__}", call, lock)

    async def _send_error(
        self, message: triton_pb2.ModelInferRequest, text: str, call: WatchedCall, lock: asyncio.Lock
    ) -> None:
        response = encode_response(message.model_name[:256], message.id, (), True)
        with contextlib.suppress(grpc.aio.UsageError, grpc.aio.InternalError):
            await self._send(response, text, call, lock)

    async def _send(
        self, response: triton_pb2.ModelInferResponse, error: str, call: WatchedCall, lock: asyncio.Lock
    ) -> None:
        async with lock:
            call.sending_since = time.monotonic()
            await call.context.write(
                triton_pb2.ModelStreamInferResponse(error_message=error, infer_response=response)
            )
            call.sending_since = None

    async def _encode(
        self, request: InferRequest, outputs: Sequence[Tensor], is_final: bool | None = None
    ) -> triton_pb2.ModelInferResponse:
        if sum(each.values.size for each in outputs) > MAX_INLINE_VALUES:
            await self._triton.service.heavy_work.turn()
        return encode_response(request.model.name, request.id, outputs, is_final)
