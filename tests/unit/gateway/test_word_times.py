"""When tokens are said and which of them are words, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from services.gateway.sound.word_times import split_words, token_steps
from tests.support.speech import byte_tokenizer

TEXTS = [
    " The quick (brown) fox, he said: \"No!\" and 'left'.",
    "Tagged [as] -such- … ¿Qué? ¡Sí! naïve café",
    " 你好，世界。 “これ” は",
    "a  b ( ( c ) ) . , \" ",
    "🙂🙂 ok 🙂.",
    "-",
    "",
]


@pytest.mark.parametrize(("num_tokens", "num_steps"), [(1, 1), (1, 9), (6, 50), (9, 4), (40, 130)])
def test_steps_are_those_of_the_cheapest_path_of_transformers(num_tokens: int, num_steps: int) -> None:
    for seed in range(8):
        weights = np.random.default_rng(seed).standard_normal((num_tokens, num_steps)).astype(np.float32)
        tokens, steps = _dynamic_time_warping(-weights.astype(np.float64))
        expected = steps[np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)]
        assert token_steps(weights).tolist() == expected.tolist()


def test_steps_of_equal_weights_are_possible_ones() -> None:
    steps = token_steps(np.zeros((5, 20), np.float32))
    assert steps[0] == 0 and (np.diff(steps) >= 0).all() and steps[-1] < 20


@pytest.mark.parametrize("language", ["english", "japanese"])
@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_transformers(text: str, language: str) -> None:
    decode, token_ids = decoder(), list(text.encode())
    truth = SimpleNamespace(
        decode=lambda ids, decode_with_timestamps: decode(ids), eos_token_id=256, language=language
    )
    texts, _, indexes = _combine_tokens_into_words(truth, token_ids, language)
    expected = [(each.strip(), places[0], places[-1]) for each, places in zip(texts, indexes, strict=True)]
    found = split_words(decode, token_ids, has_spaces=language == "english")
    assert found == [each for each in expected if each[0]]


def test_the_bytes_of_half_a_character_are_no_word_of_their_own() -> None:
    found = split_words(decoder(), list(" né".encode())[:-1], has_spaces=True)
    assert len(found) == 1 and found[0].text.startswith("n")


def decoder() -> Callable[[list[int]], str]:
    """Of tokens that are bytes, with the bytes' values as ids."""
    tokenizer = byte_tokenizer([bytes([each]) for each in range(256)])
    return lambda token_ids: tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
