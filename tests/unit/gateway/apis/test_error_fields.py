"""Wrong values of each API: the error has the shape that its vendor documents, and names the field that was sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clients.http_gateway import CHATS, COMPLETIONS, MODEL, USER, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
CHAT: dict[str, Any] = {"model": MODEL, "messages": USER}
BODIES: dict[str, dict[str, Any]] = {
    CHATS: CHAT,
    COMPLETIONS: {"model": MODEL, "prompt": "a"},
    RESPONSES: {"model": MODEL, "input": "Hi"},
    MESSAGES: CHAT | {"max_tokens": 1},
    COUNT: CHAT,
}
LONG = "word " * 9000
CALLS = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(129)]
USES = [{"type": "tool_use", "id": f"t{i}", "name": "f", "input": {}} for i in range(129)]
ANYWHERE: list[tuple[str, Any]] = [
    ("temperature", -1), ("temperature", "hot"), ("temperature", True), ("top_p", 0), ("top_p", 2), ("top_k", -7),
    ("stream", "yes"), ("model", 5),
]  # fmt: skip
LIMITS: list[Any] = [0, -1, "5", 1.5, True, 10**30]


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


def response_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f"} | fields]}


def message_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {"type": "object"}} | fields]}


# The route, what is wrong, and the path of the field that the error must name.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((path, {name: value}, name) for path in (CHATS, COMPLETIONS, RESPONSES, MESSAGES) for name, value in ANYWHERE),
    *((CHATS, {name: value}, name) for name in ("max_tokens", "max_completion_tokens") for value in LIMITS),
    *((COMPLETIONS, {"max_tokens": value}, "max_tokens") for value in LIMITS),
    *((RESPONSES, {"max_output_tokens": value}, "max_output_tokens") for value in LIMITS),
    *((MESSAGES, {"max_tokens": value}, "max_tokens") for value in (*LIMITS, None)),
    (CHATS, {"min_tokens": 9, "max_completion_tokens": 5}, "min_tokens"),
    (CHATS, {"truncate_prompt_tokens": -1, "max_completion_tokens": 9000}, "max_completion_tokens"),
    (CHATS, {"thinking_token_budget": 5}, "thinking_token_budget"),
    (CHATS, {"max_reasoning_tokens": 5}, "max_reasoning_tokens"),
    (CHATS, {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    (CHATS, {"n": 0}, "n"),
    (CHATS, {"stop": [""]}, "stop"),
    (CHATS, {"tool_choice": "required"}, "tool_choice"),
    (CHATS, function(parameters=5), "tools[0].function.parameters"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    *((path, {"cache_salt": ""}, "cache_salt") for path in (CHATS, COMPLETIONS, RESPONSES)),
    (COMPLETIONS, {"prompt": [5, 10**8]}, "prompt"),
    (COMPLETIONS, {"logprobs": 1000}, "logprobs"),
    (RESPONSES, {"max_output_tokens": 9000, "truncation": "auto"}, "max_output_tokens"),
    (RESPONSES, {"user": "a\nb"}, "user"),
    (RESPONSES, {"cache_salt": "x" * 5000}, "cache_salt"),
    (RESPONSES, {"input": [{"role": "user", "content": "Hi"}, *CALLS]}, "input[129].call_id"),
    (RESPONSES, response_tool(parameters={"type": "array"}), "tools[0].parameters.type"),
    (RESPONSES, response_tool(parameters={"type": "object", "properties": 5}), "tools[0].parameters.properties"),
    (RESPONSES, response_tool(strict=1), "tools[0].strict"),
    *(
        (MESSAGES, {"messages": [*USER, {"role": "assistant", "content": [block]}]}, "messages[1].content[0].data")
        for block in ({"type": "redacted_thinking"}, {"type": "redacted_thinking", "data": ""})
    ),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]"),
    (MESSAGES, {"stop_sequences": "x"}, "stop_sequences"),
    (MESSAGES, {"metadata": {"user_id": "a\nb"}}, "metadata.user_id"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice.type"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.type"),
    (MESSAGES, {"messages": [*USER, {"role": "assistant", "content": USES}]}, "messages[1].content[128].id"),
    *(
        (path, change, field)
        for path in (MESSAGES, COUNT)
        for change, field in (
            (message_tool(input_schema={"type": "object", "properties": 5}), "tools[0].input_schema.properties"),
            (message_tool(description=5), "tools[0].description"),
            ({"tools": [*message_tool()["tools"], *message_tool()["tools"]]}, "tools[1].name"),
            ({"messages": 5}, "messages"),
        )
    ),
]


def test_errors_name_the_field_that_was_sent(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, change, field in WRONG:
            response = await client.post(path, json=BODIES[path] | change)
            assert response.status_code == 400, (path, change, response.text)
            body = response.json()
            error = body["error"]
            assert error["message"].startswith(field), (path, change, error)
            assert error["type"] == "invalid_request_error"
            if path in (MESSAGES, COUNT):  # docs.anthropic.com, "Errors"
                assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
                assert error.keys() == {"type", "message"}
            else:  # platform.openai.com, "Error codes"
                assert body.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
                assert error["param"] == (field.removesuffix("[0]") if field.startswith("stop") else field)

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)
    assert not dense.submits


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (CHATS, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (RESPONSES, {"input": LONG}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_has_openais_code(
    tmp_path: Path, path: str, change: dict[str, Any], field: str
) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(path, json=BODIES[path] | change)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
        assert error["message"].startswith("This model's maximum context length is 2048 tokens")

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_ranks_have_the_errors_of_their_vendors(tmp_path: Path) -> None:
    """Beside those of KServe's protocol below the same path."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for documents, field in (
            ([{"txt": "x"}], "documents[0].text"),
            (["x", {"text": 5}], "documents[1].text"),
            (["x", 5], "documents[1]"),
            ([], "documents"),
        ):
            body = {"query": "a", "documents": documents}
            response = await client.post("/v2/rerank", json=body, headers={"x-request-id": "r-1"})
            found = response.json()  # docs.cohere.com, "Errors"
            assert response.status_code == 400 and found.keys() == {"id", "message"} and found["id"] == "r-1"
            assert found["message"].startswith(field), found
            error = (await client.post("/v1/rerank", json=body)).json()["error"]
            assert error["param"] == field, error
        of_sglang = {"query": "a", "items": ["b"], "label_token_ids": [5, 6], "apply_softmax": True}
        for change, param in (
            ({"items": []}, "items"),
            ({"items": ["b"] * 65}, "items"),
            ({"items": ["b", 5]}, "items[1]"),
            ({"items": [[5]]}, "items"),
            ({"items": "b" * 400_000, "query": "a"}, "items"),
            ({"query": "a" * 1_900_000, "items": ["b"] * 64}, "query"),
            ({"label_token_ids": [5, 10**6]}, "label_token_ids"),
            ({"label_token_ids": ["a"]}, "label_token_ids[0]"),
            ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ):
            refused = await client.post("/v1/score", json=of_sglang | change)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == param, refused.text
        missing = (await client.post("/generative_scoring", json={"query": "a", "items": ["b"]})).json()["error"]
        assert missing["param"] == "label_token_ids"
        wrong = await client.post("/v2/models/none/infer", json={})
        assert wrong.status_code >= 400 and wrong.json().keys() == {"error"}
        long = await client.post("/v2/rerank", content=b" " * 3_000_000)
        assert long.status_code == 413 and long.json()["message"]

    with_client(tmp_path, FakeDense(say(" one")), test, runner="pooling")


def test_a_model_that_makes_no_vectors_is_what_is_wrong(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/classify", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
        ):
            response = await client.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "model"), error
            assert error["message"].startswith("this model makes no vectors")

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_routes_that_do_not_exist_are_named(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in ("/v1/images/generations", "/v1/audio/speech", "/v1/moderations"):
            response = await client.post(path, json={"model": MODEL, "input": "Hi"})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (404, "not_found", None)
            assert error["type"] == "invalid_request_error"
            assert error["message"] == f"this server has no POST {path}"
        long = (await client.get("/v1/" + "x" * 5000)).json()["error"]["message"]
        assert "GET /v1/xxx" in long and len(long) < 300

    with_client(tmp_path, FakeDense(say(" one")), test)
