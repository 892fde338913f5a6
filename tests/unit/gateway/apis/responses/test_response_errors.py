"""Wrong, hostile and refused requests to /v1/responses: 400s that name value and limit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx2

from tests.support.clients.http_gateway import MODEL, check_error, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
HI = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": kind, **fields}]}]}


WRONG: list[tuple[dict[str, Any], str | None, tuple[str, ...]]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", ("gateway.store_responses",)),
    ({"previous_response_id": "r" * 257}, "previous_response_id", ("256",)),
    ({"conversation": "conv_1"}, "conversation", ("not supported",)),
    ({"background": True}, "background", ("gateway.store_responses",)),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", ("'tools'",)),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", ("not supported",)),
    ({"input": []}, "input", ()),
    ({"input": ""}, "input", ("empty",)),
    ({"input": 5}, "input", ("input is 5",)),
    ({"input": [HI] * 10_000}, "input", ("10000", "4096")),
    ({"input": ["Hi"]}, "input[0]", ("'Hi'",)),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", ('"item_reference"',)),
    ({"input": [{"type": "computer_call", "call_id": "c"}]}, "input[0]", ('"computer_call"',)),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ("'tool'",)),
    ({"input": [{"role": "user"}]}, "input[0].content", ()),
    ({"input": [{"role": "user", "content": ""}]}, "input[0].content", ("empty",)),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 1025}]}, None, ("1025", "1024")),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 900}] * 5}, "input", ("4500",)),
    (part("input_image", image_url="https://example.org/a.png"), "input", ("sees no pictures",)),
    (part("image_url", image_url={"url": "https://example.org/a.png"}), "input", ("sees no pictures",)),
    (part("input_image", image_url={"link": "a"}), "input[0].content[0].image_url", ('"a"',)),
    (part("input_file", file_id="a"), "input[0].content[0]", ("input_file", "no files in chats")),
    (part("input_audio", input_audio={}), "input[0].content[0]", ("input_audio", "no sound in chats")),
    (part("input_video", video_url="a"), "input[0].content[0]", ("input_video", "no films in chats")),
    (part("film"), "input[0].content[0]", ("input_text, input_image",)),
    (part("input_text", text=7), "input[0].content[0].text", ("7",)),
    ({"input": [HI, OUTPUT]}, "input[1].call_id", ("'c1'", "no earlier call")),
    ({"input": [HI, CALL, CALL, OUTPUT]}, "input[2].call_id", ("'c1'", "earlier call")),
    ({"input": [HI, CALL, OUTPUT, OUTPUT]}, "input[3].call_id", ("'c1'", "already")),
    ({"input": [HI, {**CALL, "call_id": "x" * 65}]}, "input[1].call_id", ("64",)),
    ({"input": [HI, {**CALL, "name": "a b"}]}, "input[1].name", ("'a b'",)),
    ({"input": [HI, {**CALL, "arguments": {}}]}, "input[1].arguments", ("{}",)),
    ({"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "tools[0]", ('"file_search"',)),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0]", ('"code_interpreter"',)),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]", ('"mcp"',)),
    ({"tools": [{"name": "f"}]}, "tools[0]", ("type must be",)),
    ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name", ("''",)),
    ({"tools": [{**TOOL, "parameters": "{}"}]}, "tools[0].parameters", ("'{}'",)),
    ({"tools": [TOOL, TOOL]}, "tools", ("'f'", "twice")),
    ({"tools": [TOOL] * 1000}, "tools", ("1000", "128")),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", ("'g'",)),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name", ("required", "function")),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": ""}}, "tool_choice.name", ("required", "custom")),
    ({"tool_choice": "always"}, "tool_choice", ("'always'",)),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", ("'file_search'",)),
    ({"max_output_tokens": 0}, "max_output_tokens", ("0",)),
    ({"temperature": 1000}, "temperature", ("1000",)),
    ({"stop": ["a"] * 1000}, "stop", ("1000",)),
    ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs", ("exactly one",)),
    ({"structured_outputs": 3}, "structured_outputs", ("3",)),
    (
        {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
        "structured_outputs",
        ("one form",),
    ),
    ({"top_logprobs": 21}, "top_logprobs", ("21", "20")),
    ({"truncation": "sometimes"}, "truncation", ("'sometimes'",)),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", ("required",)),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", ("'xml'",)),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", ("17", "16")),
    ({"metadata": {"a": 1}}, "metadata.a", ("1",)),
    ({"reasoning": {"effort": 5}}, "reasoning.effort", ("5",)),
    ({"instructions": ["Be brief."]}, "instructions", ("Be brief.",)),
    ({"model": "gpt-5"}, "model", ("gpt-5",)),
]


def test_wrong_bodies(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for change, param, words in WRONG:
            response = await client.post(RESPONSES, json=BODY | change)
            shown = response.json()["error"]["param"] if param is None else param
            check_error(response, 404 if "model" in change else 400, shown, *words)
        nested = b'{"input": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        response = await client.post(RESPONSES, content=nested, headers={"content-type": "application/json"})
        check_error(response, 400, None, "not JSON")

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)
    assert not dense.submits


def test_neutral_values_are_accepted(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        neutral = {
            "background": False,
            "conversation": None,
            "include": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "service_tier": "auto",
            "store": True,
            "stream_options": {"include_obfuscation": False},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }
        assert (await client.post(RESPONSES, json=BODY | neutral)).status_code == 200

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_large_bodies_are_refused_quickly(tmp_path: Path) -> None:
    """Within bounds that no machine exceeds unless a body costs more than its size."""
    bodies: list[tuple[dict[str, Any], int]] = [
        ({"instructions": "x " * 500_000}, 400),
        ({"input": [HI, {**CALL, "arguments": "x" * 1_000_000}, OUTPUT]}, 400),
        ({"tools": [{**TOOL, "description": "x" * 40_000}]}, 400),
        ({"x": ["y"] * 70_000}, 413),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for change, status in bodies:
            start = time.monotonic()
            response = await client.post(RESPONSES, json=BODY | change)
            assert response.status_code == status, response.text
            assert time.monotonic() - start < 10

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_truncation_keeps_the_end_of_the_prompt(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        long = BODY | {"input": "word " * 3000}
        check_error(await client.post(RESPONSES, json=long), 400, "input", "context")
        assert (await client.post(RESPONSES, json=long | {"truncation": "auto"})).status_code == 200

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)
    assert len(dense.submits[0].spec.prompt_token_ids) == 2047
