"""Philox4x64-10, a counter-based random number generator: 32 random bits for each (seed, position, token).

Without state: the bits are the same whenever, wherever and beside whatever they are drawn, so a request
repeats its tokens after a preemption or a crash. Host side: numpy's own generator, which follows the paper's.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11, 2011.
"""

from __future__ import annotations

import numpy as np

TOKENS_PER_BLOCK = 8  # a block of the generator is four words of 64 bits


def token_words(seeds: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """32 random bits for each row and token.

    Token t has half t % 2, the low one first, of word t % 8 // 2 of the block whose counter is
    (t // 8 + 1, position, 0, 0) and whose key is (seed, 0).

    seeds, positions: np.uint64 [r]
    returns: np.uint32 [r, vocab_size]
    """
    num_words = -(-vocab_size // 2)
    words = np.empty((len(seeds), num_words), dtype="<u8")
    generator = np.random.Philox(key=np.zeros(2, dtype=np.uint64), counter=np.zeros(4, dtype=np.uint64))
    state = generator.state  # of a fresh generator; to set it takes a tenth of the time of making one
    key, counter = state["state"]["key"], state["state"]["counter"]
    for row, seed, position in zip(words, seeds.tolist(), positions.tolist(), strict=True):
        key[0], counter[1] = seed, position
        generator.state = state
        row[:] = generator.random_raw(num_words)  # counts up before the first block
    return words.view("<u4")[:, :vocab_size]
