"""Wrong and huge tools: each is a 400 that names the value and the limit, over HTTP and gRPC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from services.pb import gateway_pb2
from tests.support.chats.chat_models import WEATHER, with_chat_model
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import RunningGateway

USER: list[Any] = [{"role": "user", "content": "Hi"}]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def nested(depth: int) -> dict[str, Any]:
    """An object schema with `depth` nested objects in it."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return {"type": "object", **schema}


TOOLS: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("1,000 tools", [tool(name=f"f{i}") for i in range(1000)], "tools", ("1000 elements", "at most 128")),
    ("no name", [{"type": "function", "function": {}}], "tools[0].function.name", ("missing",)),
    ("empty name", [tool(name="")], "tools[0].function.name", ("''", "1 to 64")),
    ("long name", [tool(name="x" * 65)], "tools[0].function.name", ("65 characters", "1 to 64")),
    ("odd name", [tool(name="get weather")], "tools[0].function.name", ("'get weather'", "letters, digits, _ and -")),
    ("foreign name", [tool(name="wetter.größe")], "tools[0].function.name", ("letters",)),
    ("line break in the name", [tool(name="f\n")], "tools[0].function.name", ("'f\\n'",)),
    ("name that is a number", [tool(name=3)], "tools[0].function.name", ("not a string",)),
    ("same name twice", [tool(), WEATHER, tool()], "tools[2].function.name", ("'f'", "tools[0]")),
    ("no function", [{"type": "function"}], "tools[0].function", ("missing",)),
    ("no type", [{"function": {"name": "f"}}], "tools[0].type", ("missing", "'function'")),
    ("other type", [{"type": "custom", "custom": {"name": "f"}}], "tools[0].type", ("'custom'",)),
    ("a number", [5], "tools[0]", ("not an object",)),
    ("schema of 1 MB", [tool(parameters={"type": "object", "x": "y" * 2**20})], "tools", ("1048", "at most 262144")),
    ("deep schema", [tool(parameters=nested(65))], "tools[0].function.parameters", ("65 deep", "at most 64")),
    ("array schema", [tool(parameters={"type": "array"})], "tools[0].function.parameters.type", ("'array'",)),
    ("schema that is a list", [tool(parameters=[])], "tools[0].function.parameters", ("not an object",)),
    ("schema that is a boolean", [tool(parameters=True)], "tools[0].function.parameters", ("not an object",)),
    ("list of properties", [tool(parameters={"properties": []})], "tools[0].function.parameters.properties", ()),
    ("long description", [tool(description="x" * 32769)], "tools[0].function.description", ("32769", "32768")),
    ("description that is a list", [tool(description=[])], "tools[0].function.description", ("not a string",)),
    ("strict that is a text", [tool(strict="yes")], "tools[0].function.strict", ("not a boolean",)),
]


def test_wrong_tools_are_refused_by_field(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            for name, tools, param, words in TOOLS:
                response = await client.post("/v1/chat/completions", json={"messages": USER, "tools": tools})
                assert response.status_code == 400, name
                error = response.json()["error"]
                assert error["param"] == param, (name, error)
                assert all(word in error["message"] for word in words), (name, error)
                assert len(error["message"]) < 500
                chat = gateway_pb2.Chat(messages=USER, tools=json.dumps(tools))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await gateway.stub.Generate(gateway_pb2.GenerateRequest(chat=chat))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
                assert all(word in refused.value.details() for word in words), (name, refused.value.details())
        allowed = [tool(parameters=nested(64)), tool(name="-_9"), WEATHER]
        await api.chat.completions.create(model="model", messages=USER, tools=allowed)

    with_chat_model(tmp_path, "hermes", ["No."], test)


@pytest.mark.parametrize("text", ["{", "{}", "[" * 1000, "null", '"x"', "NaN"])
def test_tools_over_grpc_must_be_a_json_array(text: str, tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="tools is not") as refused:
            chat = gateway_pb2.Chat(messages=USER, tools=text)
            await gateway.stub.Generate(gateway_pb2.GenerateRequest(chat=chat))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with_chat_model(tmp_path, "hermes", ["No."], test)


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}} | fields


MESSAGES: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"role": "tool", "content": "x"}, "messages[1].tool_call_id", ("required",)),
    ({"role": "tool", "content": "x", "tool_call_id": ""}, "messages[1].tool_call_id", ("required",)),
    ({"role": "tool", "content": "x", "tool_call_id": "x" * 65}, "messages[1].tool_call_id", ("65", "64")),
    ({"role": "tool", "tool_call_id": "c"}, "messages[1].content", ("required",)),
    ({"role": "function", "name": "f", "content": "x"}, "messages[1].role", ("'function'",)),
    ({"role": "user", "content": "x", "tool_calls": [call()]}, "messages[1].tool_calls", ("only the assistant",)),
    ({"role": "assistant", "tool_calls": [call()] * 129}, "messages[1].tool_calls", ("129", "128")),
    ({"role": "assistant", "tool_calls": [call(id="x" * 65)]}, "messages[1].tool_calls[0].id", ("65", "64")),
    ({"role": "assistant", "tool_calls": [call(id=None)]}, "messages[1].tool_calls[0].id", ()),
    (
        {"role": "assistant", "tool_calls": [call(function={"name": "a b"})]},
        "messages[1].tool_calls[0].function.name",
        ("'a b'",),
    ),
    ({"role": "assistant", "tool_calls": [call(type="custom")]}, "messages[1].tool_calls[0].type", ("'custom'",)),
    ({"role": "assistant", "function_call": {"name": "f"}}, "messages[1].function_call", ("not supported",)),
]


def test_wrong_messages_about_calls_are_refused_by_field(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            for message, param, words in MESSAGES:
                response = await client.post("/v1/chat/completions", json={"messages": [*USER, message]})
                assert response.status_code == 400, message
                error = response.json()["error"]
                assert error["param"] == param, error
                assert all(word in error["message"] for word in words), error
            for field in ("functions", "function_call"):
                response = await client.post("/v1/chat/completions", json={"messages": USER, field: [{"name": "f"}]})
                assert response.json()["error"]["param"] == field
        await api.chat.completions.create(model="model", messages=USER)

    with_chat_model(tmp_path, "hermes", ["No."], test)


def test_arguments_that_are_no_json_do_not_end_a_conversation(tmp_path: Path) -> None:
    broken = call(function={"name": "f", "arguments": '{"city": "Par'})
    messages: Any = [*USER, {"role": "assistant", "tool_calls": [broken]}, *USER]

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        answer = await api.chat.completions.create(model="model", messages=messages, tools=[WEATHER])
        assert answer.choices[0].message.content == "Once more."

    with_chat_model(tmp_path, "hermes", ["Once more."], test)
