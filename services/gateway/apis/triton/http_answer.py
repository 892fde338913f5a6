"""Answers to inference and generate requests over HTTP, as ASGI responses. They end with their client's connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from services.common.errors import InvalidRequest
from services.gateway.apis.shared.answer import STREAM_HEADERS, events, send_pieces
from services.gateway.apis.triton.errors import text_error
from services.gateway.apis.triton.http_body import HEADER_LENGTH
from services.gateway.apis.triton.inference import InferRequest, InferResponse, Triton
from services.gateway.apis.triton.models import VERSION
from services.gateway.apis.triton.tensors import Tensor, values_of
from services.gateway.core.chunks import MAX_INLINE_VALUES
from services.gateway.http.connection import while_connected
from services.gateway.http.json_pieces import json_pieces

# The JSON of outputs, and the raw bytes that follow it.
Describe = Callable[[Sequence[Tensor]], tuple[dict[str, Any], Sequence[bytes | memoryview]]]
RAW_BYTES_PER_PIECE = 2**20


class InferAnswer(Response):
    """The single response to a request; `describe` turns its outputs into JSON and raw bytes."""

    def __init__(self, triton: Triton, request: InferRequest, describe: Describe) -> None:
        super().__init__()
        self._triton = triton
        self._request = request
        self._describe = describe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(scope, receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, caller = self._request, scope["state"]["caller"]
        if request.is_stop:
            await self._triton.stop_at_peers(request.id, caller.owner)
            self._triton.stop(request.id, caller.owner)
            await self._send(scope, receive, send, ())
            return
        async with self._triton.infer(request, caller) as outputs:  # their memory is counted until they are sent
            await self._send(scope, receive, send, outputs)

    async def _send(self, scope: Scope, receive: Receive, send: Send, outputs: Sequence[Tensor]) -> None:
        heavy_work = self._triton.service.heavy_work
        document, parts = self._describe(outputs)
        is_large = sum(each.values.size for each in outputs) > MAX_INLINE_VALUES
        if is_large and not parts:
            await send_pieces(send, heavy_work.pieces(json_pieces(document)))
            return
        head = await heavy_work.whole(json_pieces(document)) if is_large else to_json(document)
        headers = {HEADER_LENGTH: str(len(head))} if parts else {}
        media_type = "application/octet-stream" if parts else "application/json"
        if not is_large:
            await Response(b"".join([head, *parts]), 200, headers, media_type)(scope, receive, send)
            return
        headers |= {"content-type": media_type, "content-length": str(len(head) + sum(map(len, parts)))}
        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
        for part in (head, *parts):
            for start in range(0, len(part), RAW_BYTES_PER_PIECE):
                piece = bytes(part[start : start + RAW_BYTES_PER_PIECE])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class GenerateStream(Response):
    """All responses to a request as server-sent events."""

    def __init__(self, triton: Triton, request: InferRequest, first_token_timeout_s: float) -> None:
        """`first_token_timeout_s`: longest time that the status line waits for a response or an error."""
        super().__init__()
        self._triton = triton
        self._request = request
        self._first_token_timeout_s = first_token_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(scope, receive, self._answer(scope, send))

    async def _answer(self, scope: Scope, send: Send) -> None:
        request = self._request
        if request.is_stop:
            raise InvalidRequest("stop has a single response: send it to generate or infer", "stop")
        async with contextlib.aclosing(self._triton.stream(request, scope["state"]["caller"])) as responses:
            first = asyncio.ensure_future(anext(responses))
            try:
                await asyncio.wait({first}, timeout=self._first_token_timeout_s)
                if first.done():
                    first.result()  # an error raised here gets a status line of its own
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                await self._send_events(scope["state"]["send_body"], first, responses)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)  # before the iterator is closed

    async def _send_events(
        self, send: Send, first: asyncio.Future[InferResponse], responses: AsyncIterator[InferResponse]
    ) -> None:
        end = b""
        try:
            response = await first
            while not response.is_final:
                await self._send_event(send, response)
                response = await anext(responses)
            await self._send_event(send, response)
        except Exception as error:  # after any error the client must not take the stream for complete
            end = events([text_error(error)])
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_event(self, send: Send, response: InferResponse) -> None:
        """Sends a large event while it is made, in turns of `HeavyWork`."""
        described = generate_object(self._request, response.outputs)
        if sum(each.values.size for each in response.outputs) <= MAX_INLINE_VALUES:
            await send({"type": "http.response.body", "body": events([described]), "more_body": True})
            return
        pieces = itertools.chain((b"data: ",), json_pieces(described), (b"\n\n",))
        async for piece in self._triton.service.heavy_work.pieces(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": True})


def generate_object(request: InferRequest, outputs: Sequence[Tensor]) -> dict[str, Any]:
    """Outputs as the JSON object of `generate`: a tensor with one element is a value, any other a flat list."""
    described: dict[str, Any] = {"model_name": request.model.name, "model_version": VERSION}
    if request.id:
        described["id"] = request.id
    described |= {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    for tensor in outputs:
        values = values_of(tensor)
        described[tensor.name] = next(values) if tensor.values.size == 1 else values
    return described
