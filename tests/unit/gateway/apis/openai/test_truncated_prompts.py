"""`truncate_prompt_tokens` keeps the last tokens of a prompt, and `add_special_tokens` says whether special ones are
added to it. The tokenizer itself gives the expected tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, with_client
from tests.support.running_gateway import RunningGateway
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


def post_all(directory: Path, bodies: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """The answers of one gateway to all bodies, and the prompts that its dense worker got for them."""
    dense = FakeDense(lambda submit: [5] * MAX_MODEL_LEN, max_model_len=MAX_MODEL_LEN)
    answers: list[dict[str, Any]] = []

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for body in bodies:
            response = await client.post(CHATS if "messages" in body else COMPLETIONS, json=body)
            assert response.status_code == 200, response.text
            answers.append(response.json())

    with_client(directory, dense, test)
    prompts = [list(submit.spec.prompt_token_ids) for submit in dense.submits]
    return list(zip(answers, prompts, strict=True))


def test_the_last_tokens_are_kept(tmp_path: Path) -> None:
    options: list[tuple[dict[str, Any], int | None]] = [
        ({"truncate_prompt_tokens": 7, "max_tokens": 3}, 7),
        ({"truncate_prompt_tokens": 150}, 150),
        ({"truncate_prompt_tokens": -1, "max_tokens": 30}, MAX_MODEL_LEN - 30),
        ({"truncate_prompt_tokens": -1}, None),
    ]
    cases = list(itertools.product(PROMPTS, options))
    bodies = [PROMPTS[kind][0] | fields | {"return_token_ids": True} for kind, (fields, _) in cases]
    for case, (answer, submitted) in zip(cases, post_all(tmp_path, bodies), strict=True):
        kind, (_, num_kept) = case
        prompt, token_ids = PROMPTS[kind]
        assert len(token_ids) > MAX_MODEL_LEN
        if num_kept is None:  # the default of max_tokens is 16 for completions, and for chats the rest of the context
            num_kept = MAX_MODEL_LEN - (1 if "messages" in prompt else 16)
        assert submitted == token_ids[-num_kept:], case
        holder = answer if "messages" in prompt else answer["choices"][0]
        assert holder["prompt_token_ids"] == token_ids[-num_kept:], case
        assert answer["usage"]["prompt_tokens"] == num_kept, case


def test_the_side_that_is_left_out(tmp_path: Path) -> None:
    cases = list(itertools.product(PROMPTS, [("left", 7), ("right", 7), ("right", -1)]))
    bodies = [
        PROMPTS[kind][0] | {"truncate_prompt_tokens": count, "truncation_side": side, "max_tokens": 30}
        for kind, (side, count) in cases
    ]
    for case, (_, submitted) in zip(cases, post_all(tmp_path, bodies), strict=True):
        kind, (side, count) = case
        token_ids = PROMPTS[kind][1]
        num_kept = MAX_MODEL_LEN - 30 if count == -1 else count
        assert submitted == (token_ids[:num_kept] if side == "right" else token_ids[-num_kept:]), case


def test_a_short_prompt_is_not_truncated(tmp_path: Path) -> None:
    text = "San  Francisco"
    bodies = [{"prompt": text, "truncate_prompt_tokens": count, "max_tokens": 4, "echo": True} for count in (-1, 50)]
    for answer, submitted in post_all(tmp_path, bodies):
        assert submitted == REFERENCE(text)["input_ids"]
        assert answer["choices"][0]["text"].startswith(text)


def test_the_echo_of_a_truncated_text_is_its_kept_part(tmp_path: Path) -> None:
    body = {"prompt": TEXT, "truncate_prompt_tokens": 9, "max_tokens": 1, "echo": True}
    [(answer, _)] = post_all(tmp_path, [body])
    [choice] = answer["choices"]
    assert choice["text"].startswith(REFERENCE.decode(REFERENCE(TEXT)["input_ids"][-9:]))
    assert len(choice["text"]) < 100


def test_special_tokens_are_added_as_asked_for(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    chat_text = REFERENCE.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    cases = list(itertools.product([False, True], [None, False, True]))
    bodies = [
        ({"messages": messages} if is_chat else {"prompt": "Hello"}) | {"add_special_tokens": adds, "max_tokens": 1}
        for is_chat, adds in cases
    ]
    for (is_chat, adds), (_, submitted) in zip(cases, post_all(tmp_path, bodies), strict=True):
        text = chat_text if is_chat else "Hello"
        plain, special = (REFERENCE(text, add_special_tokens=each)["input_ids"] for each in (False, True))
        assert plain != special
        assert submitted == (special if adds or (adds is None and not is_chat) else plain), (is_chat, adds)
