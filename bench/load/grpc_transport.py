"""`GrpcTransport`: requests as `GenerateStream` calls, all over one connection."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from bench.load.transport import CONNECT_TIMEOUT_S, Answer, NobodyAnswers, RequestError, TimedRequest
from services.pb import gateway_pb2, gateway_pb2_grpc
from services.rpc.client import found_nobody

GENERATE_STREAM = f"/{gateway_pb2.DESCRIPTOR.services_by_name['Gateway'].full_name}/GenerateStream"
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0)]


class GrpcTransport:
    """The `Transport` over gRPC. A chunk is a serialized `GenerateChunk`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = gateway_pb2_grpc.GatewayStub(channel)
        self._generate = channel.unary_stream(GENERATE_STREAM)  # without serializers: requests and chunks are bytes

    async def model_info(self) -> gateway_pb2.ModelInfoResponse:
        try:
            return await self._stub.ModelInfo(gateway_pb2.ModelInfoRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise NobodyAnswers("gRPC") if found_nobody(error) else _failure(error) from error

    def encode(self, message: gateway_pb2.GenerateRequest) -> bytes:
        return message.SerializeToString()

    async def send(self, request: TimedRequest, timeout_s: float, on_chunk: Callable[[bytes], None]) -> None:
        try:
            async for chunk in self._generate(request.message, timeout=timeout_s):
                on_chunk(chunk)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error

    def parse(self, chunks: Sequence[bytes]) -> Answer:
        messages = [gateway_pb2.GenerateChunk.FromString(chunk) for chunk in chunks]
        has_finish = bool(messages) and messages[-1].HasField("finish")
        usage = messages[-1].finish.usage if has_finish else None
        return Answer([len(message.token_ids) for message in messages], usage, error=None)


@contextlib.asynccontextmanager
async def open_grpc(address: str) -> AsyncIterator[GrpcTransport]:
    """`address` is that of the gateway's gRPC server."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield GrpcTransport(channel)


def _failure(error: grpc.aio.AioRpcError) -> RequestError:
    return RequestError(f"{error.code().name}: {' '.join((error.details() or '').split())}")
