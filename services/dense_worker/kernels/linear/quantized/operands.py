"""What the kernels of quantized layers read: forms of the input, and views of codes and scales."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from services.common.quantization.schemes import Element

BLOCK_OUT = 64  # rows of weights in a tile of the streaming product
BLOCK_IN = 128  # features in a step of its loop


@dataclass(frozen=True, slots=True)
class InputForm:
    """What a product reads. It has several versions if the projections of a merged layer differ in it."""

    dtype: torch.dtype  # of the values, or of the codes: a type that holds them exactly
    num_versions: int = 1
    element: Element | None = None  # None: values, not codes
    input_scale: torch.Tensor | None = None  # float32 [num_versions]: static; None: a scale for each row
    group_size: int | None = None  # features with a scale of their own, a power of two; None: the whole row
    max_activation: float | None = None  # greater values do not count for a row's scale
    order: torch.Tensor | None = None  # int32 [num_versions, in_features]: column j is feature order[j]
    is_split: bool = False  # first the even columns, then the odd ones, as bytes of two codes are read
    is_dequantized: bool = False  # codes times their scale, for a product of numbers

    @property
    def is_any(self) -> bool:
        """Whether an input of this dtype has the form already."""
        return self.element is None and self.order is None and not self.is_split


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """The rows of a step in an `InputForm`."""

    values: torch.Tensor  # [num_versions, n, in_features]
    scale: torch.Tensor | None  # float32 [num_versions, n, groups]; None: not quantized


@dataclass(frozen=True, slots=True)
class CodeScales:
    """What turns sums of products of codes into the model's numbers."""

    rows: torch.Tensor  # float32 [n], of the input
    weights: torch.Tensor  # float32 [rows of weights]
    dtype: torch.dtype  # the model's, 16 bits


class Codes(enum.IntEnum):
    """How a byte of the matrix becomes numbers."""

    E4M3 = 0
    INT8 = 1
    UINT8 = 2  # less the zero point
    UINT4 = 3  # two numbers, each less the zero point
    E2M1 = 4  # two numbers


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Codes with scales. Rows of two codes in a byte need an input whose form `is_split`."""

    codes: Codes
    matrix: torch.Tensor  # uint8 or int8 [out_features, in_features / codes in a byte]
    scale: torch.Tensor  # [out_features], or [groups of rows, groups of features]; E2M1: uint8 exponents
    zero_point: torch.Tensor | None  # uint8 [out_features, groups of features]; None: half of the range
    group_size: int | None  # features; None: the scale is that of a whole row
    row_group_size: int  # rows that share scales of groups
    part_sizes: tuple[int, ...]  # rows of each projection, for an input that has a version for each

    def dot_size(self, dtype: torch.dtype, block_in: int) -> int:
        """The features that a loop over `block_in` of them sums before it applies a scale.

        E2M1 in bfloat16 has its scales already.
        """
        is_scaled = self.codes is Codes.E2M1 and dtype == torch.bfloat16
        return block_in if self.group_size is None or is_scaled else largest_power_of_2(self.group_size, BLOCK_IN)


def largest_power_of_2(size: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides `size`."""
    return min(size & -size, limit)
