"""Attention of short sequences, such as windows of patches, with the rotation of their queries and keys in one kernel.

Apart, to turn the heads and to attend in 100 windows of 64 patches reads and writes them three times; here it is once.
Reference: `Rotation.apply`, then `packed_attention.attend`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.operations import Rotation
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

MAX_LENGTH = 64  # of a sequence: one program has all of its scores of a head
_MIN_BLOCK = 16  # of a product of tiles


def attend_short(
    launcher: KernelLauncher,
    heads: torch.Tensor,  # [n, 3, num_heads, head_dim], q, k and v, in 16 bits; contiguous
    sequences: PackedSequences,  # of at most MAX_LENGTH tokens
    rotation: Rotation,  # of q and k
) -> torch.Tensor:
    """[n, num_heads * head_dim], which has no meaning for tokens of no sequence."""
    num_tokens, _, num_heads, head_dim = heads.shape
    out = heads.new_empty(num_tokens, num_heads * head_dim)
    half = head_dim // 2
    launcher(
        _short_kernel,
        (len(sequences.cu_seqlens) - 1, num_heads),
        out,
        heads,
        rotation.cos,
        rotation.sin,
        sequences.cu_seqlens,
        head_dim**-0.5,
        NUM_HEADS=num_heads,
        HALF=half,
        BLOCK_HALF=max(_MIN_BLOCK, triton.next_power_of_2(half)),
        BLOCK_DIM=max(_MIN_BLOCK, triton.next_power_of_2(head_dim)),
        BLOCK_TOKENS=max(_MIN_BLOCK, triton.next_power_of_2(sequences.max_length)),
        num_warps=4,
    )
    return out


@triton.jit
def _short_kernel(
    out,  # [num_tokens, NUM_HEADS, 2 * HALF]
    heads,  # [num_tokens, 3, NUM_HEADS, 2 * HALF]
    cos,  # float32 [num_tokens, HALF]
    sin,
    ends,  # int32 [num_sequences + 1]
    scale,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes a head of a sequence. Queries and keys are rounded when they have been turned."""
    begin(PDL)
    start = tl.load(ends + tl.program_id(0))
    length = tl.load(ends + tl.program_id(0) + 1) - start
    if length == 0:
        return
    head = tl.program_id(1)
    place = tl.arange(0, BLOCK_TOKENS)
    token = (start + place).to(tl.int64)
    dim = tl.arange(0, BLOCK_HALF)
    is_token = place < length
    mask = is_token[:, None] & (dim < HALF)[None, :]
    turn = tl.load(cos + token[:, None] * HALF + dim[None, :], mask=mask, other=0.0)
    lift = tl.load(sin + token[:, None] * HALF + dim[None, :], mask=mask, other=0.0)
    row = heads + token[:, None] * (3 * NUM_HEADS * 2 * HALF) + head * (2 * HALF)
    query = row + dim[None, :]
    q_first, q_second = _turned(query, query + HALF, turn, lift, mask)
    key = query + NUM_HEADS * 2 * HALF
    k_first, k_second = _turned(key, key + HALF, turn, lift, mask)
    scores = tl.dot(q_first, tl.trans(k_first))
    scores = tl.dot(q_second, tl.trans(k_second), scores) * scale
    scores = tl.where(is_token[None, :], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    column = tl.arange(0, BLOCK_DIM)
    mask = is_token[:, None] & (column < 2 * HALF)[None, :]
    values = tl.load(row + 2 * NUM_HEADS * 2 * HALF + column[None, :], mask=mask, other=0.0)
    found = tl.dot(weights.to(values.dtype), values) / total[:, None]
    at = out + token[:, None] * (NUM_HEADS * 2 * HALF) + head * (2 * HALF) + column[None, :]
    tl.store(at, found.to(values.dtype), mask=mask)


@triton.jit
def _turned(first, second, turn, lift, mask):
    x = tl.load(first, mask=mask, other=0.0)
    y = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    dtype = x.dtype
    x = x.to(tl.float32)
    return (x * turn - y * lift).to(dtype), (y * turn + x * lift).to(dtype)
