"""Numbers of vectors as the bytes that clients ask for.

Numbers of 8 bits are E4M3 (without infinities) and E5M2, https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

# By vLLM's name: bits of the mantissa, bias of the exponent, and the code of the largest finite number.
FLOAT8: Mapping[str, tuple[int, int, int]] = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}
NAN = 0x7F


@functools.cache
def _finite_numbers(mantissa_bits: int, bias: int, last: int) -> np.ndarray:
    """float32 [last + 1]: the number of each code without a sign, which are in order."""
    codes = np.arange(last + 1)
    exponent, fraction = codes >> mantissa_bits, (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    is_normal = exponent > 0
    return np.ldexp(fraction + is_normal, np.maximum(exponent, 1) - bias).astype(np.float32)


def _float8_codes(values: np.ndarray, mantissa_bits: int, bias: int, last: int) -> np.ndarray:
    """float32 [...] -> uint8 [...]: the nearest numbers, ties to even. Larger ones become the largest finite one."""
    numbers = _finite_numbers(mantissa_bits, bias, last)
    between = (numbers[:-1] + numbers[1:]) / 2  # exact: they have few bits
    size = np.abs(values)
    low, high = (np.searchsorted(between, size, side=side) for side in ("left", "right"))  # they differ at a tie
    codes = np.where(np.isnan(values), NAN, np.where(low % 2 == 0, low, high)).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << 7)


def packed(dtype: str | None, order: str, values: np.ndarray) -> bytes:
    """float32 [...] -> its numbers one after the other, rounded to nearest.

    dtype: vLLM's name of their type; None: float32. order: "<" or ">", of the bytes of one
    """
    if dtype in FLOAT8:
        return _float8_codes(values, *FLOAT8[dtype]).tobytes()
    if dtype == "float16":
        return values.astype(f"{order}f2").tobytes()
    if dtype == "bfloat16":  # numpy has none: the upper halves, rounded to nearest, ties to even
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(f"{order}u2").tobytes()
    return values.astype(f"{order}f4").tobytes()
