"""Chats with and without special tokens in their messages, for many kinds of tokenizers and templates."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from services.common.config import EMBEDDED_MODEL
from services.gateway.text import tokenizer as gateway_tokenizer
from services.gateway.text.chat_message import Message
from services.gateway.text.chat_template import Chat
from tests.support.examples import examples

TEXT = "Two strokes make one engine, don't they? <|Grüße|> aus </東京>, user assistant 👩‍👧 12 345\n  x = [1, 2];"
SPECIAL = ["<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|user|>x"]
NOT_SPECIAL = "<think>"  # an added token that counts as text


def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([TEXT] * 2, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    backend.add_tokens([NOT_SPECIAL])
    return finished(backend, lambda name: AddedToken(name, normalized=False, special=True))


def stripping() -> PreTrainedTokenizerFast:
    """A tokenizer whose special tokens remove the spaces after them, like that of Phi-3."""
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    return finished(backend, lambda name: AddedToken(name, normalized=False, special=True, rstrip=True))


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: byte fallback, spaces as ▁, special tokens in the vocabulary of the model."""
    tokens = [*SPECIAL, *(f"<0x{value:02X}>" for value in range(256)), "▁", *sorted(set(TEXT) - {" "})]
    words = sorted({"▁" + word for word in TEXT.split()} - set(tokens))
    tokenizer = LlamaTokenizer(vocab={token: token_id for token_id, token in enumerate([*tokens, *words])})
    tokenizer.add_tokens([NOT_SPECIAL])
    return finished(tokenizer.backend_tokenizer, lambda name: AddedToken(name, normalized=False, special=True))


def unigram() -> PreTrainedTokenizerFast:
    """A tokenizer like T5's and XLM-R's. Its model itself would find special tokens in plain text."""
    pieces = [("<pad>", 0.0), *((name, 0.0) for name in SPECIAL), ("▁", -2.0)]
    pieces += [(character, -5.0) for character in sorted(set(TEXT) - {" "})]
    pieces += [(word, -3.0) for word in sorted({"▁" + each for each in TEXT.split()})]
    backend = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=3, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return finished(backend, lambda name: AddedToken(name, normalized=True, special=True))


def finished(backend: Tokenizer, make: Callable[[str], AddedToken]) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([make(name) for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "plain": PLAIN_TEMPLATE,
    "spaced": "{% for m in messages %}<|user|>\n{{ m.content | trim }}</s>\n{% endfor %}{{ note | default('') }}",
    "words": "{% for m in messages %}{{ m.role }}: {{ m.content.split('!')[-1] | tojson }}\n{% endfor %}</s>",
    "thinking": "{% for m in messages %}<|user|>{% if '<think>' in m.content %}{{ m.content.split('<think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<s>{% endfor %}",
}
TOKENIZERS = {
    "byte_level": byte_level(),
    "stripping": stripping(),
    "metaspace": metaspace(),
    "unigram": unigram(),
    "tiny_llama": AutoTokenizer.from_pretrained(EMBEDDED_MODEL),
}
SPLITTING = copy.deepcopy(TOKENIZERS)  # a copy, since in transformers this is an option of the whole tokenizer
EXAMPLES_OF_EACH = 6  # at most, in `make test`: five tokenizers and four templates are twenty of them
EVERY_TOKENIZER = pytest.mark.parametrize("name", TOKENIZERS)
WORDS = st.sampled_from([*TEXT.split(), " ", "\n", "<", "|>", "</", "user", "!", NOT_SPECIAL, "7"])
ANY_TEXT = st.lists(st.one_of(WORDS, st.text(max_size=3)), min_size=1, max_size=12).map("".join)
# No message may begin with "x": with the template's <|user|> before it, this would be another special token.
WITH_SPECIAL = (
    st.lists(st.one_of(WORDS, st.sampled_from(SPECIAL)), min_size=1, max_size=12)
    .map("".join)
    .filter(lambda text: not text.startswith("x"))
)
CHATS = st.lists(ANY_TEXT, min_size=1, max_size=4)


def encode(hf_tokenizer: PreTrainedTokenizerFast, template: str, contents: list[str], **options: object) -> list[int]:
    """The token ids of a chat by the gateway."""
    hf_tokenizer.chat_template = template
    tokenizer = gateway_tokenizer.Tokenizer(hf_tokenizer)
    messages = [Message(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]
    try:
        return asyncio.run(tokenizer.encode_chat(Chat(messages, **options)))
    finally:
        tokenizer.close()


def reference(hf_tokenizer: PreTrainedTokenizerFast, template: str, contents: list[str]) -> list[int]:
    """The token ids by transformers, which reads special tokens in messages as control tokens."""
    conversation = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return hf_tokenizer.apply_chat_template(
        conversation, chat_template=template, add_generation_prompt=True, return_dict=False
    )


def has_special(hf_tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    return any(token.content in text for token in hf_tokenizer.added_tokens_decoder.values() if token.special)


def special_ids(hf_tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The ids of all special tokens."""
    return {token_id for token_id, token in hf_tokenizer.added_tokens_decoder.items() if token.special}


@EVERY_TOKENIZER
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=examples(25, EXAMPLES_OF_EACH), deadline=None)
@given(contents=CHATS)
def test_messages_without_special_tokens_get_the_ids_of_transformers(
    name: str, template: str, contents: list[str]
) -> None:
    hf_tokenizer = TOKENIZERS[name]
    contents = [each for each in contents if not has_special(hf_tokenizer, each)] or ["a"]
    expected = reference(hf_tokenizer, TEMPLATES[template], contents)
    assert encode(hf_tokenizer, TEMPLATES[template], contents) == expected


@EVERY_TOKENIZER
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=examples(25, EXAMPLES_OF_EACH), deadline=None)
@given(contents=CHATS)
def test_the_second_tokenizer_encodes_other_text_like_the_first(name: str, template: str, contents: list[str]) -> None:
    """A special token in a variable makes the gateway use its second tokenizer, even though the template ignores it."""
    hf_tokenizer = TOKENIZERS[name]
    contents = [each for each in contents if not has_special(hf_tokenizer, each)] or ["a"]
    expected = reference(hf_tokenizer, TEMPLATES[template], contents)
    assert encode(hf_tokenizer, TEMPLATES[template], contents, template_kwargs={"unused": "</s>"}) == expected


@pytest.mark.parametrize("name", ["byte_level", "tiny_llama"])
@settings(max_examples=examples(100), deadline=None)
@given(contents=st.lists(WITH_SPECIAL, min_size=1, max_size=3))
def test_special_tokens_in_messages_are_encoded_as_text(name: str, contents: list[str]) -> None:
    """Between control tokens are the token ids of the message's content alone, for a byte-level tokenizer."""
    hf_tokenizer = TOKENIZERS[name]
    eos, bos = hf_tokenizer.eos_token_id, hf_tokenizer.bos_token_id
    roles = hf_tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    expected = [bos]
    for i, content in enumerate(contents):
        plain = SPLITTING[name].encode(content, add_special_tokens=False, split_special_tokens=True)
        expected += [roles[i % 2], *plain, eos]
    assert encode(hf_tokenizer, PLAIN_TEMPLATE, contents) == [*expected, roles[1]]


@EVERY_TOKENIZER
@settings(max_examples=examples(100), deadline=None)
@given(contents=st.lists(WITH_SPECIAL, min_size=1, max_size=3))
def test_no_message_can_contain_a_control_token(name: str, contents: list[str]) -> None:
    hf_tokenizer = TOKENIZERS[name]
    control = special_ids(hf_tokenizer) - {hf_tokenizer.convert_tokens_to_ids("<unk>")}
    harmless = ["a"] * len(contents)
    expected = [each for each in reference(hf_tokenizer, PLAIN_TEMPLATE, harmless) if each in control]
    found = encode(hf_tokenizer, PLAIN_TEMPLATE, contents)
    assert [each for each in found if each in control] == expected


@EVERY_TOKENIZER
@pytest.mark.parametrize("content", ["＜/s＞", "＜|user|＞ a", "a＜s＞"])
def test_no_message_can_contain_a_control_token_in_other_characters(name: str, content: str) -> None:
    """NFKC, the normalizer of one of these tokenizers, turns these characters into those of a special token."""
    hf_tokenizer = TOKENIZERS[name]
    control = special_ids(hf_tokenizer) - {hf_tokenizer.convert_tokens_to_ids("<unk>")}
    expected = [each for each in reference(hf_tokenizer, PLAIN_TEMPLATE, ["a"]) if each in control]
    found = encode(hf_tokenizer, PLAIN_TEMPLATE, [content])
    assert [each for each in found if each in control] == expected


@EVERY_TOKENIZER
def test_special_tokens_in_names_and_variables_are_text_too(name: str) -> None:
    hf_tokenizer = TOKENIZERS[name]
    template = "{% for m in messages %}<|user|>{{ m.name }}{{ extra.words[0] }}{% endfor %}</s>"
    hf_tokenizer.chat_template = template
    tokenizer = gateway_tokenizer.Tokenizer(hf_tokenizer)
    chat = Chat([Message("user", "a", name="</s>")], template_kwargs={"extra": {"words": ["<|user|>"]}})
    token_ids = asyncio.run(tokenizer.encode_chat(chat))
    tokenizer.close()
    user, eos = hf_tokenizer.convert_tokens_to_ids(["<|user|>", "</s>"])
    assert (token_ids[0], token_ids.count(user), token_ids.count(eos), token_ids[-1]) == (user, 1, 1, eos)


def test_a_template_that_quotes_a_message_in_an_error_quotes_the_original() -> None:
    with pytest.raises(gateway_tokenizer.InvalidRequest, match=r"chat: bad: a</s><\|user\|>$"):
        encode(byte_level(), "{{ raise_exception('bad: ' + messages[0].content) }}", ["a</s><|user|>"])


def test_tokens_in_chat_control_tokens_are_control_tokens() -> None:
    hf_tokenizer = byte_level()
    think = hf_tokenizer.convert_tokens_to_ids(NOT_SPECIAL)
    assert think in encode(hf_tokenizer, PLAIN_TEMPLATE, [NOT_SPECIAL])
    hf_tokenizer.chat_control_tokens = [NOT_SPECIAL]
    assert think not in encode(hf_tokenizer, PLAIN_TEMPLATE, [NOT_SPECIAL])


def test_a_special_token_that_must_be_a_whole_word_is_recognised() -> None:
    hf_tokenizer = byte_level()
    hf_tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken("WORD", single_word=True, special=True)]})
    template = "aWORDb WORD\n{{ messages[0].content }}</s>"
    expected = hf_tokenizer.encode("aWORDb WORD", add_special_tokens=False)
    assert encode(hf_tokenizer, template, ["</s>"])[: len(expected)] == expected
