"""`GroupedIntWeight`: packed integers of 4 or 8 bits; each group of input features has a scale and a zero point.

AWQ, GPTQ and compressed-tensors store the same numbers in different orders. Loading brings all of them into one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from services.dense_worker.kernels.linear.linear import multiply_matrix
from services.dense_worker.kernels.linear.quantized.packing import unpack
from services.dense_worker.parameters import Parameter, share_of_rows


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
