"""`GroupedIntWeight`: packed integers of 4 or 8 bits; each group of input features has a scale and a zero point.

AWQ, GPTQ and compressed-tensors store the same numbers in different orders. Loading brings all of them into one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from services.dense_worker.kernels.linear.linear import multiply_matrix
from services.dense_worker.parameters import Parameter, share_of_rows

WORD_BITS = 32  # of the words into which programs pack integers
# Output channel 8 i + c of AWQ is in nibble _AWQ_NIBBLES[c] of word i.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class GroupedIntWeight:
    """A WeightFormat: (code - zero point) * scale. The input is not quantized.

    With act-order, column j of the matrix belongs to input feature order[j], and columns of a group are neighbours.
    """

    packed: Parameter  # uint8 [out_features, in_features * num_bits / 8]; the low bits of a byte are the first feature
    scale: Parameter  # the model's dtype, [out_features, number of groups]
    zero_point: Parameter | None  # uint8 [out_features, number of groups]; None: half of the range, 2 ** (num_bits - 1)
    order: Parameter | None  # int32 [number of projections, in_features]; None: columns are in the order of features
    num_bits: int
    group_size: int  # input features
    part_sizes: tuple[int, ...]  # out_features of each projection

    @property
    def kind(self) -> Hashable:
        inputs = None if self.order is None else self.part_sizes  # each projection has its own
        return f"int{self.num_bits}", self.group_size, self.zero_point is not None, inputs, self.scale.data.dtype

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [out_features, in_features], its columns in the order in which they are stored."""
        codes = unpack(self.packed.data, self.num_bits).to(dtype).unflatten(1, (-1, self.group_size))
        middle = 2 ** (self.num_bits - 1)
        zero = middle if self.zero_point is None else self.zero_point.data.to(dtype)[:, :, None]
        return ((codes - zero) * self.scale.data.to(dtype)[:, :, None]).flatten(1)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features]: the matrix is dequantized to x's dtype, then multiplied."""
        matrix = self.dequantize(x.dtype)
        if self.order is None:
            return multiply_matrix(x, matrix, bias, out)
        parts = zip(self.order.data, matrix.split(self.part_sizes), strict=True)
        products = [multiply_matrix(x.index_select(1, order), rows, None, None) for order, rows in parts]
        result = torch.cat(products, dim=1) if bias is None else torch.cat(products, dim=1) + bias
        return result if out is None else out.copy_(result)

    def share(self, index: int, count: int) -> GroupedIntWeight:
        """Views of some projections."""
        sizes = self.part_sizes[: len(self.part_sizes) // count]
        return replace(share_of_rows(self, index, count), part_sizes=sizes)

    def fill_random(self, std: float, generator: torch.Generator) -> None:
        """Uniformly distributed codes."""
        packed, middle = self.packed.data, 2 ** (self.num_bits - 1)
        packed.random_(0, 256, generator=generator)
        self.scale.data.fill_(std * 3**0.5 / middle)
        if self.zero_point is not None:
            self.zero_point.data.fill_(middle)
        if self.order is not None:
            for row in self.order.data:
                row.copy_(torch.randperm(len(row), generator=generator, device=row.device))


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
