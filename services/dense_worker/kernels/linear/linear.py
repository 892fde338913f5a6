"""`Linear`: one linear layer of the model, with a weight in any format.

`PlainWeight` is the format of unquantized weights. Each other format is a file in `quantized/`: its tensors, their
names in a checkpoint, and how to multiply.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from services.dense_worker.parameters import Parameter, StoredLayout, share_of_rows

DTYPES_OF_16_BITS = (torch.bfloat16, torch.float16)
MAX_IN_FEATURES = 32768  # of kernels that hold a row of the input in registers
TILE_BYTES = 192 << 10  # of shared memory, which the largest tiles of kernels take; they are sized for Hopper


class WeightFormat(Protocol):
    """The stored form of a matrix [out_features, in_features]: a frozen dataclass of parameters."""

    @property
    def kind(self) -> Hashable:
        """Equal for weights that the same kernels multiply. Kind, shape and number of rows choose the kernel."""

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in_features], bias [out_features] -> [n, out_features], in x's dtype.

        If `out` is given, the result is `out`, written in place. This is the reference for all kernels of the format,
        in torch, on every device; torch.export can record it if `out` is None.
        """

    def share(self, index: int, count: int) -> WeightFormat:
        """One of `count` equal shares of the rows, each made of whole projections: views."""


class QuantizedFormat(WeightFormat, Protocol):
    """A weight format whose tensors are codes and scales."""

    def fill_random(self, std: float, generator: torch.Generator) -> None:
        """Fills the tensors so that the weights have about this standard deviation. For models without weights."""


class Cut(enum.Enum):
    """How a layer is split over several GPUs; each has one part of it."""

    OUT = "out"  # each projection by its out_features, with its bias: every part computes columns of the result
    IN = "in"  # by in_features: the results of the parts are added, and the bias is added once


@dataclass(frozen=True, slots=True)
class Projection:
    """A layer of the checkpoint, before merging. Adapters and lists of ignored layers use its name."""

    name: str  # such as "model.layers.0.self_attn.q_proj"
    out_features: int
    layout: StoredLayout | None = None  # of its tensors in the checkpoint; None: as here


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x + b. A backend computes all products of linear layers in one place (`Operations`)."""

    name: str  # its role in a layer: "qkv", "o", "gate_up", "down", "lm_head"
    in_features: int
    out_features: int  # of all projections together
    merged_from: tuple[Projection, ...]  # in the order of their rows; only one if nothing was merged
    cut: Cut
    weight: WeightFormat
    bias: Parameter | None  # [out_features]

    @property
    def bias_data(self) -> torch.Tensor | None:
        """The bias as a tensor; None if there is none."""
        return None if self.bias is None else self.bias.data


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """An unquantized weight in the model's dtype: one matrix in float32, bfloat16 or float16."""

    matrix: Parameter  # [out_features, in_features]

    @property
    def kind(self) -> torch.dtype:
        return self.matrix.data.dtype

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features] by torch; on CUDA that is cuBLAS."""
        return multiply_matrix(x, self.matrix.data, bias, out)

    def share(self, index: int, count: int) -> PlainWeight:
        """A view of some rows."""
        return share_of_rows(self, index, count)


def multiply_matrix(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """x [n, in_features], matrix [out_features, in_features], all of one dtype -> [n, out_features], `out` if given."""
    if out is None:
        return F.linear(x, matrix, bias)
    if bias is None:
        return torch.mm(x, matrix.t(), out=out)
    return torch.addmm(bias, x, matrix.t(), out=out)
