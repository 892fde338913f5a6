"""Integers of 4 or 8 bits in words of 32 bits, and the orders in which programs pack them."""

from __future__ import annotations

import torch

WORD_BITS = 32
# Output channel 8 i + c of AWQ is in nibble _AWQ_NIBBLES[c] of word i.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int32 [rows, n] or its bytes -> uint8 [rows, number of codes]; the lowest bits of a word come first."""
    octets = words.contiguous().view(torch.uint8)
    if num_bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def pack(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The inverse of `unpack`. The number of columns must fill whole words."""
    if num_bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(torch.int32)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n], in AWQ's interleaved order."""
    nibbles = unpack(words, 4).unflatten(-1, (-1, 8))
    return nibbles[..., list(_AWQ_NIBBLES)].flatten(-2)
