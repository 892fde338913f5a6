"""vLLM's routes that make answers of token ids: rendered, generated and derendered, a request has its own answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from services.gateway.resources.heavy_work import HeavyWork
from tests.support.chats.chat_models import with_chat_model
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_clients import async_client
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, check_error, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.apis.openai.test_tool_calls import TOOLS, TWO, USER

GENERATE = "/inference/v1/generate"
THOUGHT = "<think>Two and two.</think>Four. Stop here. Or there."
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("hermes", "It is 3 o'clock.", {}),
    ("hermes", "It is 3 o'clock.", {"stop": [" o'"], "logprobs": True, "top_logprobs": 2}),
    ("hermes", TWO, {"tools": TOOLS, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    ("hermes", TWO, {"tools": TOOLS, "max_tokens": 30}),
    ("hermes", TWO, {"tools": TOOLS, "tool_choice": "none"}),
    ("qwen3", THOUGHT, {}),
    ("qwen3", THOUGHT, {"include_reasoning": False, "stop": ["Stop"]}),
    ("qwen3", THOUGHT, {"separate_reasoning": False}),
    ("qwen3", f"{THOUGHT}{TWO}", {"tools": TOOLS}),
]


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from answer to answer, and what only the server that computed it knows."""
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            call["id"] = "call"
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    hidden = {"matched_stop"}  # of EOS, which no answer of token ids tells
    choices = [{name: value for name, value in each.items() if name not in hidden} for each in answer["choices"]]
    return {"choices": choices, "usage": usage, "model": answer["model"], "object": answer["object"]}


@pytest.mark.parametrize(("template", "text", "options"), ASKED)
def test_a_chat_that_is_generated_elsewhere_has_its_own_answer(
    template: str, text: str, options: dict[str, Any], tmp_path: Path
) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            body = {"model": "model", "messages": USER, **options}
            expected = (await client.post(CHATS, json=body)).json()
            rendered = (await client.post(f"{CHATS}/render", json=body)).json()
            generated = (await client.post(GENERATE, json=rendered)).json()
            given = {"model": "model", "generate_response": generated, "prompt_tokens": len(rendered["token_ids"])}
            response = await client.post(f"{CHATS}/derender", json={**given, "chat_request": body})
            assert response.status_code == 200, response.text
            found = response.json()
            assert found["id"] == generated["request_id"]
            assert comparable(found) == comparable(expected)
            plain = (await client.post(f"{CHATS}/derender", json=given)).json()["choices"][0]["message"]
            token_ids = {"tokens": generated["choices"][0]["token_ids"], "skip_special_tokens": True}
            assert plain["content"] == (await client.post("/detokenize", json=token_ids)).json()["text"]
            assert plain.get("tool_calls") is plain["reasoning"] is None

    with_chat_model(tmp_path, template, [text], test)


def test_completions_that_are_generated_elsewhere_have_their_own_answers(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"model": "tiny-llama", "prompt": ["a", "Where is Łódź?"], "logprobs": 2, "n": 2, "seed": 1}
        expected = (await client.post(COMPLETIONS, json=body)).json()
        rendered = (await client.post(f"{COMPLETIONS}/render", json=body)).json()
        generated = [(await client.post(GENERATE, json=each)).json() for each in rendered]
        counts = [len(each["token_ids"]) for each in rendered]
        given = {"model": "tiny-llama", "generate_responses": generated, "prompt_tokens": counts}
        found = (await client.post(f"{COMPLETIONS}/derender", json=given)).json()
        for one, other in zip(found["choices"], expected["choices"], strict=True):
            names = ("index", "text", "logprobs", "finish_reason")
            assert [one[name] for name in names] == [other[name] for name in names]
        assert len(found["choices"]) == 4
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert found["usage"][name] == expected["usage"][name]

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one two"), EOS]), test)


def test_what_is_not_read_is_repeated(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        rows = [None, {"5": {"logprob": -1.25, "rank": 1, "decoded_token": "Łódź\u2028"}}]
        given = {"choices": [{"token_ids": ids(" one")}], "prompt_logprobs": rows, "kv_transfer_params": {"a": 1}}
        for path, body in ((CHATS, {"generate_response": given}), (COMPLETIONS, {"generate_responses": [given]})):
            answer = (await client.post(f"{path}/derender", json=body)).json()
            assert (answer["prompt_logprobs"], answer["kv_transfer_params"]) == (rows, {"a": 1})
            assert (answer["usage"]["prompt_tokens"], answer["choices"][0]["finish_reason"]) == (0, "stop")

    with_client(tmp_path, FakeDense(lambda submit: [EOS]), test)


def test_log_probabilities_are_read_in_a_turn_for_each_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may have 16,000 of them, which take milliseconds."""
    turn, num_turns = HeavyWork.turn, 0

    async def counted(work: HeavyWork) -> None:
        nonlocal num_turns
        num_turns += 1
        await turn(work)

    monkeypatch.setattr(HeavyWork, "turn", counted)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        nonlocal num_turns
        content = [{"token": "token_id:70", "logprob": -1.0}]
        plain = {"token_ids": [70]}
        for path, name, is_list in ((CHATS, "generate_response", False), (COMPLETIONS, "generate_responses", True)):
            found = []
            for choice in (plain, {**plain, "logprobs": {"content": content}}):
                given, num_turns = {"choices": [choice] * 3}, 0
                response = await client.post(f"{path}/derender", json={name: [given] if is_list else given})
                assert response.status_code == 200, response.text
                found.append(num_turns)
            assert found[1] >= found[0] + 3

    with_client(tmp_path, FakeDense(lambda submit: [EOS]), test)


def test_wrong_answers_are_refused(tmp_path: Path) -> None:
    def of(choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"generate_responses": [{"choices": [choice]}], **more}

    named = {"token_ids": [70], "logprobs": {"content": [{"token": "a", "logprob": -1.0}]}}
    unknown = {"token_ids": [70], "logprobs": {"content": [{"token": "token_id:99999", "logprob": -1.0}]}}
    refused = [
        (of({"token_ids": []}), "generate_responses[0].choices[0].token_ids", "at least 1"),
        (of({"token_ids": None}), "generate_responses[0].choices[0].token_ids", "list"),
        (of({"token_ids": [99999]}), "generate_responses[0].choices.token_ids", "99999"),
        (of({"token_ids": [70], "finish_reason": "tired"}), "generate_responses[0].choices[0].finish_reason", "tired"),
        (of(named), "generate_responses[0].choices.logprobs", "token_id:ID"),
        (of(unknown), "generate_responses[0].choices.logprobs", "99999"),
        (of({"token_ids": [70]}, prompt_tokens=[1, 2]), "prompt_tokens", "2 elements"),
        (of({"token_ids": [70]}, stream=True), "stream", "not supported"),
        ({"generate_responses": []}, "generate_responses", "at least 1"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for body, param, words in refused:
            response = await client.post(f"{COMPLETIONS}/derender", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param) and words in error["message"], error
        body = {"model": "none", "generate_response": {"choices": [{"token_ids": [70]}]}}
        check_error(await client.post(f"{CHATS}/derender", json=body), 404, "model")
        for chat, param in (({"messages": []}, "chat_request.messages"), ({"messages": USER, "n": 0}, "n")):
            given = {"generate_response": {"choices": [{"token_ids": [70]}]}, "chat_request": chat}
            response = await client.post(f"{CHATS}/derender", json=given)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text

    with_client(tmp_path, FakeDense(lambda submit: [EOS]), test)
