"""Instructions in the middle of a conversation, with templates that take them there and with those that refuse them."""

from __future__ import annotations

import asyncio

import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.gateway.text.chat_message import Message
from services.gateway.text.chat_template import Chat
from services.gateway.text.tokenizer import Tokenizer

WRITE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
REFUSE = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
ALTERNATE = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}{% endfor %}"
)


def rendered(template: str, *messages: tuple[str, str]) -> str:
    hf_tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    hf_tokenizer.chat_template = template
    tokenizer = Tokenizer(hf_tokenizer)
    try:
        chat = Chat([Message(*each) for each in messages], add_generation_prompt=False)
        return tokenizer.decode(asyncio.run(tokenizer.encode_chat(chat)), skip_special_tokens=False)
    finally:
        tokenizer.close()


BEGINNING = [("system", "S"), ("user", "a"), ("system", "T"), ("user", "b")]
CHAT = [*BEGINNING, ("assistant", "c"), ("system", "U"), ("user", "d")]


def test_a_template_that_takes_them_gets_them() -> None:
    assert rendered(WRITE, *CHAT) == "<system>S<user>a<system>T<user>b<assistant>c<system>U<user>d"


@pytest.mark.parametrize("template", [REFUSE + WRITE.removeprefix("{% for m in messages %}"), ALTERNATE + WRITE])
def test_for_other_templates_they_are_texts_of_the_user(template: str) -> None:
    assert rendered(template, *CHAT) == "<system>S<user>a\nT\nb<assistant>c<user>U\nd"
    assert rendered(template, ("user", "a"), ("assistant", "b"), ("system", "T")) == "<user>a<assistant>b<user>T"
    assert rendered(template, ("system", "S"), ("user", "a")) == "<system>S<user>a"


def test_separate_texts_of_the_user_stay_separate() -> None:
    template = REFUSE + WRITE.removeprefix("{% for m in messages %}")
    assert rendered(template, ("user", "a"), ("user", "b"), ("assistant", "c"), ("system", "T")) == (
        "<user>a<user>b<assistant>c<user>T"
    )
