"""`TritonTowerOperations`: a kernel for each operation of a tower, where torch has a kernel for each step of it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from services.common.vision.vision_config import PixelScale
from services.dense_worker.backends.cuda_linear import CudaLinear
from services.dense_worker.encoders import packed_attention
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.operations import Rotation, RowPart
from services.dense_worker.encoders.vision.picture import Picture, scale_bytes
from services.dense_worker.encoders.vision.triton_attention import attend_long, suits_two_products
from services.dense_worker.encoders.vision.triton_pixels import look_up, resample_lines
from services.dense_worker.encoders.vision.triton_windows import MAX_LENGTH, attend_short
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.linear_choice import LinearKernel
from services.dense_worker.kernels.linear.triton_activation import activate
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.kernels.norm.triton_norm import add_norm
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin
from services.dense_worker.sampling.upload import upload

_HEADS_PER_PROGRAM = 8
_KERNEL = LinearKernel.CUBLAS  # the one for many rows, in any format


class TritonTowerOperations:
    """On the current stream. Reference: `TorchTowerOperations`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the model"""
        self._launcher = KernelLauncher(device)
        self._linear = CudaLinear(self._launcher, device, dtype)
        self._numbers: dict[tuple[PixelScale, torch.dtype], torch.Tensor] = {}  # of bytes, [256, 3]: one for a tower

    def run(self, part: RowPart, *inputs: torch.Tensor) -> torch.Tensor:
        return part.forward(self, *inputs)

    def read_pixels(
        self, picture: Picture, scale: PixelScale, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        numbers = self._numbers.get((scale, dtype))
        if numbers is None:
            every_byte = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 3)
            numbers = self._numbers[scale, dtype] = scale_bytes(every_byte, scale).to(device, dtype)
        shape, tiles = picture.shape, upload(picture.pixels.numpy(), device)
        if shape.resample is not None:
            tiles = resample_lines(self._launcher, tiles[0], shape.height, shape.width, shape.resample)[None]
        return look_up(self._launcher, tiles, numbers)

    def multiply(
        self,
        linear: Linear,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        activation: MlpActivation | None = None,
    ) -> torch.Tensor:
        if norm is not None and not self._fuses(linear, norm, x, has_delta=False):
            normed = torch.empty_like(x)
            add_norm(self._launcher, x, None, norm, normed)
            x, norm = normed, None
        if activation is not None and not self._linear.fuses_activation(_KERNEL, linear, len(x)):
            activated = x.new_empty(len(x), linear.in_features)
            activate(self._launcher, x, activated, activation)
            x, activation = activated, None
        return self._multiply(linear, x, norm=norm, activation_before=activation)

    def add_multiply(
        self, linear: Linear, x: torch.Tensor, delta: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fuses(linear, norm, x, has_delta=True):
            return x, self._multiply(linear, x, norm=norm, delta=delta)
        add_norm(self._launcher, x, delta, norm, delta)
        return x, self._multiply(linear, delta)

    def attend(self, heads: torch.Tensor, sequences: PackedSequences, rotation: Rotation | None) -> torch.Tensor:
        if rotation is not None:
            if heads.dtype.itemsize == 2 and sequences.max_length <= MAX_LENGTH:
                return attend_short(self._launcher, heads, sequences, rotation)
            rotate(self._launcher, heads, rotation)
        if suits_two_products(heads):
            return attend_long(self._launcher, heads, sequences)
        return packed_attention.attend(*heads.unbind(1), sequences).flatten(1)

    def _fuses(self, linear: Linear, norm: Norm, x: torch.Tensor, *, has_delta: bool) -> bool:
        return self._linear.fuses_norm(_KERNEL, linear, norm, len(x), has_delta=has_delta)

    def _multiply(self, linear: Linear, x: torch.Tensor, **before: Any) -> torch.Tensor:
        product = x.new_empty(len(x), linear.out_features)
        self._linear.multiply(_KERNEL, linear, x, product, **before)
        return product


def rotate(launcher: KernelLauncher, heads: torch.Tensor, rotation: Rotation) -> None:
    """Turns q and k of heads [n, 3, num_heads, head_dim] in place."""
    num_tokens, _, num_heads, head_dim = heads.shape
    launcher(
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
