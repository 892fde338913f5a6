"""The random generator, compared with published vectors and a textbook version, and the bits of each token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.sampling.philox import token_words

WORDS_64 = st.integers(0, 2**64 - 1)
# Multipliers and key increments from the paper.
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def textbook_philox(counter: list[int], key: list[int]) -> list[int]:
    """One block of Philox4x64-10 in Python integers, as described in the paper."""
    modulus = 2**64
    for round_index in range(10):
        key_0, key_1 = ((k + round_index * step) % modulus for k, step in zip(key, KEY_STEPS, strict=True))
        high_0, low_0 = divmod(counter[0] * MULTIPLIERS[0], modulus)
        high_1, low_1 = divmod(counter[2] * MULTIPLIERS[1], modulus)
        counter = [high_1 ^ counter[1] ^ key_0, low_1, high_0 ^ counter[3] ^ key_1, low_0]
    return counter


def textbook_words(seed: int, position: int, vocab_size: int) -> list[int]:
    blocks = [textbook_philox([i + 1, position, 0, 0], [seed, 0]) for i in range(-(-vocab_size // 8))]
    halves = [half for block in blocks for word in block for half in (word % 2**32, word // 2**32)]
    return halves[:vocab_size]


def words_of(seed: int, position: int, vocab_size: int) -> list[int]:
    return token_words(np.array([seed], np.uint64), np.array([position], np.uint64), vocab_size)[0].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "0000000000000000 0000000000000000 0000000000000000 0000000000000000",
            "0000000000000000 0000000000000000",
            "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b",
        ),
        (
            "ffffffffffffffff ffffffffffffffff ffffffffffffffff ffffffffffffffff",
            "ffffffffffffffff ffffffffffffffff",
            "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
        ),
        (
            "243f6a8885a308d3 13198a2e03707344 a4093822299f31d0 082efa98ec4e6c89",
            "452821e638d01377 be5466cf34e90c6c",
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_textbook_gives_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    assert textbook_philox(parse_words(counter), parse_words(key)) == parse_words(expected)


@settings(deadline=None)
@given(seed=WORDS_64, position=WORDS_64, vocab_size=st.integers(1, 70))
def test_tokens_get_the_halves_of_the_textbook_words_in_order(seed: int, position: int, vocab_size: int) -> None:
    assert words_of(seed, position, vocab_size) == textbook_words(seed, position, vocab_size)


@settings(deadline=None)
@given(keys=st.lists(st.tuples(WORDS_64, WORDS_64), min_size=1, max_size=6), vocab_size=st.integers(1, 70))
def test_rows_do_not_depend_on_other_rows_or_on_the_vocabulary(keys: list[tuple[int, int]], vocab_size: int) -> None:
    seeds, positions = np.array(keys, dtype=np.uint64).T
    words = token_words(seeds, positions, vocab_size)
    assert words.dtype == np.uint32
    assert words.tolist() == [words_of(*key, 80)[:vocab_size] for key in keys]


def test_words_fill_their_range_evenly() -> None:
    words = token_words(np.full(100, 7, dtype=np.uint64), np.arange(100, dtype=np.uint64), 1001)
    counts = np.histogram(words, bins=100, range=(0, 2**32))[0]
    chi_square = ((counts - 1001) ** 2 / 1001).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom: outside with probability below 1e-4


def parse_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]
