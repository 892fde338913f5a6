"""The slopes of ALiBi (arXiv:2108.12409), one per head, in the two ways that models compute them."""

from __future__ import annotations

import math
import struct


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """BLOOM's and Falcon's: a geometric series for the largest power of two, then every other one of the next."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    more = [2.0 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return tuple(slopes + more)


def mpt_alibi_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """MPT's: a series for the next power of two, of which the odd ones come first."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * (i + 1) / power) for i in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def bfloat16(value: float) -> float:
    """The number rounded to bfloat16, to the nearest and to even."""
    bits = int.from_bytes(struct.pack(">f", value), "big")
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack(">f", (bits & 0xFFFF0000).to_bytes(4, "big"))[0]
