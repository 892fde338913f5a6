"""What an encoder of text does between its products and attention: `TorchEncoderOperations`, on any device.

On a GPU, `TritonEncoderOperations` do the same by fewer kernels.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm


class Rotation(NamedTuple):
    """The angles by which each token's pairs (i, i + head_dim / 2) are turned (RoPE, arXiv:2104.09864)."""

    cos: torch.Tensor  # float32 [n, head_dim / 2]
    sin: torch.Tensor


class EncoderOperations(Protocol):
    """Inputs may be overwritten, but not by `normalize`."""

    def normalize(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[n, hidden] -> a new tensor."""

    def add_normalize(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, delta_norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, hidden] each -> residual + delta, or + delta_norm(delta); and the norm of that."""

    def activate(self, x: torch.Tensor, activation: MlpActivation) -> torch.Tensor:
        """[n, size], or [n, 2 * size] if gated -> [n, size]"""

    def prepare_heads(
        self, qkv: torch.Tensor, num_rotated: int, norms: HeadNorms | None, rotation: Rotation | None
    ) -> torch.Tensor:
        """Normalises and turns the heads of q and k, the first `num_rotated` ones of qkv [n, qkv_size]."""


class TorchEncoderOperations:
    """Operator by operator."""

    def normalize(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """By torch."""
        return norm.normalize(x)

    def add_normalize(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, delta_norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By torch, into new tensors."""
        total = residual + (delta if delta_norm is None else delta_norm.normalize(delta))
        return total, norm.normalize(total)

    def activate(self, x: torch.Tensor, activation: MlpActivation) -> torch.Tensor:
        """By torch."""
        return activation.apply(x)

    def prepare_heads(
        self, qkv: torch.Tensor, num_rotated: int, norms: HeadNorms | None, rotation: Rotation | None
    ) -> torch.Tensor:
        """By torch, into new tensors if there is anything to do."""
        if norms is not None:
            qkv = torch.cat(norms.normalize(qkv.split(norms.sizes, dim=1)), dim=1)
        if rotation is None:
            return qkv
        head_dim = 2 * rotation.cos.shape[1]
        cos, sin = (each[:, None] for each in rotation)
        first, second = qkv[:, : num_rotated * head_dim].unflatten(1, (num_rotated, 2, -1)).float().unbind(2)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([turned.flatten(1).to(qkv.dtype), qkv[:, num_rotated * head_dim :]], dim=1)
