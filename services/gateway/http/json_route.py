"""Strict parsing of JSON bodies: no NaN, no lone surrogates, no unbounded depth, nothing after the end.

Python's own parser accepts texts that cannot be encoded again. One call parses the whole body and holds the interpreter
lock meanwhile, so the values of the body are counted first. A large body waits for a turn of `HeavyWork` before each
step: counting, parsing, checking, and what its route does next.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.headers import header_values
from services.gateway.http.unknown_fields import UnknownFields
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES, HeavyWork

MAX_STRINGS = 2**16  # strings, lists and objects in one body; a chat of 4096 messages, each of one part, has 50,000
MANY_OBJECTS = 2048  # of those of more, one body at a time is read
MAX_COUNTED_BYTES = 2**18  # of a body whose values are counted exactly in less than a millisecond


class JsonRoute(APIRoute):
    """A route of a class that `json_route` has made."""


NoteBody = Callable[[Request, Any], None]


def json_route(
    max_values: int, heavy_work: HeavyWork, note_body: NoteBody | None = None, *, needs_json_type: bool = True
) -> type[JsonRoute]:
    """A class of routes whose bodies must be JSON of at most `max_values` values.

    A route with a body is a function of `body`, a `RequestModel`, and `request`, and makes its response itself. So
    nothing is left for FastAPI to do, which would take a fifth of a request's time in the gateway. The function
    deletes a `body` that may have thousands of messages before it waits: they are a hundred thousand objects, all of
    which each full collection of garbage looks at. `note_body` gets None before a body is read, and each body before
    it is checked: a path may belong to several dialects.
    `needs_json_type`: whether the header content-type must say that the body is JSON.
    """

    unknown_fields = UnknownFields()

    class StrictJsonRoute(JsonRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            if self.body_field is None:
                return super().get_route_handler()
            _check_signature(self)

            async def handle(request: Request) -> Response:
                if note_body is not None:
                    note_body(request, None)
                if needs_json_type:
                    _require_json_type(request)
                read = _read_body(request, self.body_field, max_values, heavy_work, note_body, unknown_fields)
                return await self.endpoint(body=await read, request=request)  # which alone has the body's objects

            return handle

    return StrictJsonRoute


class DirectRoutes:
    """Stands in front of FastAPI's router, and finds routes with a JSON body by their paths alone.

    FastAPI compares the path with those of all routes, twice, and prepares what such routes do not use. This takes
    a part of a millisecond, so of such requests that arrive together one begins in each iteration of the event loop.
    """

    def __init__(self, router: ASGIApp, routes: Iterable[BaseRoute], heavy_work: HeavyWork) -> None:
        self._router = router
        self._heavy_work = heavy_work
        self._handlers = {
            route.path: route.get_route_handler()
            for route in routes
            if isinstance(route, JsonRoute) and route.methods == {"POST"} and route.body_field is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
        if handle is None:
            await self._heavy_work.beginning()
            await self._router(scope, receive, send)
            return
        response = await handle(Request(scope, receive, send))
        await response(scope, receive, send)


def _check_signature(route: JsonRoute) -> None:
    taken = route.dependant
    others = (taken.path_params, taken.query_params, taken.header_params, taken.cookie_params, taken.dependencies)
    names = [field.name for field in taken.body_params], taken.request_param_name
    assert names == (["body"], "request") and not any(others), f"{route.path} takes more than body and request"
    assert route.response_model is None, f"{route.path} does not make its response itself"


async def _read_body(
    request: Request,
    field: Any,
    max_values: int,
    heavy_work: HeavyWork,
    note_body: NoteBody | None,
    unknown_fields: UnknownFields,
) -> Any:
    """The body as the object of a route, whose `body_field` it is. Raises `RequestValidationError` as FastAPI would."""
    data = await _receive_body(request.receive)
    if not data:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    note_size(request, len(data), heavy_work)
    async with heavy_work.alone() if _has_many_objects(data) else nullcontext():
        try:
            value = await parse_json(data, max_values, heavy_work)
        except json.JSONDecodeError as error:
            place, context = ("body", error.pos), {"error": error.msg}
            details = {"type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": {}, "ctx": context}
            raise RequestValidationError([details], body=error.doc) from error
        if note_body is not None:
            note_body(request, value)
        body, errors = field.validate(value, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=value)
        await next_turn(request)
    request.scope["state"]["unknown_fields"] = unknown_fields
    body.name_request(request)
    body.log_unknown_fields(request)
    return body


async def _receive_body(receive: Receive) -> bytes:
    """As `Request.body`, whose generator takes longer than a small body."""
    pieces = []
    while (message := await receive())["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)
    raise HTTPException(400, "the client left before the end of the body")  # nobody reads the answer


def _has_many_objects(body: bytes) -> bool:
    """Whether it may be parsed into very many objects. What is large by its texts waits for nobody else's reading."""
    if len(body) <= MAX_INLINE_BYTES or body.count(b"{") + body.count(b"[") <= MANY_OBJECTS:
        return False
    return len(body) > MAX_COUNTED_BYTES or count_values(body)[0] > MANY_OBJECTS  # the texts may be code


def note_size(request: Request, num_bytes: int, heavy_work: HeavyWork) -> None:
    """Notes whether the further steps of a request with such a body, up to its answer, need turns."""
    request.scope["state"]["heavy_work"] = heavy_work if num_bytes > MAX_INLINE_BYTES else None


async def next_turn(request: Request) -> None:
    """Lets other tasks run before the next step of a request whose body is large."""
    heavy_work: HeavyWork | None = request.scope["state"]["heavy_work"]
    if heavy_work is not None:
        await heavy_work.turn()


async def parse_json(body: bytes, max_values: int, heavy_work: HeavyWork) -> Any:
    """The value of a body of at most `max_values` values, in turns unless the body is small.

    Raises `JSONDecodeError`, or a 413.
    """
    if len(body) <= MAX_INLINE_BYTES:
        await heavy_work.beginning()
        return _parse(body)
    await heavy_work.turn()
    num_quotes, num_lists, num_objects, num_commas = _count_each(body, b'"[{,')
    if num_commas + 1 > max_values or num_quotes // 2 + num_lists + num_objects > MAX_STRINGS:  # rough, but fast
        await heavy_work.turn()
        _check_counts(body, max_values)
    await heavy_work.turn()
    value = _parse(body)
    await heavy_work.turn()  # for whoever checks the value
    return value


def _count_each(body: bytes, characters: bytes) -> list[int]:
    """How often the body has each of these. `bytes.count` looks at one byte at a time, numpy at many."""
    numbers = np.frombuffer(body, np.uint8)
    return [int(np.count_nonzero(numbers == each)) for each in characters]


def _check_counts(body: bytes, max_values: int) -> None:
    """Raises a 413 if the exact counts are too high. It takes milliseconds."""
    num_values, num_strings = count_values(body)
    if num_strings > MAX_STRINGS:
        raise HTTPException(
            413, f"the body has {num_strings} strings, lists and objects, at most {MAX_STRINGS} allowed"
        )
    if num_values > max_values:
        raise HTTPException(413, f"the body has {num_values} values, gateway.max_body_values is {max_values}")


def _parse(body: bytes) -> Any:
    gc.disable()  # parsed JSON has no cycles: the collector would search a million lists in vain
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="none")  # caching would double the time
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
    finally:
        gc.enable()


def count_values(body: bytes) -> tuple[int, int]:
    """The number of values, and the number of strings (keys included), lists and objects.

    The number of values is estimated as the number of commas plus one. The contents of strings do not count. With more
    than `MAX_STRINGS` strings the second number counts only the strings.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quote begins or ends a string
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        return plain.count(b",") + 1, num_strings
    outside = b"".join(plain.split(b'"')[::2])
    return outside.count(b",") + 1, num_strings + outside.count(b"[") + outside.count(b"{")


def _require_json_type(request: Request) -> None:
    given = header_values(request.scope["headers"], b"content-type")
    if not given:
        raise HTTPException(415, "there is no content-type, must be application/json")
    content_type = given[0].decode("latin-1")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"content-type is {content_type[:100]!r}, must be application/json")
