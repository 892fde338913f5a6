"""`truncate_prompt_tokens` keeps the last tokens of a prompt, and `add_special_tokens` says whether special ones are
added to it. The tokenizer itself gives the expected tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

REFERENCE = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
MAX_MODEL_LEN = 200
TEXT = "San Francisco is a city of hills, bridges and fog, and of much more than that. " * 12
CHAT = [{"role": "user", "content": TEXT}]
CHAT_TEXT = REFERENCE.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
LONG_IDS = [3 + i % 900 for i in range(3 * MAX_MODEL_LEN)]
PROMPTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "a text": ({"prompt": TEXT}, REFERENCE(TEXT)["input_ids"]),
    "token ids": ({"prompt": LONG_IDS}, LONG_IDS),
    "a chat": ({"messages": CHAT}, REFERENCE(CHAT_TEXT, add_special_tokens=False)["input_ids"]),
}


def post(tmp_path: Path, dense: FakeDense, body: dict[str, Any]) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []

    async def test() -> None:
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            answers.append(response.json())

    run(test())
    return answers[0]


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [
        ({"truncate_prompt_tokens": 7, "max_tokens": 3}, 7),
        ({"truncate_prompt_tokens": 150}, 150),
        ({"truncate_prompt_tokens": -1, "max_tokens": 30}, MAX_MODEL_LEN - 30),
        ({"truncate_prompt_tokens": -1}, None),
    ],
)
@pytest.mark.parametrize("kind", PROMPTS)
def test_the_last_tokens_are_kept(kind: str, options: dict[str, Any], num_kept: int | None, tmp_path: Path) -> None:
    prompt, token_ids = PROMPTS[kind]
    assert len(token_ids) > MAX_MODEL_LEN
    if num_kept is None:  # the default of max_tokens is 16 for completions, and for chats the rest of the context
        num_kept = MAX_MODEL_LEN - (1 if "messages" in prompt else 16)
    dense = FakeDense(lambda submit: [5] * MAX_MODEL_LEN, max_model_len=MAX_MODEL_LEN)
    answer = post(tmp_path, dense, prompt | options | {"return_token_ids": True})
    [submit] = dense.submits
    assert list(submit.spec.prompt_token_ids) == token_ids[-num_kept:]
    holder = answer if "messages" in prompt else answer["choices"][0]
    assert holder["prompt_token_ids"] == token_ids[-num_kept:]
    assert answer["usage"]["prompt_tokens"] == num_kept


@pytest.mark.parametrize(("side", "count"), [("left", 7), ("right", 7), ("right", -1)])
@pytest.mark.parametrize("kind", PROMPTS)
def test_the_side_that_is_left_out(kind: str, side: str, count: int, tmp_path: Path) -> None:
    prompt, token_ids = PROMPTS[kind]
    dense = FakeDense(lambda submit: [5] * MAX_MODEL_LEN, max_model_len=MAX_MODEL_LEN)
    post(tmp_path, dense, prompt | {"truncate_prompt_tokens": count, "truncation_side": side, "max_tokens": 30})
    num_kept = MAX_MODEL_LEN - 30 if count == -1 else count
    expected = token_ids[:num_kept] if side == "right" else token_ids[-num_kept:]
    assert list(dense.submits[0].spec.prompt_token_ids) == expected


@pytest.mark.parametrize("count", [-1, 50])
def test_a_short_prompt_is_not_truncated(count: int, tmp_path: Path) -> None:
    dense = FakeDense(lambda submit: [5] * 4)
    text = "San  Francisco"
    answer = post(tmp_path, dense, {"prompt": text, "truncate_prompt_tokens": count, "max_tokens": 4, "echo": True})
    assert list(dense.submits[0].spec.prompt_token_ids) == REFERENCE(text)["input_ids"]
    assert answer["choices"][0]["text"].startswith(text)


def test_the_echo_of_a_truncated_text_is_its_kept_part(tmp_path: Path) -> None:
    dense = FakeDense(lambda submit: [5], max_model_len=MAX_MODEL_LEN)
    body = {"prompt": TEXT, "truncate_prompt_tokens": 9, "max_tokens": 1, "echo": True}
    [choice] = post(tmp_path, dense, body)["choices"]
    assert choice["text"].startswith(REFERENCE.decode(REFERENCE(TEXT)["input_ids"][-9:]))
    assert len(choice["text"]) < 100


@pytest.mark.parametrize("adds", [None, False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_special_tokens_are_added_as_asked_for(is_chat: bool, adds: bool | None, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    text = REFERENCE.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) if is_chat else "Hello"
    plain, special = (REFERENCE(text, add_special_tokens=each)["input_ids"] for each in (False, True))
    assert plain != special
    dense = FakeDense(lambda submit: [5])
    prompt = {"messages": messages} if is_chat else {"prompt": text}
    post(tmp_path, dense, prompt | {"add_special_tokens": adds, "max_tokens": 1})
    expected = special if adds or (adds is None and not is_chat) else plain
    assert list(dense.submits[0].spec.prompt_token_ids) == expected
