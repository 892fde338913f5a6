"""Templates that fail, never end or write too much; options, compared with those of `apply_chat_template`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import jinja2
import pytest
from structlog.testing import capture_logs
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.common.config import EMBEDDED_MODEL
from services.common.errors import InvalidRequest
from services.gateway.text import chat_template
from services.gateway.text.chat_message import Message
from services.gateway.text.chat_template import Chat
from services.gateway.text.parsing import ChatFormats
from services.gateway.text.read_chat import MAX_TEMPLATE_KWARGS_BYTES, read_chat
from services.gateway.text.tokenizer import Tokenizer
from services.pb import gateway_pb2

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think is defined %}{{ think }}{% endif %}{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}"


@pytest.fixture
def hf_tokenizer() -> PreTrainedTokenizerFast:
    hf_tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    hf_tokenizer.chat_template = TEMPLATE
    return hf_tokenizer


def encode(hf_tokenizer: PreTrainedTokenizerFast, *messages: Message, **options: Any) -> list[int]:
    tokenizer = Tokenizer(hf_tokenizer)
    tokenizer.compile_template("model")
    try:
        return asyncio.run(tokenizer.encode_chat(Chat(messages or [Message("user", "Hi")], **options)))
    finally:
        tokenizer.close()


@pytest.mark.parametrize("is_named", [False, True])
def test_a_template_is_compiled_before_the_first_chat(
    hf_tokenizer: PreTrainedTokenizerFast, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = f"{TEMPLATE}{{# which no other test has, {is_named} #}}"
    hf_tokenizer.chat_template = {"default": template, "rag": "{{ 1 }}"} if is_named else template
    tokenizer, compiled = Tokenizer(hf_tokenizer), list[str]()
    compile_now = jinja2.Environment.compile

    def count(environment: jinja2.Environment, source: str, *arguments: Any, **options: Any) -> Any:
        compiled.append(source)
        return compile_now(environment, source, *arguments, **options)

    monkeypatch.setattr(jinja2.Environment, "compile", count)
    try:
        tokenizer.compile_template("model")
        assert template in compiled
        compiled.clear()
        assert asyncio.run(tokenizer.encode_chat(Chat([Message("user", "Hi")])))
        assert not compiled
    finally:
        tokenizer.close()


@pytest.mark.parametrize("tag", ["for m in messages", "if messages"])
def test_a_template_too_deep_for_pythons_compiler_is_refused_by_chats_and_not_at_the_start(
    hf_tokenizer: PreTrainedTokenizerFast, tag: str
) -> None:
    hf_tokenizer.chat_template = f"{{% {tag} %}}" * 120 + f"{{% end{tag.split()[0]} %}}" * 120
    with pytest.raises(InvalidRequest, match="too many"):
        encode(hf_tokenizer)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "TemplateSyntaxError: Expected an expression, got 'end of statement block'"),
        ("{{ raise_exception('of a chat') }}", None),
    ],
)
def test_a_template_that_cannot_be_compiled_is_logged_with_its_file(
    hf_tokenizer: PreTrainedTokenizerFast, template: str, reason: str | None
) -> None:
    hf_tokenizer.chat_template = {"default": TEMPLATE, "rag": template}
    tokenizer = Tokenizer(hf_tokenizer)
    with capture_logs() as events:
        tokenizer.compile_template("model/chat_template.jinja")
    tokenizer.close()
    found = [(event["source"], event["name"], event["reason"]) for event in events]
    assert found == ([] if reason is None else [("model/chat_template.jinja", "rag", reason)])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('only in turns') }}", "refuses this chat: only in turns"),
        ("{{ messages[0].content + 1 }}", "fails on this chat: TypeError: can only concatenate str"),
        ("{{ messages[0].nothing.more }}", "refuses this chat: .*has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "fails on this chat: ZeroDivisionError"),
        ("{{ 10.0 ** 999 }}", "fails on this chat: OverflowError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "fails on this chat: RecursionError"),
        ("{{ messages[0]['content'].__class__.__base__ }}", "refuses this chat: access to attribute '__class__'"),
        ("{{ range(10 ** 9) }}", "fails on this chat: OverflowError: Range too big"),
        ("{% if %}", "refuses this chat: Expected an expression"),
        ("{{ 'x' * 10 ** 14 }}", "fails on this chat: MemoryError"),
        ("{{ raise_exception('x' * 5000) }}", "x{300}…$"),
        (HUGE, "refuses this chat: it makes more than 16777216 characters"),
    ],
)
def test_a_failing_template_refuses_the_request_with_the_reason(
    hf_tokenizer: PreTrainedTokenizerFast, template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 1.0)
    hf_tokenizer.chat_template = template
    with pytest.raises(InvalidRequest, match=words) as refused:
        encode(hf_tokenizer, Message("user", "Hello! " * 100))
    assert refused.value.param == "messages"


def test_an_endless_template_is_stopped_and_does_not_block_the_event_loop(
    hf_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.5)
    hf_tokenizer.chat_template = ENDLESS
    tokenizer = Tokenizer(hf_tokenizer)

    async def longest_silence() -> float:
        chats = [asyncio.create_task(tokenizer.encode_chat(Chat([Message("user", "Hi")]))) for _ in range(4)]
        longest, last = 0.0, time.process_time()  # the clock would also count what other processes do
        while not all(chat.done() for chat in chats):
            await asyncio.sleep(0.001)
            now = time.process_time()
            longest, last = max(longest, now - last), now
        for chat in chats:
            with pytest.raises(InvalidRequest, match=r"takes longer than 0.5 s"):
                chat.result()
        return longest

    started = time.process_time()
    assert asyncio.run(longest_silence()) < 0.3
    assert time.process_time() - started < 10
    hf_tokenizer.chat_template = "{{ messages[0].content }}"
    assert encode(hf_tokenizer) == hf_tokenizer("Hi", add_special_tokens=False)["input_ids"], "no thread is free again"
    tokenizer.close()


CHAT = [Message("user", "Who?"), Message("assistant", "I am  ")]


@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True, "continue_final_message": False},
        {"add_generation_prompt": False, "continue_final_message": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
@pytest.mark.parametrize("kwargs", [{}, {"think": 512}, {"think": {"deep": [1.5, True, None, "日本"]}}])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_options_have_the_same_effect_as_in_transformers(
    hf_tokenizer: PreTrainedTokenizerFast, options: dict[str, bool], kwargs: dict[str, Any], trim: str
) -> None:
    hf_tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content" + trim)
    expected = hf_tokenizer.apply_chat_template(
        [message.fields() for message in CHAT], return_dict=False, **options, **kwargs
    )
    assert encode(hf_tokenizer, *CHAT, **options, template_kwargs=kwargs) == expected


def test_a_message_that_contains_a_special_token_can_be_continued(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [Message("user", "Who?"), Message("assistant", "I </s> am")]
    token_ids = encode(hf_tokenizer, *messages, add_generation_prompt=False, continue_final_message=True)
    assert hf_tokenizer.decode(token_ids).endswith("I </s> am")
    assert token_ids.count(hf_tokenizer.eos_token_id) == 1, "only the one after the first message"


def test_contradicting_options_are_refused(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidRequest, match="both `continue_final_message` and `add_generation_prompt` to True"):
        encode(hf_tokenizer, *CHAT, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "bos_token"]
)
def test_variables_of_the_server_cannot_be_replaced(hf_tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs has '{name}'") as refused:
        encode(hf_tokenizer, template_kwargs={name: "x"})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "not a JSON object"),
        ('{"a": ', "not JSON: EOF"),
        ('{"a": NaN}', "not JSON"),
        ('{"a": ' + "[" * 8 + "]" * 8 + "}", "nested 9 deep, at most 8 allowed"),
        ('{"a": ' + "[" * 1000 + "]" * 1000 + "}", "not JSON: recursion limit"),
        ('{"a": "' + "x" * MAX_TEMPLATE_KWARGS_BYTES + '"}', "has 16393 bytes, at most 16384 allowed"),
    ],
)
def test_variables_must_be_json_of_limited_size(text: str, words: str) -> None:
    chat = gateway_pb2.Chat(messages=[{"role": "user", "content": "a"}], chat_template_kwargs=text)
    with pytest.raises(InvalidRequest, match=words):
        read_chat(chat, ChatFormats())


def test_unset_options_take_the_defaults_of_the_proto() -> None:
    def read(**options: bool) -> tuple[bool, bool]:
        chat = read_chat(gateway_pb2.Chat(messages=[{"role": "user", "content": "a"}], **options), ChatFormats())
        return chat.add_generation_prompt, chat.continue_final_message

    assert read() == (True, False)
    assert read(continue_final_message=True) == (False, True)
    assert read(add_generation_prompt=False) == (False, False)
    assert read(add_generation_prompt=True, continue_final_message=True) == (True, True), "which is refused later"
