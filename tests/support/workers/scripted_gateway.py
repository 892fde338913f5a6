"""A gateway that answers as a test says, over gRPC and over HTTP, for the load generator."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from bench.load.transport import Transport, open_transport
from services.pb import gateway_pb2, gateway_pb2_grpc


class ScriptedGateway(gateway_pb2_grpc.GatewayServicer):
    """Answers each request with chunks of the given numbers of tokens; names in `errors` fail after them."""

    def __init__(self, chunk_sizes: list[int]) -> None:
        self.chunk_sizes = chunk_sizes
        self.errors: dict[str, str] = {}
        self.has_finish = True
        self.num_output_tokens: int | None = None  # the number that it reports; None: the true one
        self.request_ids: list[str] = []
        self.num_running = 0
        self.max_running = 0
        self.gate = asyncio.Event()  # answers wait until it is set
        self.gate.set()

    async def GenerateStream(
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.GenerateChunk]:
        self.request_ids.append(request.request_id)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        await self.gate.wait()
        for num_tokens in self.chunk_sizes:
            await asyncio.sleep(0.001)
            yield gateway_pb2.GenerateChunk(token_ids=[9] * num_tokens)
        self.num_running -= 1
        if request.request_id in self.errors:
            await context.abort(grpc.StatusCode.ABORTED, self.errors[request.request_id])
        if self.has_finish:
            usage = gateway_pb2.Usage(
                num_prompt_tokens=len(request.prompt_token_ids.ids),
                num_output_tokens=sum(self.chunk_sizes) if self.num_output_tokens is None else self.num_output_tokens,
            )
            yield gateway_pb2.GenerateChunk(finish=gateway_pb2.Finish(usage=usage))


class _AbortedOverHttp(Exception):
    """Stands in for the exception that gRPC raises on abort."""


class _HttpContext:
    """The part of a `ServicerContext` that `ScriptedGateway` needs."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _AbortedOverHttp(details)


class HttpFront:
    """Sends the scripted gateway's answers as server-sent events. Each event arrives in two parts."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self._gateway = gateway

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        body = json.loads(await reader.readexactly(int(fields["content-length"])))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        message = gateway_pb2.GenerateRequest(request_id=fields["x-request-id"])
        message.prompt_token_ids.ids.extend(body["prompt"])
        try:
            async for chunk in self._gateway.GenerateStream(message, _HttpContext()):  # type: ignore[arg-type]
                await self._send_chunk(writer, chunk)
        except _AbortedOverHttp as error:
            await self._send(writer, json.dumps({"error": {"code": "request_aborted", "message": str(error)}}))
        writer.close()

    async def _send_chunk(self, writer: asyncio.StreamWriter, chunk: gateway_pb2.GenerateChunk) -> None:
        if not chunk.HasField("finish"):
            choice = {"index": 0, "text": "x", "token_ids": list(chunk.token_ids)}
            await self._send(writer, json.dumps({"choices": [choice]}))
            return
        usage = chunk.finish.usage
        counts = {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        }
        await self._send(writer, json.dumps({"choices": [], "usage": counts}))
        await self._send(writer, "[DONE]")

    async def _send(self, writer: asyncio.StreamWriter, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        for part in (event[:-1], event[-1:]):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def served(gateway: ScriptedGateway, protocol: str, directory: Path) -> AsyncIterator[Transport]:
    """Serves the gateway on a socket in `directory`; yields a transport of `protocol` to it."""
    address = f"unix:{directory}/scripted.sock"
    if protocol == "http":
        front = await asyncio.start_unix_server(HttpFront(gateway).answer, address.removeprefix("unix:"))
        async with front, open_transport(protocol, address) as transport:
            yield transport
        return
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServicer_to_server(gateway, server)
    server.add_insecure_port(address)
    await server.start()
    async with open_transport(protocol, address) as transport:
        yield transport
    await server.stop(None)
