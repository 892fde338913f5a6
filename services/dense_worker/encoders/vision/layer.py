"""`VisionLayer`: a layer of a tower, of which all families have the same: attention and an MLP, each behind a norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.dense_worker.encoders.packed_attention import PackedSequences, attend
from services.dense_worker.encoders.vision.operations import Rotation, TowerOperations
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import Norm


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


def multiply(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """x [..., in_features] -> [..., out_features]."""
    return linear.weight.multiply(x, linear.bias_data)
