"""vLLM's routes that render prompts: what they give asks /inference/v1/generate for the request's own answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_clients import connect, request_bytes
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, check_error, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

GENERATE = "/inference/v1/generate"
USER = {"role": "user", "content": "Where is Łódź?"}
TALK = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Why?"}, USER]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OPTIONS = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "frequency_penalty": 0.5, "seed": 3, "n": 2, "stop": ["x"],
    "logit_bias": {"70": 1.5}, "structured_outputs": {"json": {"type": "string"}}, "ignore_eos": True,
    "prompt_logprobs": 1, "priority": 3, "cache_salt": "salt", "model": "tiny-llama",
}  # fmt: skip
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Where is Łódź?"}),
    (COMPLETIONS, {"prompt": [70, 71], **OPTIONS, "max_tokens": 9, "logprobs": 2}),
    (COMPLETIONS, {"prompt": "a", "n_predict": 5, "add_special_tokens": False}),
    (CHATS, {"messages": [USER]}),
    (CHATS, {"messages": TALK, **OPTIONS, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}),
    (CHATS, {"messages": TALK[:3], "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 9}),
    (CHATS, {"messages": [USER], "response_format": {"type": "json_object"}, "n_predict": 7, "logprobs": True}),
    (CHATS, {"messages": [USER], "truncate_prompt_tokens": 4}),
]


@pytest.mark.parametrize(("path", "asked"), ASKED)
def test_what_is_rendered_asks_for_the_same_answer(tmp_path: Path, path: str, asked: dict[str, Any]) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"seed": 5, **asked}
        rendered = (await client.post(f"{path}/render", json=body)).json()
        assert not dense.submits, "nothing is generated"
        [given] = rendered if path == COMPLETIONS else [rendered]
        assert given["request_id"].startswith("cmpl-" if path == COMPLETIONS else "chatcmpl-")
        assert given["model"] == "tiny-llama"
        for url, sent in ((path, body), (GENERATE, given)):
            response = await client.post(url, json=sent)
            assert response.status_code == 200, response.text
        first, second = dense.submits[: len(dense.submits) // 2], dense.submits[len(dense.submits) // 2 :]
        assert len(first) == body.get("n", 1)
        for each in (*first, *second):
            for name in ("seq_id", "group_id", "queue_timeout_ms"):
                each.ClearField(name)
            each.spec.ClearField("request_id")
        assert first == second

    dense = FakeDense(lambda submit: ids("a") * submit.spec.max_tokens, max_model_len=64)
    with_client(tmp_path, dense, test)


def test_several_prompts_give_a_list_and_streams_stay_streams(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": ["Hello", "Goodbye world"], "stream": True, "stream_options": options, "temperature": 0.123}
        response = await client.post(f"{COMPLETIONS}/render", json=body)
        assert response.headers["content-type"] == "application/json"
        found = response.json()
        assert [each["token_ids"] for each in found] == [
            (await client.post("/tokenize", json={"prompt": each})).json()["tokens"] for each in body["prompt"]
        ]
        assert all((each["stream"], each["stream_options"]) == (True, options) for each in found)
        assert all(each["sampling_params"] == {"temperature": 0.123, "max_tokens": 16} for each in found)
        assert len({each["request_id"] for each in found}) == 2
        streamed = await client.post(GENERATE, json=found[0])
        assert streamed.headers["content-type"].startswith("text/event-stream") and '"usage"' in streamed.text
        with_tools = {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}
        counted = (await client.post("/tokenize", json=with_tools)).json()["tokens"]
        assert (await client.post(f"{CHATS}/render", json=with_tools)).json()["token_ids"] == counted

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one"), EOS]), test)


def test_what_cannot_be_rendered_is_named(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    wrong: list[tuple[str, dict[str, Any], int, str]] = [
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, 400, "echo"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, 400, "prompt_embeds"),
        (COMPLETIONS, {"prompt": "a", "temperature": "x"}, 400, "temperature"),
        (CHATS, {"messages": [USER], "model": "other"}, 404, "model"),
        (CHATS, {"messages": []}, 400, "messages"),
        (CHATS, {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
        (CHATS, {"messages": [USER], "thinking_token_budget": 5}, 400, "thinking_token_budget"),
        (CHATS, {"messages": [{"role": "user", "content": [picture]}]}, 400, "messages"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body, status, param in wrong:
            check_error(await client.post(f"{path}/render", json=body), status, param)

    with_client(tmp_path, FakeDense(lambda submit: [EOS]), test)


@pytest.mark.parametrize(("path", "asked"), [
    (COMPLETIONS, {"prompt": ["a b " * 3000] * 40}), (CHATS, {"messages": [USER | {"content": "a b " * 120_000}]}),
])  # fmt: skip
def test_an_answer_that_nobody_reads_needs_no_more_memory(tmp_path: Path, path: str, asked: dict[str, Any]) -> None:
    """So no other request waits until it has got more."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        reader, writer = await connect(gateway.http_address)
        writer.write(request_bytes(f"{path}/render", asked))
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        other = {"prompt": "a", "logprobs": 20, "n": 2, "max_tokens": 1200}  # holds 600,000 bytes
        response = await client.post(COMPLETIONS, json=other)
        assert response.status_code == 200, response.text
        writer.transport.abort()

    dense = FakeDense(lambda submit: ids("a") * submit.spec.max_tokens, max_model_len=400_000)
    with_client(tmp_path, dense, test, max_held_bytes=14_500_000, max_held_wait_s=0.5)
