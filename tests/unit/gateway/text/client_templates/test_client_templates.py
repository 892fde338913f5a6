"""`chat_template` in requests: compared with `apply_chat_template`, and templates that try to take time or memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.common.errors import CapacityError, InvalidRequest
from services.gateway.resources.heavy_work import work_for
from services.gateway.text.chat_message import Message
from services.gateway.text.chat_template import Chat
from services.gateway.text.client_templates import client_templates
from services.gateway.text.client_templates.client_templates import ClientTemplates
from tests.support.clients.gateway_calls import REFERENCE, ids
from tests.support.clients.http_gateway import CHATS, check_error, say, with_client
from tests.support.running_gateway import RunningGateway, run
from tests.support.workers.fake_dense import FakeDense

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
[{{ message.role | upper }}{{ loop.index }}{{ mood if mood is defined }}] {{ message.content }}
{%- endfor %}
{%- for tool in tools or [] %} {{ tool.function | tojson }}{% endfor %}
{%- if add_generation_prompt %} [ANSWER]{% endif %}
"""
MESSAGES = [{"role": "user", "content": "Hi, I say </s>"}, {"role": "assistant", "content": "Łódź 🙂"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
CHAT = Chat([Message("user", "Hi")])
# Its limit of CPU time is a fifth, so that what meets it takes less.
QUICK_RENDERER = "tests.support.workers.quick_renderer"
ON: dict[str, Any] = {"trust_request_chat_template": True}


def expected_text(**options: Any) -> str:
    return REFERENCE.apply_chat_template(
        MESSAGES, chat_template=TEMPLATE, tokenize=False, **{"add_generation_prompt": True, **options}
    )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"chat_template_kwargs": {"mood": "!"}},
]


def test_a_template_of_the_request_takes_the_place_of_the_models(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for options in OPTIONS:
            expected = expected_text(**(options.get("chat_template_kwargs") or options))
            body = {"messages": MESSAGES, "chat_template": TEMPLATE, **options}
            assert (await client.post("/apply-template", json=body)).json() == {"prompt": expected}, options
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            # A special token in a message is plain text, as with the model's own template.
            assert tokens.count(REFERENCE.eos_token_id) == 0 < REFERENCE.encode(expected).count(REFERENCE.eos_token_id)
            assert REFERENCE.decode(tokens, clean_up_tokenization_spaces=False) == expected, options
            response = await client.post(CHATS, json={**body, "max_tokens": 1})
            assert response.status_code == 200, response.text
            assert list(dense.submits[-1].spec.prompt_token_ids) == tokens, options
        assert len(dense.submits) == len(OPTIONS)

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test, **ON)


def test_a_template_gets_tools(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "chat_template": TEMPLATE}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        text = REFERENCE.apply_chat_template(
            body["messages"], tools=[TOOL], chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        assert (await client.post("/tokenize", json=body)).json()["tokens"] == ids(text)

    with_client(tmp_path, FakeDense(say(" one")), test, **ON, tool_parser="hermes")


def test_templates_are_refused_by_default(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in (CHATS, "/tokenize", "/apply-template"):
            response = await client.post(path, json={"messages": MESSAGES, "chat_template": TEMPLATE})
            check_error(response, 400, "chat_template", "gateway.trust_request_chat_template")

    with_client(tmp_path, FakeDense(say(" one")), test)


HOSTILE = {
    "an operation without end": ("{{ 9**(9**(9**9)) }}", "CPU time"),
    "the same, once it runs": ("{% set n = messages | length + 8 %}{{ n**(n**(n**n)) }}", "CPU time"),
    "a loop without end": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "CPU time",
    ),
    "a text of gigabytes": ("{{ 'a' * 10**10 }}", "Memory"),
    "a padded text": ("{{ '%9999999999d' % 1 }}", "fails"),
    "a long text": ("{{ 'a' * (2**23) }}", "8388608 characters"),
    "an attribute that leads out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
    "deep nesting": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", ""),
    "an error": ("{{ raise_exception('no, not this') }}", "no, not this"),
    "wrong syntax": ("{% for %}", "refuses"),
    "too large": ("x" * (64 * 2**10 + 1), "65537 bytes, at most 65536"),
}


@pytest.fixture
def quick_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_templates, "_MODULE", QUICK_RENDERER)


@pytest.mark.usefixtures("quick_renderer")
def test_hostile_templates_are_errors_of_the_request(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name, (template, words) in HOSTILE.items():
            response = await client.post(CHATS, json={"messages": MESSAGES, "chat_template": template})
            assert response.status_code == 400, (name, response.text)
            error = response.json()["error"]
            assert error["param"] == "chat_template" and words in error["message"], (name, error)
        assert not dense.submits
        body = {"messages": MESSAGES, "chat_template": TEMPLATE}
        assert (await client.post("/apply-template", json=body)).json() == {"prompt": expected_text()}

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test, **ON)


@pytest.mark.usefixtures("quick_renderer")
def test_a_client_that_goes_ends_its_own_template() -> None:
    def chat(template: str) -> Chat:
        return Chat(CHAT.messages, template=template)

    async def test() -> None:
        templates = ClientTemplates()

        def render(template: str) -> asyncio.Task[str]:
            messages = [{"role": "user", "content": "Hi"}]
            return asyncio.ensure_future(templates.render(chat(template), messages, {}, [], {}))

        try:
            assert await render("{{ messages[0].content }}") == "Hi"
            endless = render("{{ 9**(9**(9**9)) }}")
            await asyncio.sleep(0.05)
            endless.cancel()
            assert await render("{{ messages | length }}") == "1"
            assert endless.cancelled()
            with pytest.raises(InvalidRequest, match="CPU time"):
                await render("{{ 9**(9**(9**9)) }}")
        finally:
            await templates.close()

    run(test())


def test_hundreds_of_templates_of_a_client_wait_and_hold_up_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an evaluation sends them that brings a template of its own."""
    rendered = list[str]()

    async def render(_: ClientTemplates, message: dict[str, Any]) -> dict[str, str]:
        rendered.append(message["template"])
        await asyncio.sleep(0)
        return {"text": message["template"].upper()}

    monkeypatch.setattr(ClientTemplates, "_ask", render)

    async def test() -> None:
        templates = ClientTemplates()

        async def ask(client: tuple[int, int], template: str) -> str:
            work_for(client)
            return await templates.render(Chat(CHAT.messages, template=template), [], {}, [], {})

        many = [asyncio.create_task(ask((0, 1), f"a{i}")) for i in range(500)]
        await asyncio.sleep(0)
        assert await asyncio.create_task(ask((0, 2), "b")) == "B"
        assert rendered.index("b") <= 3, "clients take turns"
        assert await asyncio.gather(*many) == [f"A{i}" for i in range(500)]
        monkeypatch.setattr(templates._turns, "_max_wait_s", 0.01)
        monkeypatch.setattr(ClientTemplates, "_ask", lambda *_: asyncio.sleep(60))
        endless = asyncio.create_task(ask((0, 1), ""))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match=r"the chat template has waited 0\.01 s for its turn"):
            await ask((0, 2), "")
        endless.cancel()
        await asyncio.wait({endless})

    run(test())
