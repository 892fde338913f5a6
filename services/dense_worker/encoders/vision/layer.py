"""`VisionLayer`: a layer of a tower, of which most families have the same: attention and an MLP, each behind a norm.

`Projector`: the two matrices that make rows of the prompt of a tower's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.common.families.kinds import Activation
from services.dense_worker.encoders.packed_attention import PackedSequences, attend
from services.dense_worker.encoders.vision.operations import Rotation, TowerOperations
from services.dense_worker.kernels.linear.activation import ACTIVATIONS, MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator

PROJECTOR = "multi_modal_projector"  # in checkpoints


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """x + o(attention(norm(x))), then the same with an MLP: of two matrices, or of three with a gate."""

    attention_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    mlp_in: Linear  # gate rows, then up rows; without a gate up alone
    down: Linear
    num_heads: int
    activation: MlpActivation

    def forward(
        self,
        x: torch.Tensor,
        sequences: PackedSequences,
        operations: TowerOperations,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """x [num_tokens, hidden] of sequences that see themselves, which may be overwritten -> the same shape."""
        heads = multiply(self.qkv, operations.norm(x, self.attention_norm)).view(len(x), 3, self.num_heads, -1)
        q, k, v = heads.unbind(1) if rotation is None else operations.rotate(heads, rotation)
        attended = multiply(self.o, attend(q, k, v, sequences).flatten(1))
        x, normed = operations.add_norm(x, attended, self.mlp_norm)
        return x + multiply(self.down, operations.activate(multiply(self.mlp_in, normed), self.activation))


@dataclass(frozen=True, slots=True)
class Projector:
    """second · activation(first · x)"""

    first: Linear
    second: Linear
    activation: Activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] -> [..., width]"""
        return multiply(self.second, ACTIVATIONS[self.activation](multiply(self.first, x)))


def build_projector(
    in_features: int, width: int, activation: Activation, has_bias: bool, allocator: WeightAllocator
) -> Projector:
    """The matrices, uninitialised, with the names of their tensors in checkpoints."""
    first, second = (Projection(f"{PROJECTOR}.linear_{number}", width) for number in (1, 2))
    return Projector(
        allocator.linear("first", in_features, (first,), Cut.OUT, has_bias),
        allocator.linear("second", width, (second,), Cut.OUT, has_bias),
        activation,
    )


def multiply(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """x [..., in_features] -> [..., out_features]."""
    return linear.weight.multiply(x, linear.bias_data)
