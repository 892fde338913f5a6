"""`TritonEncoderOperations`: an encoder's norms, activations and rotations, one kernel each.

Reference: `TorchEncoderOperations`. The kernels are those of decoders, and one that turns heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.encoders.text.encoder_operations import Rotation
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.triton_activation import activate
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm
from services.dense_worker.kernels.norm.triton_norm import add_norm, normalize_heads
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin


class TritonEncoderOperations:
    """`EncoderOperations` for one device."""

    def __init__(self, device: torch.device) -> None:
        self._launcher = KernelLauncher(device)

    def normalize(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Into a new tensor."""
        out = torch.empty_like(x)
        add_norm(self._launcher, x, None, norm, out)
        return out

    def add_normalize(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, delta_norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum is written over the residual, its norm over what was added."""
        add_norm(self._launcher, residual, delta, norm, delta, delta_norm=delta_norm)
        return residual, delta

    def activate(self, x: torch.Tensor, activation: MlpActivation) -> torch.Tensor:
        """Over the input, or its first half."""
        out = x[:, : x.shape[1] // 2] if activation.is_gated else x
        activate(self._launcher, x, out, activation)
        return out

    def prepare_heads(
        self, qkv: torch.Tensor, num_rotated: int, norms: HeadNorms | None, rotation: Rotation | None
    ) -> torch.Tensor:
        """In place."""
        if norms is not None:
            normalize_heads(self._launcher, qkv, norms)
        if rotation is not None:
            turn_heads(self._launcher, qkv, num_rotated, rotation)
        return qkv


def turn_heads(launcher: KernelLauncher, qkv: torch.Tensor, num_rotated: int, rotation: Rotation) -> None:
    """Turns the first heads of each row, in place, in float32. qkv: [n, qkv_size], columns contiguous"""
    half = rotation.cos.shape[1]
    launcher(
        _turn_heads_kernel,
        (qkv.shape[0],),
        qkv,
        rotation.cos,
        rotation.sin,
        qkv.stride(0),
        num_rotated,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_HEADS=triton.next_power_of_2(num_rotated),
        num_warps=4,
    )


@triton.jit
def _turn_heads_kernel(
    qkv,
    cos,
    sin,
    qkv_stride,
    num_heads,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program turns the heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HALF)
    is_dim = dims < HALF
    mask = (heads < num_heads)[:, None] & is_dim[None, :]
    begin(PDL)
    by_cos = tl.load(cos + row * HALF + dims, mask=is_dim, other=0.0)[None, :]
    by_sin = tl.load(sin + row * HALF + dims, mask=is_dim, other=0.0)[None, :]
    at = qkv + row * qkv_stride + heads[:, None] * (2 * HALF) + dims[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, first * by_cos - second * by_sin, mask=mask)
    tl.store(at + HALF, second * by_cos + first * by_sin, mask=mask)
