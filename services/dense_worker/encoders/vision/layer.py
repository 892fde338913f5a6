"""`VisionLayer`: a layer of a tower, of which all families have the same: attention and an MLP, each behind a norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.dense_worker.encoders.packed_attention import PackedSequences, attend
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import Norm


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # by transformers' names
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}


@dataclass(frozen=True, slots=True)
class Rotation:
    """Turns pairs of dimensions, which are half a head apart, by angles of their own for each token."""

    cos: torch.Tensor  # float32 [num_tokens, 1, head_dim]
    sin: torch.Tensor

    @classmethod
    def of(cls, angles: torch.Tensor) -> Rotation:
        """angles: float32 [num_tokens, head_dim / 2]"""
        both = torch.cat((angles, angles), dim=-1)[:, None]
        return cls(both.cos(), both.sin())

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """heads [num_tokens, num_heads, head_dim] -> the same, computed in float32."""
        wide = heads.float()
        first, second = wide.chunk(2, dim=-1)
        return (wide * self.cos + torch.cat((-second, first), dim=-1) * self.sin).to(heads.dtype)


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
    activation: str
    is_gated: bool

    def forward(self, x: torch.Tensor, sequences: PackedSequences, rotation: Rotation | None = None) -> torch.Tensor:
        """x [num_tokens, hidden] of sequences that see themselves -> the same shape."""
        heads = multiply(self.qkv, self.attention_norm.normalize(x)).view(len(x), 3, self.num_heads, -1)
        q, k, v = heads.unbind(1)
        if rotation is not None:
            q, k = rotation.apply(q), rotation.apply(k)
        x = x + multiply(self.o, attend(q, k, v, sequences).flatten(1))
        inner, activate = multiply(self.mlp_in, self.mlp_norm.normalize(x)), ACTIVATIONS[self.activation]
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate) * up
        else:
            inner = activate(inner)
        return x + multiply(self.down, inner)


def multiply(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """x [..., in_features] -> [..., out_features]."""
    return linear.weight.multiply(x, linear.bias_data)
