"""Wrong, hostile and refused requests to /v1/messages: Anthropic's error objects, which name value and limit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from tests.support.clients.http_gateway import MODEL, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": HI}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "ok"}
KEY = "a-secret-key-0123456789"
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def check(response: httpx2.Response, status: int, kind: str, *words: str) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    for word in words:
        assert word in body["error"]["message"], body
    assert len(body["error"]["message"]) < 600


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any, then: Any = ()) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": list(blocks)}, *then]}


def results(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"max_tokens": None}, ("max_tokens",)),
    (user({"type": "document", "source": {}}), ("messages[0].content[0]", "document", "no files in chats")),
    (user({"type": "video", "source": {}}), ("messages[0].content[0]", "no films in chats")),
    (user({**RESULT, "content": [{"type": "audio"}]}), ("messages[0].content[0].content[0]", "no sound in chats")),
    ({"max_tokens": 0}, ("max_tokens is 0",)),
    ({"chat_template_kwargs": {"tools": 1}}, ("chat_template_kwargs", "'tools'")),
    ({"max_tokens": "5"}, ("max_tokens is '5'",)),
    ({"messages": []}, ("messages",)),
    ({"messages": "Hi"}, ("messages is 'Hi'",)),
    ({"messages": [{"role": "tool", "content": "x"}]}, ("messages[0]", '"tool"', "user, assistant or system")),
    ({"messages": [{"role": "user"}]}, ("messages[0].content",)),
    ({"messages": [{"role": "user", "content": ""}]}, ("messages[0].content is empty",)),
    ({"messages": [{"role": "user", "content": 7}]}, ("messages[0].content is 7",)),
    ({"messages": HI * 4097}, ("messages", "4097", "4096")),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]}, ("1025", "1024")),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}] * 5}, ("5000", "4096")),
    (user({"type": "film"}), ("messages[0].content[0]", '"film"', "text, image or tool_result")),
    (user(IMAGE), ("sees no pictures",)),
    (user({"type": "no_such_block"}), ("messages[0].content[0]", '"no_such_block"')),
    (user({"text": "no type"}), ("messages[0].content[0]", "type must be")),
    (user("no block"), ("messages[0].content[0]",)),
    (user({"type": "text", "text": ""}), ("messages[0].content[0].text is empty",)),
    (user({"type": "text", "text": None}), ("messages[0].content[0].text is null",)),
    (user(RESULT), ("messages[0].content[0].tool_use_id is 't1'", "no earlier call")),
    (assistant(USE, USE, then=results(RESULT)), ("messages[1].content[1].id is 't1'", "earlier call")),
    (assistant(USE, then=results(RESULT, RESULT)), ("messages[2].content[1].tool_use_id is 't1'", "already")),
    (assistant(USE), ("messages[1].content", "tool_result")),
    (assistant({**USE, "id": "x" * 65}), ("messages[1].content[0].id", "64")),
    (assistant({**USE, "name": "a b"}), ("messages[1].content[0].name is 'a b'",)),
    (assistant({**USE, "input": "{}"}), ("messages[1].content[0].input is '{}'",)),
    (assistant(USE, then=results({**RESULT, "content": [IMAGE]})), ("sees no pictures",)),
    ({"system": [IMAGE]}, ("system[0]", '"image"')),
    ({"system": 5}, ("system is 5",)),
    ({"stop_sequences": ["x"] * 17}, ("stop_sequences", "17", "16")),
    ({"stop_sequences": [""]}, ("stop", "0 characters")),
    ({"temperature": -1}, ("temperature", "-1")),
    ({"top_p": 2}, ("top_p", "2")),
    ({"top_k": -7}, ("top_k", "-7")),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ("tools[0].type is 'web_search_20250305'",)),
    ({"tools": [{"name": "f"}]}, ("tools[0].input_schema",)),
    ({"tools": [{"name": "", "input_schema": {"type": "object"}}]}, ("tools[0].name is ''",)),
    ({"tools": [{"name": "x" * 65, "input_schema": {"type": "object"}}]}, ("tools[0].name",)),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, ("tools[0].input_schema", "'object'")),
    ({"tools": [TOOL] * 129}, ("tools", "129", "128")),
    ({"tool_choice": {"type": "tool"}}, ("tool_choice.name",)),
    ({"tool_choice": {"type": "always"}}, ("tool_choice.type is 'always'",)),
    ({"tool_choice": "auto"}, ("tool_choice is 'auto'",)),
    ({"thinking": {"type": "perhaps"}}, ("thinking.type is 'perhaps'",)),
    ({"mcp_servers": [{"type": "url"}]}, ("mcp_servers",)),
    ({"container": "c"}, ("container",)),
    ({"output_config": {"format": {"type": "xml"}}}, ("output_config.format.type is 'xml'",)),
    ({"metadata": {"user_id": "a\nb"}}, ("'a\\nb'",)),
]


def test_wrong_bodies(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for change, words in WRONG:
            body = {name: value for name, value in (BODY | change).items() if value is not None}
            check(await client.post(MESSAGES, json=body), 400, "invalid_request_error", *words)
        check(await client.post(MESSAGES, json=[]), 400, "invalid_request_error")
        no_model = {"messages": HI, "max_tokens": 1}
        check(await client.post(MESSAGES, json=no_model), 400, "invalid_request_error", "model")
        text = b'{"model": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        headers = {"content-type": "application/json"}
        check(await client.post(MESSAGES, content=text, headers=headers), 400, "invalid_request_error", "not JSON")
        count = await client.post(COUNT, json={"model": MODEL, "messages": [{"role": "user", "content": [IMAGE]}]})
        check(count, 400, "invalid_request_error", "sees no pictures")

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)
    assert not dense.submits


def test_large_bodies_are_refused_quickly(tmp_path: Path) -> None:
    """Within bounds that no machine exceeds unless a body costs more than its size."""
    bodies: list[tuple[dict[str, Any], int, str]] = [
        (user(*[{"type": "text", "text": "x"}] * 10_000), 400, "10000"),
        ({"system": "x " * 500_000}, 400, "context"),
        (assistant({**USE, "input": {"a": "x" * 1_000_000}}, then=results(RESULT)), 400, "context"),
        ({"messages": HI, "tools": [{**TOOL, "description": "x" * 40_000}]}, 400, "32768"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object", "properties": nested(100)}}]}, 400, "deep"),
        ({"x" * 10: ["y"] * 70_000}, 413, "65536"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for change, status, word in bodies:
            start = time.monotonic()
            response = await client.post(MESSAGES, json=BODY | change)
            check(response, status, "invalid_request_error" if status == 400 else "request_too_large", word)
            assert time.monotonic() - start < 10

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_statuses_have_anthropics_types(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check(await client.post(MESSAGES, json=BODY | {"model": "claude"}), 404, "not_found_error", "claude")
        check(await client.post(COUNT, json={"model": "claude", "messages": HI}), 404, "not_found_error")
        check(await client.get(MESSAGES), 405, "invalid_request_error")
        check(await client.post("/v1/messages/batches", json={}), 404, "not_found_error")
        check(await client.post(MESSAGES, content=b"{}"), 415, "invalid_request_error")
        check(await client.post(MESSAGES, json=BODY | {"x": "y" * 3_000_000}), 413, "request_too_large")
        check(await client.post(MESSAGES, json=BODY, headers={"x-request-id": "a b"}), 400, "invalid_request_error")
        codes = grpc.StatusCode
        for name, code, status, kind in (
            ("a", codes.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
            ("b", codes.UNAVAILABLE, 503, "overloaded_error"),
            ("c", codes.INTERNAL, 500, "api_error"),
        ):
            dense.errors[name] = (code, "told by the worker")
            for stream in (False, True):
                response = await client.post(MESSAGES, json=BODY | {"stream": stream}, headers={"x-request-id": name})
                check(response, status, kind, "told by the worker")

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test, max_body_bytes=2**21)


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_an_api_key_in_either_header(tmp_path: Path, header: str) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check(await client.post(MESSAGES, json=BODY), 401, "authentication_error")
        prefix = "" if header == "x-api-key" else "Bearer "
        check(await client.post(MESSAGES, json=BODY, headers={header: f"{prefix}wrong"}), 401, "authentication_error")
        right = {header: f"{prefix}{KEY}"}
        assert (await client.post(MESSAGES, json=BODY, headers=right)).status_code == 200
        models = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        check(models, 401, "authentication_error")

    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "someone"\nkey = "{KEY}"\n')
    with_client(tmp_path, FakeDense(say(" one")), test, api_keys_file=keys)


def test_models_in_anthropics_form(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        headers = {"anthropic-version": "2023-06-01"}
        page = (await client.get("/v1/models", headers=headers)).json()
        assert page.keys() == {"data", "has_more", "first_id", "last_id"}
        [info] = page["data"]
        assert (info["type"], info["id"], info["display_name"]) == ("model", MODEL, MODEL)
        assert (page["has_more"], page["first_id"], page["last_id"]) == (False, MODEL, MODEL)
        assert (await client.get(f"/v1/models/{MODEL}", headers=headers)).json() == info
        check(await client.get("/v1/models/claude", headers=headers), 404, "not_found_error", "claude")
        assert (await client.get("/v1/models")).json()["object"] == "list"

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_a_thread_is_refused_in_a_way_that_clients_know(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in (MESSAGES, COUNT):
            for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
                response = await client.post(path, json=BODY | {"thread": thread})
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["type"] == "invalid_request_error" and "thread" in error["message"]
                assert error["details"] == {"error_code": "thread_unsupported_request"}
            assert (await client.post(path, json=BODY | {"thread": None})).status_code == 200

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_edits_of_the_conversation_are_refused_unless_they_keep_all(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        keep = {"type": "clear_thinking_20251015", "keep": "all"}
        shorter = keep | {"keep": {"type": "thinking_turns", "value": 1}}
        for edits in ([{"type": "clear_tool_uses_20250919"}], [shorter]):
            response = await client.post(MESSAGES, json=BODY | {"context_management": {"edits": edits}})
            check(response, 400, "invalid_request_error", "context_management")
        for neutral in ([], [keep]):
            body = BODY | {"context_management": {"edits": neutral}}
            assert (await client.post(MESSAGES, json=body)).status_code == 200

    with_client(tmp_path, FakeDense(say(" one")), test)
