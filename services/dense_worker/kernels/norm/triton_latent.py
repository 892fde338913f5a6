"""One kernel for what latent attention writes around the product with the keys' matrices.

Reference: `model.torch_operations.TorchOperations.place_latent`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.norm.triton_norm import normalize
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_HEADS_PER_PROGRAM = 16


def place_latent(
    launcher: KernelLauncher,
    heads: torch.Tensor,  # [n, num_heads + 1, rotated_dim + rank], contiguous but for its rows; written
    query: torch.Tensor,  # [n, num_heads, plain_dim + rotated_dim], contiguous but for its rows
    key: torch.Tensor,  # [n, rank + rotated_dim], contiguous but for its rows
    weight: torch.Tensor,  # [rank]
    eps: float,
) -> None:
    """Normalises the latent vectors by RMSNorm, and copies the rotated parts to the beginning of each head."""
    num_rows, num_heads, query_dim = query.shape
    rank, rotated_dim = len(weight), heads.shape[2] - len(weight)
    launcher(
        _place_latent_kernel,
        (num_rows, triton.cdiv(num_heads, _HEADS_PER_PROGRAM)),
        heads,
        query,
        key,
        weight,
        heads.stride(0),
        query.stride(0),
        key.stride(0),
        eps,
        NUM_HEADS=num_heads,
        PLAIN_DIM=query_dim - rotated_dim,
        ROTATED_DIM=rotated_dim,
        RANK=rank,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        BLOCK_ROTATED=triton.next_power_of_2(rotated_dim),
        BLOCK_RANK=triton.next_power_of_2(rank),
        num_warps=4,
    )


@triton.jit
def _place_latent_kernel(
    heads,
    query,
    key,
    weight,
    heads_stride,
    query_stride,
    key_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program copies BLOCK_HEADS queries of a row; the first one of a row also writes its key."""
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims, ranks = tl.arange(0, BLOCK_ROTATED), tl.arange(0, BLOCK_RANK)
    is_dim, is_rank = dims < ROTATED_DIM, ranks < RANK
    gain = tl.load(weight + ranks, mask=is_rank, other=0.0)
    begin(PDL)
    mask = (offs_h < NUM_HEADS)[:, None] & is_dim[None, :]
    source = query + row * query_stride + offs_h[:, None] * (PLAIN_DIM + ROTATED_DIM) + PLAIN_DIM + dims[None, :]
    target = heads + row * heads_stride
    rotated = tl.load(source, mask=mask, other=0.0)
    tl.store(target + offs_h[:, None] * (ROTATED_DIM + RANK) + dims[None, :], rotated, mask=mask)
    if tl.program_id(1) == 0:
        key_row = key + row * key_stride
        key_target = target + NUM_HEADS * (ROTATED_DIM + RANK)
        tl.store(key_target + dims, tl.load(key_row + RANK + dims, mask=is_dim, other=0.0), mask=is_dim)
        latent = tl.load(key_row + ranks, mask=is_rank, other=0.0).to(tl.float32)
        tl.store(key_target + ROTATED_DIM + ranks, normalize(latent, gain, RANK, eps, 0), mask=is_rank)
