"""Philox4x32-10, a counter-based random number generator, vectorised over requests.

Without state: the number for (seed, position) is the same whenever, wherever and beside whatever it is drawn,
so a request repeats its tokens after a preemption or a crash. Host side, numpy only.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11, 2011.
"""

from __future__ import annotations

import numpy as np

NUM_ROUNDS = 10
_WORD_BITS = np.uint64(32)
_WORD_MASK = np.uint64(0xFFFFFFFF)
# The constants of the paper: multipliers of counter words 0 and 2, and key increments.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUND_KEY_OFFSETS = np.arange(NUM_ROUNDS, dtype=np.uint64)[:, None, None] * _KEY_STEPS

_MANTISSA_SHIFT = np.uint64(64 - 53)
_MANTISSA_UNIT = 2.0**-53


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One draw from [0, 1) per (seed, position), with all 53 bits that a float64 can hold.

    seeds: np.uint64 [n], the key
    positions: np.uint64 [n], words 0 and 1 of the counter; words 2 and 3 stay 0, free for further draws
    returns: np.float64 [n]
    """
    counters = np.zeros((4, len(positions)), dtype=np.uint64)
    counters[0], counters[1] = positions & _WORD_MASK, positions >> _WORD_BITS
    words = philox4x32(counters, np.stack((seeds & _WORD_MASK, seeds >> _WORD_BITS)))
    return (((words[0] << _WORD_BITS) | words[1]) >> _MANTISSA_SHIFT) * _MANTISSA_UNIT


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The ten-round bijection: random words [4, n] of counter words [4, n] under key words [2, n].

    All arrays are np.uint64 that hold one 32-bit word each, so that products do not overflow.
    """
    round_keys = (keys + _ROUND_KEY_OFFSETS) & _WORD_MASK  # [rounds, 2, n]
    factors, others = counters[0::2], counters[1::2]  # words 0 and 2, words 1 and 3
    for round_key in round_keys:
        products = factors * _MULTIPLIERS
        factors = (products >> _WORD_BITS)[::-1] ^ others ^ round_key
        others = (products & _WORD_MASK)[::-1]
    return np.stack((factors[0], others[0], factors[1], others[1]))
