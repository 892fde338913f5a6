"""Philox4x64-10, a counter-based random number generator: 32 random bits for each (seed, position, token).

It has no state: the bits do not depend on when, where and with which other requests they are drawn, so a request gets
the same tokens again after a preemption or a crash. On the host this is numpy's generator, which follows the paper.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11, 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Philox  # now: numpy would import it when it is first used, within a step

TOKENS_PER_BLOCK = 8  # a block of the generator is four words of 64 bits


def token_words(seeds: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """32 random bits for each row and token.

    Token t gets half t % 2 (the low half first) of word t % 8 // 2 of the block whose counter is
    (t // 8 + 1, position, 0, 0) and whose key is (seed, 0).

    seeds, positions: np.uint64 [r]
    returns: np.uint32 [r, vocab_size]
    """
    num_words = -(-vocab_size // 2)
    words = np.empty((len(seeds), num_words), dtype="<u8")
    generator = Philox(key=np.zeros(2, dtype=np.uint64), counter=np.zeros(4, dtype=np.uint64))
    state = generator.state  # of a new generator; setting it takes a tenth of the time of making one
    key, counter = state["state"]["key"], state["state"]["counter"]
    for row, seed, position in zip(words, seeds.tolist(), positions.tolist(), strict=True):
        key[0], counter[1] = seed, position
        generator.state = state
        row[:] = generator.random_raw(num_words)  # the counter is incremented before the first block
    return words.view("<u4")[:, :vocab_size]
