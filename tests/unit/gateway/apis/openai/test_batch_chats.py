"""vLLM's route for several chats in one request: each gets the answer that it gets alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.gateway.apis.openai import routes
from services.gateway.apis.openai.conversion import chat_message
from services.pb import gateway_pb2
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_gateway import CHATS, check_error, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

URL = "/v1/chat/completions/batch"
SYSTEM = {"role": "system", "content": "Be brief."}
TALKS: list[Any] = [
    [{"role": "user", "content": "Hi"}],
    [SYSTEM, {"role": "user", "content": "Where is Paris?"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Who?"}],
]


def repeating() -> FakeDense:
    """Each answer is the end of its prompt, so that all are different."""
    return FakeDense(lambda submit: [*list(submit.spec.prompt_token_ids)[-7:-2], EOS][: submit.spec.max_tokens])


def test_each_conversation_gets_its_own_answer(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        options = {"logprobs": True, "top_logprobs": 2, "temperature": 0.5, "seed": 3, "return_token_ids": True}
        alone = [(await client.post(CHATS, json=options | {"messages": talk})).json() for talk in TALKS]
        assert len({each["choices"][0]["message"]["content"] for each in alone}) == len(TALKS)
        together = (await client.post(URL, json=options | {"messages": TALKS})).json()
        expected = [
            {**each["choices"][0], "index": i, "prompt_token_ids": each["prompt_token_ids"]}
            for i, each in enumerate(alone)
        ]
        assert together["choices"] == expected
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(each["usage"][name] for each in alone)
        assert together["object"] == "chat.completion" and together["model"] == alone[0]["model"]
        [one] = (await client.post(URL, json={"messages": TALKS[:1]})).json()["choices"]
        assert one["message"] == expected[0]["message"] and "prompt_token_ids" not in one
        asked = (await client.post(URL, json={"messages": TALKS, "return_prompt_token_ids": True})).json()
        assert [each["prompt_token_ids"] for each in asked["choices"]] == [each["prompt_token_ids"] for each in alone]

    with_client(tmp_path, repeating(), test)


def test_what_one_answer_to_each_cannot_have_is_refused(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name, value in (
            ("stream", True), ("n", 2), ("best_of", 2), ("echo", True), ("use_beam_search", True),
            ("prompt_logprobs", 1),
        ):  # fmt: skip
            check_error(await client.post(URL, json={"messages": TALKS, name: value}), 400, name, "not supported")
        for talks, field in (
            (TALKS[0], "messages[0]"), ([], "messages"), ([[]], "messages[0]"), (TALKS * 2, "messages"),
            ([TALKS[0], [{"role": "user", "content": 5}]], "messages[1][0].content"),
        ):  # fmt: skip
            check_error(await client.post(URL, json={"messages": talks}), 400, field)
        neutral = {"stream": False, "n": 1, "echo": False}
        assert (await client.post(URL, json={"messages": TALKS} | neutral)).status_code == 200

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one"), EOS]), test, max_prompts=5)


@pytest.mark.parametrize("options", [
    {"tools": [
        {"type": "function", "function": {"name": f"f{i}", "description": "d" * 32_000, "parameters": {}}}
        for i in range(50)
    ]},
    {"response_format": {
        "type": "json_schema",
        "json_schema": {"name": "f", "schema": {"type": "string", "description": "d" * 1_600_000}},
    }},
    {"chat_template": "d" * 1_600_000},
], ids=["tools", "form", "template"])  # fmt: skip
def test_options_that_are_too_long_are_not_copied_for_each_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A body of 1.6 MB would become 100 MB, which nobody has counted."""
    sizes = list[int]()

    def counted(*arguments: Any) -> gateway_pb2.GenerateRequest:
        sizes.append((message := chat_message(*arguments)).ByteSize())
        return message

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        param = "tools" if "tools" in options else None
        check_error(await client.post(URL, json={"messages": TALKS[:1] * 64} | options), 400, param, "bytes")
        assert sum(sizes) < 2_000_000

    monkeypatch.setattr(routes, "chat_message", counted)
    with_client(tmp_path, repeating(), test)
