"""Legal bodies of the newer protocols that cost as much as their limits permit, and the status that each must get."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.http.envelope import MAX_BODY_BYTES

MODEL = "tiny-llama"
RESPONSES, MESSAGES, COUNT, CHATS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
GENERATE, INFER = "/v2/models/ensemble/generate", "/v2/models/ensemble/infer"
BODY_BYTES = MAX_BODY_BYTES - 4096
HI = {"role": "user", "content": "Hi"}


def wide_schema(num_bytes: int) -> dict[str, Any]:
    """A schema with about so many bytes of JSON."""
    fields = {f"field_{i}": {"type": "string", "description": "x" * 30} for i in range(num_bytes // 80)}
    return {"type": "object", "properties": fields}


def functions(num_tools: int, num_bytes: int) -> list[dict[str, Any]]:
    """Tools whose schemas have so many bytes each."""
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": wide_schema(num_bytes)}}
        for i in range(num_tools)
    ]


def flat(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tools as the Responses API has them."""
    return [{"type": "function", **tool["function"]} for tool in tools]


def with_input_schemas(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tools as the Messages API has them."""
    return [{"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in tools]


TOOLS = functions(128, 1800)  # as many as may be, of as many bytes
USER_BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 4
USES = [{"type": "tool_use", "id": f"t{i}", "name": "f", "input": {"a": i}} for i in range(128)]
RESULTS = [{"type": "tool_result", "tool_use_id": f"t{i}", "content": "ok"} for i in range(128)]
ITEMS: list[dict[str, Any]] = [
    item
    for i in range(1300)
    for item in (
        HI,
        {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": f"c{i}", "output": "ok"},
    )
]
INPUTS = [
    {"name": "text_input", "datatype": "BYTES", "shape": [64, 1], "data": [["word " * 40]] * 64},
    {"name": "max_tokens", "datatype": "INT32", "shape": [64, 1], "data": [[1]] * 64},
]

CUT = {"messages": [HI], "max_tokens": 1, "truncate_prompt_tokens": -1}  # keeps the end of a prompt that is too long

EXPENSIVE: dict[str, tuple[str, dict[str, Any], int]] = {
    "tools of a chat": (CHATS, CUT | {"tools": TOOLS}, 200),
    "tools of a response": (
        RESPONSES, {"input": "Hi", "tools": flat(TOOLS), "max_output_tokens": 1, "truncation": "auto"}, 200,
    ),
    "tools of a message": (MESSAGES, {"messages": [HI], "tools": with_input_schemas(TOOLS), "max_tokens": 1}, 400),
    "tools that are demanded": (CHATS, CUT | {"tools": TOOLS, "tool_choice": "required"}, 200),
    "blocks of messages": (MESSAGES, {"messages": USER_BLOCKS, "max_tokens": 1}, 400),
    "thousands of messages": (
        MESSAGES,
        {"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}] * 2000 + [HI],
         "max_tokens": 1},
        400,
    ),
    "calls and results": (
        MESSAGES,
        {"messages": [HI, {"role": "assistant", "content": USES}, {"role": "user", "content": RESULTS}],
         "max_tokens": 1},
        400,
    ),
    "a list of items": (RESPONSES, {"input": ITEMS, "max_output_tokens": 1, "truncation": "auto"}, 200),
    "megabytes to count": (
        COUNT, {"messages": [{"role": "user", "content": "word " * (BODY_BYTES // 5)}]}, 400,
    ),
    "many texts to count": (COUNT, {"messages": [{"role": "user", "content": "ab " * 50}] * 4000}, 400),
    "an earlier response": (RESPONSES, {"input": "Hi", "previous_response_id": "r" * 1_000_000}, 400),
    "a conversation of values": (RESPONSES, {"input": "Hi", "conversation": {"id": ["x"] * 50_000}}, 400),
    "rows of Triton": (INFER, {"inputs": INPUTS}, 200),
    "thousands of rows": (
        INFER,
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [60_000, 1], "data": ["a"] * 60_000}]},
        400,
    ),
    "a large shape with little data": (
        INFER,
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2**31 - 1, 2**31 - 1], "data": ["a"]}]},
        400,
    ),
    "thousands of tensors": (
        INFER,
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}] * 6_000},
        400,
    ),
    "unknown fields": (GENERATE, {"text_input": "a", "max_tokens": 1} | {f"f{i}": i for i in range(60_000)}, 400),
}  # fmt: skip


def encoded(body: dict[str, Any]) -> bytes:
    """The body as it is sent."""
    return json.dumps({"model": MODEL} | body).encode()
