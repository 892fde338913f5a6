"""What a chat template gets over HTTP and gRPC, against `apply_chat_template` with the same arguments."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.fake_dense import FakeDense
from tests.http_clients import async_client
from tests.running_gateway import RunningGateway, run, running_gateway

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
Test = Callable[[httpx2.AsyncClient, RunningGateway], Awaitable[None]]


def make_model(path: Path, template: str = TEMPLATE) -> Path:
    """The embedded model's configuration and tokenizer, with another chat template."""
    path.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, path)
    (path / "chat_template.jinja").write_text(template)
    return path


def with_model(tmp_path: Path, test: Test, template: str = TEMPLATE, **options: Any) -> FakeDense:
    """Runs `test` against a gateway of that template; returns its dense worker."""
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


def test_a_name_is_handed_to_the_template_over_both_protocols(tmp_path: Path) -> None:
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
    assert [list(submit.prompt_token_ids) for submit in dense.submits] == [expected, expected]


def test_a_name_has_a_limit(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name, status in (("x" * 64, 200), ("x" * 65, 400), ("", 200), (None, 200)):
            messages = [{"role": "user", "content": "Hi", "name": name}]
            response = await client.post(TOKENIZE, json={"messages": messages})
            assert response.status_code == status, response.text
        error = (await client.post(TOKENIZE, json={"messages": [{**NAMED[0], "name": "x" * 65}]})).json()["error"]
        assert error["param"] == "messages[0].name" and "65 characters, at most 64" in error["message"]

    with_model(tmp_path, test)
