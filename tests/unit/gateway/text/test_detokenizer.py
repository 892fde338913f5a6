"""Streamed text, compared with `decode` of the whole sequence, for many kinds of tokenizers and any token ids."""

from __future__ import annotations

import random
import re
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.gateway.text.detokenizer import Detokenizer
from tests.support.examples import examples

TINY_LLAMA = Path(__file__).parents[4] / "deploy" / "models" / "tiny-llama"
REPLACEMENT = "\ufffd"
TEXT = (
    "Two strokes make one engine, don't they? ##Grüße aus 東京 und 北京, ¿qué tal? 👩‍👩‍👧 🚀 \ufffd\t\n"
    "  x = [1, 2];"
)
SPECIAL_TOKENS = ["<s>", "</s>", "<unk>"]


def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    backend.train_from_iterator([TEXT], trainer)
    backend.add_tokens(["<think>", AddedToken("two words", normalized=False), "東京"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def llama_2() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: a token for every byte, and words that include the space before them."""
    tokens = [*SPECIAL_TOKENS, *(f"<0x{value:02X}>" for value in range(256))]
    words = {"▁" + word for word in TEXT.split()}
    tokens += sorted({"▁", "▁▁", "▁▁▁▁", "a▁b", *TEXT.replace(" ", "")} | words)
    tokenizer = LlamaTokenizer(vocab={token: token_id for token_id, token in enumerate(tokens)})
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def gemma() -> PreTrainedTokenizerFast:
    tokenizer = llama_2()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def metaspace() -> PreTrainedTokenizerFast:
    words = ["▁", "▁▁", "a▁b", "<unk>", *TEXT.split(), *("▁" + word for word in TEXT.split())]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in dict.fromkeys(words)], unk_id=3))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_piece() -> PreTrainedTokenizerFast:
    pieces = [*SPECIAL_TOKENS, "##", ".", "'s", "##n't", *TEXT.split()]
    pieces += ["##" + word for word in TEXT.split()]
    vocab = {piece: piece_id for piece_id, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)


def word_suffixes() -> PreTrainedTokenizerFast:
    """A decoder that writes the space after a word only when another token follows."""
    pieces = [*SPECIAL_TOKENS, *TEXT.split(), *(word + "</w>" for word in TEXT.split())]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, []))
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class OwnDecodeTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that changes the text in an unpredictable way."""

    def _decode(self, *args, **kwargs) -> str:  # noqa: ANN002, ANN003
        return super()._decode(*args, **kwargs).replace("engine", "ENGINE")


def own_decode() -> PreTrainedTokenizerFast:
    return OwnDecodeTokenizer(tokenizer_object=byte_level().backend_tokenizer)


BYTE_FALLBACK = {"llama_2": llama_2(), "gemma": gemma()}
EXACT = {
    "byte_level": byte_level(),
    "tiny_llama": AutoTokenizer.from_pretrained(TINY_LLAMA),
    "metaspace": metaspace(),
    "word_piece": word_piece(),
    "word_suffixes": word_suffixes(),
}
ALL = {**EXACT, **BYTE_FALLBACK, "own_decode": own_decode()}


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool) -> str:
    return tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def decode_with_byte_fallback(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool
) -> str:
    """Like `decode`, but byte tokens that form a character keep it, even next to bytes that form none."""
    joined = b""
    for token in tokenizer.convert_ids_to_tokens(token_ids):
        if token is None or (skip_special_tokens and token in SPECIAL_TOKENS):
            continue
        byte_token = re.fullmatch("<0x(..)>", token)
        joined += bytes.fromhex(byte_token[1]) if byte_token else token.replace("▁", " ").encode()
    text = re.sub("[\udc80-\udcff]", REPLACEMENT, joined.decode(errors="surrogateescape"))
    return text.removeprefix(" ") if tokenizer is BYTE_FALLBACK["llama_2"] else text


def added_text(before: str, after: str) -> str:
    """The part of `after` that `before` lacks. It may complete the last character of `before`."""
    num_common = max(length for length in range(len(before) + 1) if after.startswith(before[:length]))
    return after[num_common:]


def stream(detokenizer: Detokenizer, token_ids: list[int], chunk_lens: list[int]) -> list[str]:
    """The text after each chunk, then the whole text."""
    texts, text, start = [], "", 0
    for chunk_len in [*chunk_lens, len(token_ids)]:
        text += detokenizer.append(token_ids[start : start + chunk_len])
        texts.append(text)
        start += chunk_len
    return [*texts, text + detokenizer.flush()]


def any_ids(tokenizer: PreTrainedTokenizerBase, max_size: int) -> st.SearchStrategy[list[int]]:
    """Any token ids, including some that the tokenizer does not know."""
    return st.lists(st.integers(0, len(tokenizer) + 3), max_size=max_size)


CHUNK_LENS = st.lists(st.integers(0, 3), max_size=30)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans(), chunk_lens=CHUNK_LENS)
def test_any_ids_stream_the_text_that_decode_adds_to_the_prompt(
    name: str, data: st.DataObject, skip_special_tokens: bool, chunk_lens: list[int]
) -> None:
    tokenizer = EXACT[name]
    prompt, output = data.draw(any_ids(tokenizer, 6)), data.draw(any_ids(tokenizer, 30))
    streamed = stream(Detokenizer(tokenizer, prompt, skip_special_tokens), output, chunk_lens)[-1]
    before = decode(tokenizer, prompt, skip_special_tokens)
    assert streamed == added_text(before, decode(tokenizer, prompt + output, skip_special_tokens))


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans(), chunk_lens=CHUNK_LENS)
def test_any_ids_with_byte_fallback_keep_complete_characters(
    name: str, data: st.DataObject, skip_special_tokens: bool, chunk_lens: list[int]
) -> None:
    tokenizer = BYTE_FALLBACK[name]
    prompt, output = data.draw(any_ids(tokenizer, 6)), data.draw(any_ids(tokenizer, 30))
    streamed = stream(Detokenizer(tokenizer, prompt, skip_special_tokens), output, chunk_lens)[-1]
    before = decode_with_byte_fallback(tokenizer, prompt, skip_special_tokens)
    after = decode_with_byte_fallback(tokenizer, prompt + output, skip_special_tokens)
    assert streamed == added_text(before, after)


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans(), chunk_lens=CHUNK_LENS)
def test_byte_tokens_of_whole_characters_stream_the_text_that_decode_adds(
    name: str, data: st.DataObject, skip_special_tokens: bool, chunk_lens: list[int]
) -> None:
    tokenizer = BYTE_FALLBACK[name]
    byte_id = tokenizer.convert_tokens_to_ids("<0x00>")
    whole_character = st.characters(codec="utf-8").map(lambda c: [byte_id + value for value in c.encode()])
    other_ids = [i for i in range(len(tokenizer)) if not byte_id <= i < byte_id + 256]
    parts = st.lists(whole_character | st.sampled_from(other_ids).map(lambda i: [i]), max_size=12)
    prompt, output = (list(chain.from_iterable(data.draw(parts))) for _ in range(2))
    streamed = stream(Detokenizer(tokenizer, prompt, skip_special_tokens), output, chunk_lens)[-1]
    before, after = (decode(tokenizer, ids, skip_special_tokens) for ids in (prompt, prompt + output))
    assert before + streamed == after


@pytest.mark.parametrize("name", ["byte_level", "tiny_llama", "llama_2", "gemma", "metaspace", "own_decode"])
def test_text_streams_token_by_token_without_loss(name: str) -> None:
    tokenizer = ALL[name]
    output = tokenizer.encode(TEXT * 3, add_special_tokens=False)
    prompt = tokenizer.encode("Two strokes", add_special_tokens=False)
    streamed = stream(Detokenizer(tokenizer, prompt), output, [1] * len(output))[-1]
    assert streamed == decode(tokenizer, prompt + output, True).removeprefix(decode(tokenizer, prompt, True))
    assert len(streamed) > 100


@pytest.mark.parametrize("name", ["byte_level", "tiny_llama", "llama_2", "gemma"])
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_only_an_incomplete_character_is_held_back(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    whole_text = decode if name in EXACT else decode_with_byte_fallback
    output = data.draw(any_ids(tokenizer, 20))
    shown_texts = stream(Detokenizer(tokenizer), output, [1] * len(output))
    for length, shown in enumerate(shown_texts[: len(output)], start=1):
        held = whole_text(tokenizer, output[:length], True).removeprefix(shown)
        assert held == REPLACEMENT * len(held)
        assert len(held) <= (1 if name in EXACT else 3)


def test_a_character_of_three_tokens_is_shown_whole() -> None:
    tokenizer = BYTE_FALLBACK["llama_2"]
    detokenizer = Detokenizer(tokenizer)
    byte_ids = tokenizer.convert_tokens_to_ids([f"<0x{value:02X}>" for value in "東".encode()])
    assert [detokenizer.append([token_id]) for token_id in byte_ids] == ["", "", "東"]


@pytest.mark.parametrize("name", ["byte_level", "own_decode", "llama_2"])
def test_run_of_invalid_bytes_is_not_held_back(name: str) -> None:
    tokenizer = ALL[name]
    # The byte 0xA0, with which no character begins.
    token_id = tokenizer.convert_tokens_to_ids("<0xA0>" if name == "llama_2" else "ł")
    assert decode(tokenizer, [token_id], True) == REPLACEMENT
    detokenizer = Detokenizer(tokenizer)
    num_shown = 0
    for num_tokens in range(1, 1000):
        num_shown += len(detokenizer.append([token_id]))
        assert num_tokens - 8 < num_shown <= num_tokens


@pytest.mark.parametrize(
    ("name", "space"), [("llama_2", ""), ("gemma", " "), ("metaspace", ""), ("word_piece", "")]
)
def test_space_between_prompt_and_output_is_kept(name: str, space: str) -> None:
    tokenizer = ALL[name]
    words = ["make", "one"] if name == "word_piece" else ["▁make", "▁one"]
    word_id, prompt_id, skipped_id = tokenizer.convert_tokens_to_ids([*words, "<s>"])
    assert Detokenizer(tokenizer, [prompt_id]).append([word_id]) == " make"
    assert Detokenizer(tokenizer, [prompt_id]).append([skipped_id, word_id]) == " make"
    assert Detokenizer(tokenizer, [skipped_id]).append([skipped_id, word_id]) == space + "make"


@pytest.mark.parametrize("name", ["byte_level", "own_decode"])
@pytest.mark.parametrize(("character", "tokens"), [("東", "æĿ±"), ("🚀", "ðŁļĢ")])
def test_a_character_that_the_prompt_begins_is_shown_if_the_output_completes_it(
    name: str, character: str, tokens: str
) -> None:
    tokenizer = ALL[name]
    letter, *begun, last = tokenizer.convert_tokens_to_ids(["x", *tokens])
    assert tokenizer.decode([*begun, last]) == character
    assert stream(Detokenizer(tokenizer, [letter, *begun]), [last, letter], [1])[-1] == character + "x"
    assert stream(Detokenizer(tokenizer, [letter, *begun]), [letter, letter], [1])[-1] == "xx"
    assert Detokenizer(tokenizer, [letter, *begun]).flush() == ""


def test_the_end_of_a_long_prompt_suffices_as_context() -> None:
    rng = random.Random(0)
    for name, tokenizer in EXACT.items():
        prompt = rng.choices(range(len(tokenizer)), k=5000)
        output = rng.choices(range(len(tokenizer)), k=50)
        streamed = stream(Detokenizer(tokenizer, prompt), output, [])[-1]
        expected = added_text(decode(tokenizer, prompt, True), decode(tokenizer, prompt + output, True))
        assert streamed == expected, name
