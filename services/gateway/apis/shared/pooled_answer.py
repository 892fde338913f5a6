"""The answer to a request for vectors as an ASGI response: computed when the server calls it, written in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from services.common.errors import InvalidRequest
from services.gateway.apis.shared.answer import send_pieces
from services.gateway.http.connection import while_connected
from services.gateway.http.json_pieces import list_pieces
from services.gateway.resources.heavy_work import HeavyWork
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.resources.repeatable import current_run
from services.gateway.vectors.vectors import InputOptions, PooledInput, VectorInput, Vectors, shaped

MAX_INLINE_VALUES = 4096  # numbers that the event loop writes at once: about a millisecond
PIECE_VALUES = 1024

# Of what all inputs have become: the JSON of the answer in pieces, each of which takes less than a millisecond.
Write = Callable[[Sequence[PooledInput]], Iterator[bytes]]


class PooledAnswer(Response):
    """Cancels all inputs if the client disconnects."""

    media_type = "application/json"

    def __init__(
        self,
        vectors: Vectors,
        inputs: Sequence[VectorInput],
        options: InputOptions,
        write: Write,
        field: str = "input",
        num_given: int | None = None,
        prepare: Callable[[Sequence[PooledInput]], None] | None = None,
    ) -> None:
        """field, num_given: see `Vectors.pool`. prepare: called in a thread before `write`"""
        super().__init__()
        self._vectors, self._inputs, self._options = vectors, inputs, options
        self._write, self._field, self._num_given, self._prepare = write, field, num_given, prepare

    def headers_of(self, pooled: Sequence[PooledInput]) -> dict[str, str]:
        """Further headers."""
        return {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises a `TwostrokeError` before the status line is sent."""
        if current_run() is not None:
            raise InvalidRequest("only generated answers can be resumed: ask for the vectors again")
        await while_connected(scope, receive, self._answer(scope, send))

    async def _answer(self, scope: Scope, send: Send) -> None:
        caller = scope["state"]["caller"]
        service = self._vectors.service
        held = HeldMemory(service.memory, caller.client_id)
        try:
            pooled = await self._vectors.pool(
                self._inputs, self._options, caller, held, self._field, self._num_given
            )
            heavy_work: HeavyWork = service.heavy_work
            if self._prepare is not None:
                await heavy_work.in_thread(self._prepare, pooled, goes_on=True)
            headers = self.headers_of(pooled)
            if sum(each.values.size for each in pooled) > MAX_INLINE_VALUES:
                await send_pieces(send, heavy_work.pieces(self._write(pooled)), self.media_type, headers)
                return
        finally:
            held.release()
        body = b"".join(self._write(pooled))
        await Response(body, headers=headers, media_type=self.media_type)(scope, receive_nothing, send)


async def receive_nothing() -> dict[str, str]:
    """A response does not read."""
    return {"type": "http.disconnect"}


def list_answer(
    request_id: str, model: str, objects: Iterator[Iterator[bytes]], pooled: Sequence[PooledInput]
) -> Iterator[bytes]:
    """The JSON of an answer with an object, which comes in pieces itself, for each of several things."""
    head = {"id": request_id, "object": "list", "created": int(time.time()), "model": model}
    yield to_json(head)[:-1] + b',"data":'
    yield from list_pieces(objects)
    yield b',"usage":' + to_json(usage_of(pooled)) + b"}"


def usage_of(pooled: Sequence[PooledInput]) -> dict[str, int]:
    """An `InputUsage`."""
    num_tokens = sum(each.num_tokens for each in pooled)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def vector_json(pooled: PooledInput, dimensions: int | None, normalizes: bool) -> Iterator[bytes]:
    """A JSON list of the vector of an input; see `shaped`."""
    return number_pieces(shaped(pooled.values, dimensions, normalizes).tolist())


def number_pieces(values: Sequence[float]) -> Iterator[bytes]:
    """A JSON list of numbers."""
    for start in range(0, len(values), PIECE_VALUES):
        yield (b"," if start else b"[") + to_json(values[start : start + PIECE_VALUES])[1:-1]
    yield b"]" if values else b"[]"
