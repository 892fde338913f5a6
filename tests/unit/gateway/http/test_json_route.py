"""The values in a body are counted before it is parsed, because parsing is one call that cannot be interrupted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from services.common.config import GatewaySection
from services.gateway.apis.shared.request_model import RequestModel
from services.gateway.http.json_route import MAX_STRINGS, DirectRoutes, count_values, json_route, parse_json
from services.gateway.resources.heavy_work import HeavyWork
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

MAX_VALUES = GatewaySection().max_body_values
TEXTS = st.text(alphabet='\\"[]{},:ab\n\u00e9')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda children: st.lists(children) | st.dictionaries(TEXTS, children),
)


@given(JSON)
def test_characters_within_strings_are_not_counted(value: Any) -> None:
    num_commas = num_strings = 0
    values = [value]
    while values:
        each = values.pop()
        if isinstance(each, list | dict):
            num_commas += max(0, len(each) - 1)
            values += each if isinstance(each, list) else [*each.keys(), *each.values()]
        num_strings += isinstance(each, str | list | dict)
    assert count_values(json.dumps(value).encode()) == (num_commas + 1, num_strings)


MANY = 2**18
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
TOO_MANY = {  # the counts include the object and the key of the body itself
    "values": (b"[" + b"1," * MAX_VALUES + b"1]", f"{MAX_VALUES + 1} values"),
    "lists": (b"[" + b"[]," * MANY + b"[]]", f"{MANY + 4} strings, lists and objects"),
    "objects": (b"[" + b"{}," * MANY + b"{}]", f"{MANY + 4} strings, lists and objects"),
    "strings": (b"[" + b'"",' * MANY + b'""]', f"{MANY + 2} strings, lists and objects"),
    "keys": (
        b"{" + b",".join([b'"%x":0' % i for i in range(MAX_STRINGS)]) + b"}",
        f"{MAX_STRINGS + 1} strings, lists and objects",
    ),
}


@pytest.mark.parametrize(("prompt", "count"), TOO_MANY.values(), ids=TOO_MANY)
def test_a_body_with_too_many_values_is_not_parsed(
    tmp_path: Path, prompt: bytes, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.json_route.from_json", None)
    for response in post(tmp_path, PATHS, b'{"prompt":%b}' % prompt):
        assert response.status_code == 413
        message = response.json()["error"]["message"]
        assert count in message
        assert str(MAX_VALUES if "values" in count else MAX_STRINGS) in message


LEGAL = {
    "a text of commas": {"prompt": "," * 500_000, "truncate_prompt_tokens": 5},
    "a text of quotes and brackets": {"prompt": '"[{' * 100_000, "truncate_prompt_tokens": 5},
    "as many token ids as fit": {"prompt": [12345] * (MAX_VALUES - 8), "truncate_prompt_tokens": 5},
    "several long prompts": {"prompt": [[1234] * 2000] * 64},
}


@pytest.mark.parametrize("body", LEGAL.values(), ids=LEGAL)
def test_every_valid_request_is_within_the_limits(tmp_path: Path, body: dict[str, Any]) -> None:
    content = json.dumps({**body, "max_tokens": 1}, separators=(",", ":")).encode()
    [response] = post(tmp_path, ["/v1/completions"], content, max_body_bytes=4 * 2**20)
    assert response.status_code == 200, response.text[:500]


def test_a_chat_may_have_the_maximum_of_messages_with_one_part_each(tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"}
    content = json.dumps({"messages": [message] * 4096, "truncate_prompt_tokens": 5, "max_tokens": 1}).encode()
    [response] = post(tmp_path, ["/v1/chat/completions"], content)
    assert response.status_code == 200


def test_parts_of_all_messages_are_counted_together(tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}
    for path in ("/v1/chat/completions", "/tokenize"):
        [response] = post(tmp_path, [path], json.dumps({"messages": [message] * 5}).encode())
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages"
        assert "5000 parts, at most 4096" in error["message"]


def post(tmp_path: Path, paths: Sequence[str], content: bytes, **options: Any) -> list[httpx2.Response]:
    """Sends a body to routes of one gateway; returns the responses."""
    responses = []

    async def test() -> None:
        dense = FakeDense(lambda submit: [50] * submit.spec.max_tokens, max_model_len=2**17)
        async with running_gateway(tmp_path, dense, **options) as gateway, async_client(gateway.http_address) as client:
            headers = {"content-type": "application/json"}
            responses.extend([await client.post(path, content=content, headers=headers) for path in paths])

    run(test())
    return responses


class Numbers(RequestModel):
    values: list[int]


BODIES = [
    *(b"", b"null", b"[]", b"{}", b'{"values": ["a", 1]}', b'{"values": 5', b'{"values": [NaN]}'),
    b'{"values": [1]}',
]


class ParsedByUs(Request):
    """A request for FastAPI whose body is parsed here."""

    async def json(self) -> Any:
        return await parse_json(await self.body(), 100, HeavyWork())


class FastApiRoute(APIRoute):
    """FastAPI's own way."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(ParsedByUs(request.scope, request.receive))

        return handle_parsed


@pytest.mark.parametrize("body", BODIES)
def test_a_route_tells_of_wrong_bodies_as_fastapi_does(body: bytes) -> None:
    async def answer(route_class: type[APIRoute], *, is_direct: bool = False) -> Any:
        app = FastAPI()
        router = APIRouter(route_class=route_class)

        @router.post("/total", response_class=Response)
        async def total(body: Numbers, request: Request) -> Response:
            return Response(str(sum(body.values)))

        async def describe(request: Request, error: Exception) -> Response:
            assert isinstance(error, RequestValidationError)
            return JSONResponse(jsonable_encoder({"errors": error.errors(), "body": error.body}), 400)

        async def with_id(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": {"request_id": "r"}}, receive, send)

        app.include_router(router)
        app.add_exception_handler(RequestValidationError, describe)
        if is_direct:
            app.router.middleware_stack = DirectRoutes(app.router.middleware_stack, router.routes, HeavyWork())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(with_id), base_url="http://test") as client:
            response = await client.post("/total", content=body, headers={"content-type": "application/json"})
        return response.status_code, response.text

    async def answers() -> list[Any]:
        strict = json_route(100, HeavyWork())
        return [await answer(FastApiRoute), await answer(strict), await answer(strict, is_direct=True)]

    expected, *found = asyncio.run(answers())
    assert found == [expected, expected]
    assert expected[0] == (200 if body == BODIES[-1] else 400)


def test_a_route_with_a_body_makes_its_response_itself() -> None:
    """Nothing that FastAPI would do for it is done."""
    router = APIRouter(route_class=json_route(100, HeavyWork()))

    async def total(body: Numbers, request: Request) -> int:
        return sum(body.values)

    async def total_of_more(body: Numbers, request: Request, more: int = 0) -> Response:
        return Response()

    for endpoint, what in ((total, "make its response"), (total_of_more, "takes more")):
        with pytest.raises(AssertionError, match=what):
            router.add_api_route("/total", endpoint, methods=["POST"])


def test_of_requests_that_arrive_together_one_begins_in_each_iteration() -> None:
    """FastAPI takes a part of a millisecond for each that has no body, and there may be thousands."""
    begun: list[int] = []
    num_iterations = 0

    async def route(scope: Any, receive: Any, send: Any) -> None:
        begun.append(num_iterations)

    async def count() -> None:
        nonlocal num_iterations
        while True:
            await asyncio.sleep(0)
            num_iterations += 1

    async def main() -> None:
        direct = DirectRoutes(route, [], HeavyWork())
        counting = asyncio.ensure_future(count())
        scope = {"type": "http", "method": "GET", "path": "/v1/models"}
        await asyncio.gather(*(direct(scope, None, None) for _ in range(50)))  # type: ignore[arg-type]
        counting.cancel()

    asyncio.run(main())
    assert len(begun) == 50 and len(set(begun)) == 50


LONG = 20_000  # characters


class Anything(RequestModel):
    value: Any


@pytest.mark.parametrize(
    ("value", "waits"),
    [(["a" * LONG], False), (["{[" * LONG], False), ([7] * LONG, False), ([{}] * LONG, True), ([[7]] * LONG, True)],
)
def test_only_a_body_of_many_objects_waits_for_another_one(value: Any, waits: bool) -> None:
    """Turns between those of many streams take long, and the prompts of all clients would add them up."""
    work, router = HeavyWork(), APIRouter()
    router.route_class = json_route(MAX_VALUES, work)

    @router.post("/any", response_class=Response)
    async def take(body: Anything, request: Request) -> Response:
        return Response()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"value": value}).encode(), "more_body": False}

    async def test() -> None:
        [route] = router.routes
        assert isinstance(route, APIRoute)
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/any", "headers": headers, "state": {"request_id": "a"}}
        async with work.alone():
            reading = asyncio.ensure_future(route.get_route_handler()(Request(scope, receive)))
            await asyncio.wait([reading], timeout=0.2 if waits else 20)
            assert reading.done() != waits
        assert (await reading).status_code == 200
        work.close()

    run(test())
