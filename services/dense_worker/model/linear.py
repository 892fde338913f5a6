"""`Linear`: one linear layer of the model, its weight in whatever format it is stored.

A format is a file of its own (`plain_weight.py`): its tensors, where a checkpoint has them, and how to multiply.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from services.dense_worker.model.parameters import Parameter


class WeightFormat(Protocol):
    """A matrix [out_features, in_features] as it is stored: a frozen dataclass of parameters."""

    @property
    def kind(self) -> Hashable:
        """Equal for weights that the same kernels multiply; with shape and number of rows it chooses the kernel."""

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in_features], bias [out_features] -> [n, out_features], in x's dtype.

        Where `out` is given the result is `out`, written in place; its dtype may be wider than x's. The reference
        of all kernels for this format, in torch, on every device; torch.export can record it if `out` is None.
        """


class Cut(enum.Enum):
    """How a layer is cut over several GPUs, each of which has one part of it."""

    OUT = "out"  # each of the projections by its out_features, bias too: every part gives columns of the result
    IN = "in"  # by in_features: the parts' results are summed up, and the bias is added once


@dataclass(frozen=True, slots=True)
class Projection:
    """A layer of the checkpoint, before merging: what adapters and lists of ignored layers name."""

    name: str  # such as "model.layers.0.self_attn.q_proj"
    out_features: int


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x + b. A backend makes every product of a layer in one place (`Operations`)."""

    name: str  # of its role in a layer: "qkv", "o", "gate_up", "down", "lm_head"
    in_features: int
    out_features: int  # of all projections together
    merged_from: tuple[Projection, ...]  # in the order of their rows; one, unless several were merged
    cut: Cut
    weight: WeightFormat
    bias: Parameter | None  # [out_features]

    @property
    def bias_data(self) -> torch.Tensor | None:
        """The bias as a tensor, if there is one."""
        return None if self.bias is None else self.bias.data

    def multiply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features] by the reference of the weight's format, in `out` where given."""
        return self.weight.multiply(x, self.bias_data, out)
