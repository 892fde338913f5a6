"""The token ids of prompts and chats, compared with those of transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.common.config import EMBEDDED_MODEL
from services.common.errors import InvalidRequest, ModelError
from services.gateway.text.chat_message import Message
from services.gateway.text.chat_template import Chat
from services.gateway.text.tokenizer import MAX_INLINE_CHARACTERS, Tokenizer, load_tokenizer

TEXTS = ["San Francisco is a", "  two  spaces\n", "东京は日本の首都です。🙂", "e\u0301", "</s>"]
LONG_TEXT = "Tokyo is the capital of Japan. " * MAX_INLINE_CHARACTERS


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(EMBEDDED_MODEL)


def copy_tokenizer(path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(EMBEDDED_MODEL / name, path)
    return path


@pytest.mark.parametrize("text", [*TEXTS, LONG_TEXT], ids=range(len(TEXTS) + 1))
def test_a_prompt_gets_the_ids_of_transformers(
    text: str, tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    assert asyncio.run(tokenizer.encode(text)) == reference(text)["input_ids"]


@pytest.mark.parametrize("length", [1, MAX_INLINE_CHARACTERS])
def test_a_chat_gets_the_ids_of_transformers(
    length: int, tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    chat = [Message("system", "Be brief."), Message("user", "héllo" * length)]
    expected = reference.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in chat],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert asyncio.run(tokenizer.encode_chat(Chat(chat))) == expected


async def count_turns(work: Awaitable[object]) -> int:
    """The number of turns of the event loop while `work` runs."""
    task = asyncio.ensure_future(work)
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    await task
    return num_turns


def test_long_texts_leave_the_event_loop_free(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    token_ids = reference(LONG_TEXT)["input_ids"]
    words = [f"{i}{'x' * 250}" for i in range(64)]

    async def test() -> None:
        assert await count_turns(tokenizer.encode(LONG_TEXT)) > 1
        assert await count_turns(tokenizer.encode_chat(Chat([Message("user", LONG_TEXT)]))) > 1
        assert await count_turns(tokenizer.word_token_ids(words)) > 1
        assert await count_turns(tokenizer.write_text(token_ids, skip_special_tokens=True)) > 1
        assert await count_turns(tokenizer.write_tokens(token_ids)) > 1

    asyncio.run(test())


def test_the_token_ids_of_a_word_are_given_with_and_without_a_space_before(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    expected = [reference.encode(text, add_special_tokens=False) for text in ("one", " one", " two", "日本", " 日本")]
    found = asyncio.run(tokenizer.word_token_ids(["one", " two", "日本", "one"]))
    assert [list(each) for each in found] == expected


def test_names_of_tokens_are_those_of_the_tokenizer(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    token_ids = reference(TEXTS[2])["input_ids"]
    assert tokenizer.tokens(token_ids) == reference.convert_ids_to_tokens(token_ids)
    assert tokenizer.tokens([len(reference) + 1]) == [""]


def test_a_role_that_the_template_does_not_know_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="oracle"):
        asyncio.run(tokenizer.encode_chat(Chat([Message("oracle", "hi")])))


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        asyncio.run(load_tokenizer(copy_tokenizer(tmp_path)).encode_chat(Chat([Message("user", "hi")])))


def test_a_truncation_saved_with_the_tokenizer_is_ignored(tmp_path: Path) -> None:
    file = copy_tokenizer(tmp_path) / "tokenizer.json"
    saved = json.loads(file.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(saved))
    expected = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)(TEXTS[0])["input_ids"]
    assert len(expected) > 3
    assert asyncio.run(load_tokenizer(tmp_path).encode(TEXTS[0])) == expected


def test_a_name_reaches_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name is defined }}: {{ m.content }}{% endfor %}"
    (copy_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "name": "Ann", "content": "Hi"}, {"role": "user", "content": "Ho"}]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert asyncio.run(load_tokenizer(tmp_path).encode_chat(Chat([Message(**each) for each in chat]))) == expected


def test_custom_code_in_a_directory_is_never_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "n")
    file = copy_tokenizer(tmp_path) / "tokenizer_config.json"
    custom = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | custom))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load_tokenizer(tmp_path)  # tokenizer.json takes the place of the code
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="code"):
        load_tokenizer(tmp_path)
    assert not questions and not (tmp_path / "ran").exists()


def test_a_damaged_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    (copy_tokenizer(tmp_path) / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_a_directory_without_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_dummy_models_without_tokenizer_get_one_token_per_byte(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, is_optional=True)
    for text in TEXTS:
        token_ids = asyncio.run(tokenizer.encode(text))
        assert len(token_ids) == len(text.encode())
        assert max(token_ids) < 256
        assert tokenizer.hf_tokenizer.decode(token_ids) == text
