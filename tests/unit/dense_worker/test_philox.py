"""The generator against published vectors and against numpy's own Philox, by way of a textbook one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.philox import philox4x32, uniform

WORDS_32 = st.integers(0, 2**32 - 1)
WORDS_64 = st.integers(0, 2**64 - 1)
# Multipliers and key steps by word size, from the paper.
CONSTANTS = {
    32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
    64: ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
}


def textbook_philox(counter: list[int], key: list[int], word_bits: int) -> list[int]:
    """One block in Python integers, word by word as the paper writes it; any word size."""
    (multiplier_0, multiplier_1), key_steps = CONSTANTS[word_bits]
    modulus = 2**word_bits
    for round_index in range(10):
        key_0, key_1 = ((k + round_index * step) % modulus for k, step in zip(key, key_steps, strict=True))
        high_0, low_0 = divmod(counter[0] * multiplier_0, modulus)
        high_1, low_1 = divmod(counter[2] * multiplier_1, modulus)
        counter = [high_1 ^ counter[1] ^ key_0, low_1, high_0 ^ counter[3] ^ key_1, low_0]
    return counter


@settings(deadline=None)
@given(counter=st.lists(WORDS_64, min_size=4, max_size=4), key=st.lists(WORDS_64, min_size=2, max_size=2))
def test_textbook_equals_numpy_at_64_bits(counter: list[int], key: list[int]) -> None:
    before = (sum(word << (64 * i) for i, word in enumerate(counter)) - 1) % 2**256  # numpy counts up first
    generator = np.random.Philox(
        counter=np.array([(before >> (64 * i)) % 2**64 for i in range(4)], dtype=np.uint64),
        key=np.array(key, dtype=np.uint64),
    )
    assert textbook_philox(counter, key, 64) == [int(word) for word in generator.random_raw(4)]


@settings(deadline=None)
@given(
    blocks=st.lists(st.lists(WORDS_32, min_size=6, max_size=6), min_size=1, max_size=5),
)
def test_vectorised_equals_textbook_at_32_bits(blocks: list[list[int]]) -> None:
    words = np.array(blocks, dtype=np.uint64).T
    expected = [textbook_philox(block[:4], block[4:], 32) for block in blocks]
    assert philox4x32(words[:4], words[4:]).T.tolist() == expected


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    words = philox4x32(parse_words(counter), parse_words(key))
    assert words.tolist() == parse_words(expected).tolist()


@settings(deadline=None)
@given(seed=WORDS_64, position=WORDS_64)
def test_uniform_is_the_first_53_bits_of_its_block(seed: int, position: int) -> None:
    block = textbook_philox([position % 2**32, position >> 32, 0, 0], [seed % 2**32, seed >> 32], 32)
    drawn = uniform(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.uint64))
    assert drawn.dtype == np.float64
    assert drawn[0] == (block[0] * 2**32 + block[1]) // 2**11 / 2**53
    assert 0.0 <= drawn[0] < 1.0


def test_uniform_fills_the_interval_evenly() -> None:
    drawn = uniform(np.full(100_000, 7, dtype=np.uint64), np.arange(100_000, dtype=np.uint64))
    counts = np.histogram(drawn, bins=100, range=(0.0, 1.0))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom: outside with probability below 1e-4


def parse_words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)
