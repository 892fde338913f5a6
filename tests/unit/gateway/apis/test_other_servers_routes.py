"""Routes, and forms of bodies, of SageMaker, vLLM and llama.cpp that clients of these servers expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, USER, check_error, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

REFERENCE = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
TEXT = "Łódź 🙂 is a city"
CHANGING = ("id", "created")


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in CHANGING}


@pytest.mark.parametrize(
    ("path", "other", "body"),
    [
        (CHATS, "/invocations", {"messages": USER}),
        (CHATS, "/chat/completions", {"messages": USER}),
        (COMPLETIONS, "/invocations", {"prompt": TEXT, "echo": True}),
        (COMPLETIONS, "/invocations", {"prompt": TEXT, "messages": None}),
        (CHATS, "/invocations", {"prompt": None, "messages": USER}),
    ],
)
def test_another_route_gives_the_same_answers(tmp_path: Path, path: str, other: str, body: dict[str, Any]) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        expected, found = [(await client.post(each, json=body)).json() for each in (path, other)]
        assert expected["choices"] and without_ids(found) == without_ids(expected)
        stream = await client.post(other, json={**body, "stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream") and "[DONE]" in stream.text
        check_error(await client.post(other, json={**body, "max_tokens": "x"}), 400, "max_tokens")

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one two"), EOS]), test)


def test_a_chat_that_is_too_long_is_told_as_llama_cpp_does_at_its_path(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"messages": [{"role": "user", "content": "word " * 100}]}
        errors = []
        for path, stream in ((CHATS, False), ("/chat/completions", False), ("/chat/completions", True)):
            answer = await client.post(path, json=body | {"stream": stream})
            assert answer.status_code == 400
            errors.append(answer.json()["error"])
        openai, *others = errors
        assert openai.keys() == {"message", "type", "param", "code"}
        for each in others:
            assert each.pop("type") == "exceed_context_size_error"
            assert each.pop("n_ctx") == 64 and each.pop("n_prompt_tokens") > 100
            assert each == {name: value for name, value in openai.items() if name != "type"}

    with_client(tmp_path, FakeDense(say(" one"), max_model_len=64), test)


def test_special_tokens_of_a_content_may_be_plain_text(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"content": "a</s>b", "add_special": True}
        parsed, plain = [
            (await client.post("/tokenize", json=body | {"parse_special": each})).json() for each in (True, False)
        ]
        assert parsed["tokens"] == REFERENCE.encode("a</s>b") and EOS in parsed["tokens"]
        assert plain["tokens"][0] == REFERENCE.bos_token_id and EOS not in plain["tokens"]
        assert plain["count"] == len(plain["tokens"]) and REFERENCE.decode(plain["tokens"][1:]) == "a</s>b"
        pieces = await client.post("/tokenize", json=body | {"parse_special": False, "with_pieces": True})
        assert [each["id"] for each in pieces.json()["tokens"]] == plain["tokens"]

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_the_tokens_of_a_chat_are_counted(tmp_path: Path) -> None:
    url = "/v1/chat/completions/input_tokens"

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        for options in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none", "max_tokens": 3}):
            body = {"messages": USER, **options}
            usage = (await client.post(CHATS, json=body)).json()["usage"]
            counted = {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}
            assert (await client.post(url, json=body)).json() == counted
        check_error(await client.post(url, json={}), 400, "messages")
        check_error(await client.post(url, json={"messages": USER, "model": "x"}), 404, "model")

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one"), EOS]), test)


def test_an_invocation_without_a_prompt_or_messages_is_a_400(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check_error(await client.post("/invocations", json={}), 400, "prompt", "must be provided")
        check_error(await client.post("/invocations", json=[1]), 400, None)
        check_error(await client.post("/invocations", json={"messages": []}), 400, "messages")

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_models_and_health_have_a_second_name(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        assert (await client.get("/models")).json() == (await client.get("/v1/models")).json()
        assert (await client.get("/v1/health")).json() == {"status": "ok"}

    with_client(tmp_path, FakeDense(say(" one")), test)


@pytest.mark.parametrize("options", [{}, {"add_special": False}, {"add_special": True}, {"add_special_tokens": True}])
def test_a_content_is_tokenized_as_llama_cpp_does(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = REFERENCE.encode(TEXT, add_special_tokens=any(options.values()))

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        plain = (await client.post("/tokenize", json={"content": TEXT, **options})).json()
        assert plain["tokens"] == expected
        pieces = (await client.post("/tokenize", json={"content": TEXT, "with_pieces": True, **options})).json()
        assert [each["id"] for each in pieces["tokens"]] == expected
        data = [each["piece"] for each in pieces["tokens"]]
        joined = b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in data)
        assert joined.decode().endswith(TEXT)
        assert any(isinstance(each, list) for each in data), "the emoji has several tokens"
        back = (await client.post("/detokenize", json={"tokens": expected})).json()
        assert back["content"] == back["prompt"] == REFERENCE.decode(expected)
        both = {"content": TEXT, "prompt": TEXT}
        check_error(await client.post("/tokenize", json=both), 400, "prompt", "exactly one of prompt, messages,")

    with_client(tmp_path, FakeDense(say(" one")), test)


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}])
def test_a_template_is_applied(tmp_path: Path, options: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": TEXT}]
    expected = REFERENCE.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post("/apply-template", json={"messages": messages, **options})
        assert response.json() == {"prompt": expected}
        wrong = [{"role": "nobody", "content": "x"}]
        check_error(await client.post("/apply-template", json={"messages": wrong}), 400, "messages", "unknown role")
        check_error(await client.post("/apply-template", json={"messages": []}), 400, "messages")
        check_error(await client.post("/apply-template", json={"messages": messages, "model": "x"}), 404, "model")

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_a_part_of_a_message_may_be_a_bare_text(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for content in ("Hi there", ["Hi", " there"], ["Hi", {"type": "text", "text": " there"}]):
            await client.post(CHATS, json={"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        assert len({tuple(submit.spec.prompt_token_ids) for submit in dense.submits}) == 1 and len(dense.submits) == 3
        wrong = {"messages": [{"role": "user", "content": ["Hi", 5]}]}
        check_error(await client.post(CHATS, json=wrong), 400, "messages[0].content[1]")

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_the_schema_of_a_json_object_is_its_form(tmp_path: Path, path: str) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        prompt = {"max_tokens": 1, **({"messages": USER} if path == CHATS else {"prompt": "a"})}
        form = {"type": "json_object", "schema": {"const": "42"}}
        for options in ({"response_format": form}, {"guided_json": form["schema"]}):
            assert (await client.post(path, json={**prompt, **options})).status_code == 200
        found, expected = (submit.spec.sampling.structured_output.grammar for submit in dense.submits)
        assert "42" in found and found == expected
        for schema in (123, {"type": "hiccup"}, {"type": 123}, "{"):
            wrong = {**prompt, "response_format": {"type": "json_object", "schema": schema}}
            response = await client.post(path, json=wrong)
            assert response.status_code == 400 and "response_format" in response.json()["error"]["param"], schema

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)
