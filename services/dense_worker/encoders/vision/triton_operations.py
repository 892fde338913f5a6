"""`TritonTowerOperations`: a kernel for each operation of a tower, where torch has a kernel for each step of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.encoders.vision.operations import Rotation, RowPart
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.triton_activation import activate
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.kernels.norm.triton_norm import add_norm
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_HEADS_PER_PROGRAM = 8


class TritonTowerOperations:
    """On the current stream. Reference: `TorchTowerOperations`."""

    def __init__(self, device: torch.device) -> None:
        self._launcher = KernelLauncher(device)

    def run(self, part: RowPart, *inputs: torch.Tensor) -> torch.Tensor:
        return part.forward(self, *inputs)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        out = torch.empty_like(x)
        add_norm(self._launcher, x, None, norm, out)
        return out

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        add_norm(self._launcher, x, delta, norm, delta)
        return x, delta

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_tokens, _, num_heads, head_dim = heads.shape
        self._launcher(
            _rotate_kernel,
            (num_tokens, triton.cdiv(2 * num_heads, _HEADS_PER_PROGRAM)),
            heads,
            rotation.cos,
            rotation.sin,
            2 * num_heads,
            heads.stride(0),
            HALF=head_dim // 2,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_HEADS=_HEADS_PER_PROGRAM,
            num_warps=4,
        )
        q, k, v = heads.unbind(1)
        return q, k, v

    def activate(self, inner: torch.Tensor, activation: MlpActivation) -> torch.Tensor:
        out = inner.new_empty(len(inner), inner.shape[1] // (1 + activation.is_gated))
        activate(self._launcher, inner, out, activation)
        return out


@triton.jit
def _rotate_kernel(
    heads,  # [num_tokens, num_heads and more, 2 * HALF], written in place
    cos,  # float32 [num_tokens, HALF]
    sin,
    num_heads,
    token_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program turns BLOCK_HEADS heads of a token, computed in float32 as `Rotation.apply` does."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    mask = (head < num_heads)[:, None] & (dim < HALF)[None, :]
    begin(PDL)
    turn = tl.load(cos + token * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    lift = tl.load(sin + token * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    at = heads + token * token_stride + head[:, None] * (2 * HALF) + dim[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = first.dtype
    first = first.to(tl.float32)
    tl.store(at, (first * turn - second * lift).to(dtype), mask=mask)
    tl.store(at + HALF, (second * turn + first * lift).to(dtype), mask=mask)
