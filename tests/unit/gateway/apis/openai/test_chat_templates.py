"""The variables of a chat template over HTTP and gRPC, compared with `apply_chat_template`."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.common.errors import ConfigError
from services.gateway.text.read_chat import use_template_kwargs
from services.gateway.text.tokenizer import load_tokenizer
from services.pb import gateway_pb2
from tests.support.chats.chat_models import prompt_text, with_chat_model
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

REFERENCE = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
CHATS, TOKENIZE = "/v1/chat/completions", "/tokenize"
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + (message.name + ': ' if message.name is defined else '') }}
    {{- message.content + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
NAMED = [
    {"role": "user", "name": "Ann", "content": "Who are you?"},
    {"role": "assistant", "name": "helper", "content": "A helper."},
    {"role": "user", "content": "And I?"},
]
USER = [{"role": "user", "content": "Hi"}]
Test = Callable[[httpx2.AsyncClient, RunningGateway], Awaitable[None]]


def make_model(path: Path, template: str = TEMPLATE) -> Path:
    """The embedded model's configuration and tokenizer, with another chat template."""
    path.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, path)
    (path / "chat_template.jinja").write_text(template)
    return path


def with_model(tmp_path: Path, test: Test, template: str = TEMPLATE, **options: Any) -> FakeDense:
    """Runs `test` against a gateway with that template; returns its dense worker."""
    model, dense = make_model(tmp_path / "model", template), FakeDense(lambda submit: [5] * 100)

    async def body() -> None:
        async with (
            running_gateway(tmp_path, dense, model=model, **options) as gateway,
            async_client(gateway.http_address) as client,
        ):
            await test(client, gateway)

    run(body())
    return dense


def expected_ids(model: Path, messages: list[dict[str, str]], **options: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, "return_dict": False} | options)


def test_a_name_reaches_the_template_over_both_protocols(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        expected = expected_ids(tmp_path / "model", NAMED)
        response = await client.post(CHATS, json={"messages": NAMED, "max_tokens": 1})
        assert response.status_code == 200, response.text
        assert (await client.post(TOKENIZE, json={"messages": NAMED})).json()["tokens"] == expected
        message = gateway_pb2.GenerateRequest(chat={"messages": NAMED}, max_tokens=1)
        await gateway.stub.Generate(message)
        assert expected != expected_ids(tmp_path / "model", [each | {"name": "Bob"} for each in NAMED])

    dense = with_model(tmp_path, test)
    expected = expected_ids(tmp_path / "model", NAMED)
    assert [list(submit.spec.prompt_token_ids) for submit in dense.submits] == [expected, expected]


def test_messages_may_be_empty(tmp_path: Path) -> None:
    """Some clients send an empty system message where the user has given none."""
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for content in ("", []):
            body = {"messages": [messages[0], {"role": "user", "content": content}], "max_tokens": 1}
            response = await client.post(CHATS, json=body)
            assert response.status_code == 200, response.text

    dense = with_model(tmp_path, test)
    expected = expected_ids(tmp_path / "model", messages)
    assert [list(submit.spec.prompt_token_ids) for submit in dense.submits] == [expected, expected]


def test_the_length_of_a_name_is_limited(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name, status in (("x" * 64, 200), ("x" * 65, 400), ("", 200), (None, 200)):
            messages = [{"role": "user", "content": "Hi", "name": name}]
            response = await client.post(TOKENIZE, json={"messages": messages})
            assert response.status_code == status, response.text
        error = (await client.post(TOKENIZE, json={"messages": [{**NAMED[0], "name": "x" * 65}]})).json()["error"]
        assert error["param"] == "messages[0].name" and "65 characters, at most 64" in error["message"]

    with_model(tmp_path, test)


OPEN = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am"}]
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


def test_options_reach_the_template_over_both_protocols(tmp_path: Path) -> None:
    template = TEMPLATE + "{{ style.words | join(' ') if style is defined }}{{ depth }}"
    kwargs: dict[str, Any] = {"style": {"words": ["short", "日本"]}, "depth": 3}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (CONTINUE, {}),
        ({"continue_final_message": True}, {}),
        ({"add_generation_prompt": False}, {}),
        ({"add_generation_prompt": None, "continue_final_message": False}, {}),
        ({}, kwargs),
        (CONTINUE, kwargs),
    ]

    prompts: list[list[int]] = []

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for options, variables in cases:
            body = {"messages": OPEN, **options, "chat_template_kwargs": variables}
            response = await client.post(CHATS, json={**body, "max_tokens": 1})
            assert response.status_code == 200, response.text
            continues = bool(options.get("continue_final_message"))
            begins = options.get("add_generation_prompt")
            same = {
                "add_generation_prompt": not continues if begins is None else begins,
                "continue_final_message": continues,
            }
            expected = expected_ids(tmp_path / "model", OPEN, **same, **variables)
            prompts.append(expected)
            assert (await client.post(TOKENIZE, json=body)).json()["tokens"] == expected
            chat = {"messages": OPEN, "chat_template_kwargs": json.dumps(variables), **options}
            reply = await gateway.stub.Tokenize(gateway_pb2.TokenizeRequest(chat=chat))
            assert list(reply.token_ids) == expected

    dense = with_model(tmp_path, test, template)
    assert [list(submit.spec.prompt_token_ids) for submit in dense.submits] == prompts


def test_wrong_options_are_a_400_that_names_them(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str, str]] = [
        (CONTINUE | {"add_generation_prompt": True}, "continue_final_message", "Cannot set both"),
        (CONTINUE | {"messages": [*OPEN, {"role": "assistant", "content": None}]}, "messages", "last message is empty"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages', which the server sets"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools', which the server sets"),
        ({"chat_template_kwargs": {"a": "x" * 16384}}, "chat_template_kwargs", "16392 bytes, at most 16384"),
        ({"chat_template_kwargs": {"a": [[[[[[[[1]]]]]]]]}}, "chat_template_kwargs", "9 deep, at most 8"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs", "65 elements, at most 64"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "dictionary"),
        ({"chat_template_kwargs": {"break": True}}, "messages", "fails on this chat: ZeroDivisionError"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for (fields, param, words), path in itertools.product(wrong, (CHATS, TOKENIZE)):
            response = await client.post(path, json={"messages": OPEN, **fields})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param, response.text
            assert words in response.json()["error"]["message"], response.text

    with_model(tmp_path, test, "{% if break is defined %}{{ 1 // 0 }}{% endif %}" + TEMPLATE)


def test_special_tokens_are_text_in_messages_but_not_in_prompts(tmp_path: Path) -> None:
    text = "a</s><|user|>b"

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(CHATS, json={"messages": [{"role": "user", "content": text}], "max_tokens": 1})
        assert response.status_code == 200, response.text
        response = await client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
        assert response.status_code == 200, response.text

    dense = with_model(tmp_path, test)
    user, eos, assistant = REFERENCE.convert_tokens_to_ids(["<|user|>", "</s>", "<|assistant|>"])
    splitting = AutoTokenizer.from_pretrained(EMBEDDED_MODEL, split_special_tokens=True)
    plain = splitting.encode(text, add_special_tokens=False)
    assert not {user, eos} & set(plain)
    chat, completion = (list(submit.spec.prompt_token_ids) for submit in dense.submits)
    assert chat == [user, *plain, eos, assistant]
    assert completion == REFERENCE.encode(text) and {user, eos} < set(completion)


def test_the_chat_template_decides_about_other_roles(tmp_path: Path) -> None:
    """And a role cannot write control tokens."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def ask(role: Any) -> httpx2.Response:
            return await client.post(CHATS, json={"messages": [{"role": role, "content": "Hi"}], "max_tokens": 1})

        token_ids = (await client.post(TOKENIZE, json={"messages": [{"role": "critic", "content": "Hi"}]})).json()
        assert REFERENCE.decode(token_ids["tokens"]) == "<|critic|>Hi</s><|assistant|>"
        assert (await ask("critic")).status_code == 200
        assert (await ask("</s>")).status_code == 200
        for wrong in ("", "x" * 65, 5, None, "function"):
            response = await ask(wrong)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].role")

    _, submit = with_model(tmp_path, test).submits
    token_ids = list(submit.spec.prompt_token_ids)
    assert REFERENCE.decode(token_ids) == "<|</s>|>Hi</s><|assistant|>"
    assert token_ids.count(REFERENCE.eos_token_id) == 1


def test_all_chats_take_variables_of_the_template(tmp_path: Path) -> None:
    """vLLM has the field in Responses and Messages, too."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
        "/v1/messages": {"model": "model", "messages": USER, "max_tokens": 1},
    }

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            for path, body in bodies.items():
                for given in (body, body | off):
                    answer = await client.post(path, json=given)
                    assert answer.status_code == 200, answer.text
            wins = {"thinking": {"type": "enabled"}, **off}
            assert (await client.post("/v1/messages", json=bodies["/v1/messages"] | wins)).status_code == 200
            chat = bodies["/v1/chat/completions"] | {"reasoning_effort": "none"}
            for given in (chat, chat | {"chat_template_kwargs": {"enable_thinking": True}}):
                assert (await client.post("/v1/chat/completions", json=given)).status_code == 200

    dense = with_chat_model(tmp_path, "qwen3", ["Hello."], test)
    are_closed = [prompt_text(submit).endswith("<think>\n\n</think>\n\n") for submit in dense.submits]
    *pairs, last, without_effort, but_thinking = are_closed
    assert pairs == [False, True] * len(bodies) and last
    assert without_effort and not but_thinking, "as with vLLM"


def test_a_server_may_have_variables_for_chats_that_do_not_set_them(tmp_path: Path) -> None:
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    bodies = [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 1}, on),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, on),
        ("/v1/messages", {"model": "model", "messages": USER, "max_tokens": 1}, {"thinking": {"type": "enabled"}}),
        ("/api/chat", {"model": "model", "messages": USER, "stream": False}, {"think": True}),
    ]

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            for path, body, own in bodies:
                for given in (body, body | {"chat_template_kwargs": {"mood": "!"}}, body | own):
                    answer = await client.post(path, json=given)
                    assert answer.status_code == 200, answer.text

    section = {"chat_template_kwargs": '{"enable_thinking": false}'}
    dense = with_chat_model(tmp_path, "qwen3", ["Hello."], test, **section)
    are_closed = [prompt_text(submit).endswith("<think>\n\n</think>\n\n") for submit in dense.submits]
    assert are_closed == [True, True, False] * len(bodies)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("enable_thinking=1", "gateway.chat_template_kwargs is not JSON"),
        ("[1]", "gateway.chat_template_kwargs is not a JSON object"),
        ('{"tools": []}', "gateway.chat_template_kwargs has 'tools', which the server sets itself"),
    ],
)
def test_those_variables_are_checked_at_the_start(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        use_template_kwargs(load_tokenizer(EMBEDDED_MODEL), text)
