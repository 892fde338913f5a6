"""Parts `prompt_embeds` in the messages of a chat: what a dense worker is sent, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
import torch

from services.pb import gateway_pb2
from tests.support.clients.gateway_calls import REFERENCE, ids
from tests.support.clients.http_gateway import CHATS, check_error, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.torch_files import encoded
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.apis.openai.test_chat_templates import make_model
from tests.unit.gateway.request.test_prompt_embeds import HIDDEN_SIZE, VECTORS, VOCAB_SIZE, sent_table, with_gateway

FIRST, SECOND = VECTORS[:4].contiguous(), VECTORS[4:].contiguous()


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def embeds(value: Any) -> dict[str, str]:
    return {"type": "prompt_embeds", "data": encoded(value)}


def user(*parts: dict[str, str]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


CHAT: list[Any] = [
    user(text("See "), embeds(FIRST), text(" and say")),
    {"role": "assistant", "content": "Yes"},
    user(embeds(SECOND)),
]


def expected_tokens() -> list[int]:
    """As transformers renders the chat with marks in place of the vectors."""
    marked = [user(), {"role": "assistant", "content": "Yes"}, user()]
    marked[0]["content"], marked[2]["content"] = "See @@ and say", "@@"
    rendered = REFERENCE.apply_chat_template(marked, add_generation_prompt=True, tokenize=False)
    head, middle, tail = map(ids, rendered.split("@@"))
    return [*head, *range(VOCAB_SIZE, VOCAB_SIZE + 4), *middle, *range(VOCAB_SIZE + 4, VOCAB_SIZE + 6), *tail]


def test_vectors_stand_where_their_parts_do(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, dense: FakeDense) -> None:
        api = openai.AsyncOpenAI(api_key="x", base_url="http://gateway/v1", http_client=client, max_retries=0)
        answer = await api.chat.completions.create(model="", messages=CHAT, max_tokens=2)
        assert list(dense.submits[0].spec.prompt_token_ids) == expected_tokens()
        assert answer.usage.prompt_tokens == len(expected_tokens())
        assert torch.equal(sent_table(dense), VECTORS)

    with_gateway(tmp_path, test)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "another shape": ({"messages": [user(embeds(torch.zeros(2, 3)))]}, f"[num_tokens, {HIDDEN_SIZE}]"),
        "no base64": ({"messages": [user({"type": "prompt_embeds", "data": "?"})]}, "not base64"),
        "two dtypes": ({"messages": [user(embeds(FIRST), embeds(SECOND.half()))]}, "all must have one dtype"),
        "too many": ({"messages": [user(*[embeds(FIRST)] * 65)]}, "65 parts of prompt_embeds, at most 64"),
        "too long": ({"messages": [user(*[embeds(VECTORS)] * 11)]}, "maximum context length is 64"),
        "of a prompt": ({"messages": CHAT, "prompt_logprobs": 1}, "prompt_logprobs cannot be used"),
        "special tokens": ({"messages": CHAT, "add_special_tokens": True}, "add_special_tokens cannot be used"),
    }

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, dense: FakeDense) -> None:
        for name, (body, words) in cases.items():
            response = await client.post(CHATS, json={"max_tokens": 2, **body})
            assert response.status_code == 400 and words in response.json()["error"]["message"], (name, response.text)
            if name == "no base64":
                assert response.json()["error"]["param"] == "messages[0]"
        for path in ("/tokenize", "/apply-template"):
            response = await client.post(path, json={"messages": CHAT})
            check_error(response, 400, "messages[0]", "prompt_embeds")
        places = [gateway_pb2.MessageVectors(position=position, num_tokens=1) for position in (0, 3)]
        chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="Hi", vectors=places)])
        with pytest.raises(grpc.aio.AioRpcError, match="vectors stand at 3, must be from 0 to 2"):
            await gateway.stub.Generate(gateway_pb2.GenerateRequest(chat=chat))
        chat.messages[0].vectors[1].position = 2
        with pytest.raises(grpc.aio.AioRpcError, match="the messages have 2 vectors, and the request's table 0"):
            await gateway.stub.Generate(gateway_pb2.GenerateRequest(chat=chat))
        assert not dense.submits

    with_gateway(tmp_path, test)


def test_they_are_off_by_default(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(CHATS, json={"messages": CHAT})
        check_error(response, 400, "messages[0]", "gateway.enable_prompt_embeds")

    with_client(tmp_path, FakeDense(say(" one")), test)


@pytest.mark.parametrize(
    "template", ["{{ messages[-1].content }}", "{% for each in messages * 2 %}{{ each.content }}{% endfor %}"]
)
def test_a_template_that_leaves_a_message_out_or_repeats_it_is_named(tmp_path: Path, template: str) -> None:
    model = make_model(tmp_path / "model", template)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, dense: FakeDense) -> None:
        response = await client.post(CHATS, json={"messages": CHAT, "max_tokens": 2})
        check_error(response, 400, "messages", "leaves out, repeats or moves")

    with_gateway(tmp_path, test, model=model)
