"""Attention of sequences whose heads have 65 to 80 dimensions, in products of 64 and of 16.

Tiles of products have a power of two of columns; the FlashAttention in torch takes 96 for 72 or 80. Reference:
`packed_attention.attend`. The algorithm is FlashAttention-2's (arXiv:2307.08691).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

NEAR, FAR = 64, 16  # dimensions of the two products
_LOG2_E = 1.4426950408889634
BLOCK_QUERIES, BLOCK_KEYS, NUM_WARPS, NUM_STAGES = 64, 64, 4, 2  # of ten measured on an H200, the fastest


def suits_two_products(heads: torch.Tensor) -> bool:
    """Whether `attend_long` takes them: [..., head_dim]"""
    return heads.dtype.itemsize == 2 and NEAR < heads.shape[-1] <= NEAR + FAR


def attend_long(
    launcher: KernelLauncher,
    heads: torch.Tensor,  # [n, 3, num_heads, head_dim], q, k and v, in 16 bits; contiguous
    sequences: PackedSequences,
) -> torch.Tensor:
    """[n, num_heads * head_dim], which has no meaning for tokens of no sequence."""
    num_tokens, _, num_heads, head_dim = heads.shape
    out = heads.new_empty(num_tokens, num_heads * head_dim)
    launcher(
        _long_kernel,
        (triton.cdiv(sequences.max_length, BLOCK_QUERIES), num_heads, len(sequences.cu_seqlens) - 1),
        out,
        heads,
        sequences.cu_seqlens,
        head_dim**-0.5 * _LOG2_E,
        NUM_HEADS=num_heads,
        DIM=head_dim,
        NEAR=NEAR,
        FAR=FAR,
        BLOCK_QUERIES=BLOCK_QUERIES,
        BLOCK_KEYS=BLOCK_KEYS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out


@triton.jit
def _long_kernel(
    out,  # [num_tokens, NUM_HEADS, DIM]
    heads,  # [num_tokens, 3, NUM_HEADS, DIM]
    ends,  # int32 [num_sequences + 1]
    scale,  # of scores, whose powers are those of 2
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_QUERIES queries of a head of a sequence."""
    begin(PDL)
    start = tl.load(ends + tl.program_id(2))
    length = tl.load(ends + tl.program_id(2) + 1) - start
    first_query = tl.program_id(0) * BLOCK_QUERIES
    if first_query >= length:
        return
    query, key = first_query + tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS)
    near, far = tl.arange(0, NEAR)[None, :], NEAR + tl.arange(0, FAR)[None, :]
    is_query, is_far = (query < length)[:, None], far < DIM
    row_stride: tl.constexpr = 3 * NUM_HEADS * DIM
    of_head = heads + start.to(tl.int64) * row_stride + tl.program_id(1) * DIM
    rows = of_head + query[:, None] * row_stride
    q_near = tl.load(rows + near, mask=is_query, other=0.0)
    q_far = tl.load(rows + far, mask=is_query & is_far, other=0.0)
    found_near = tl.zeros((BLOCK_QUERIES, NEAR), tl.float32)
    found_far = tl.zeros((BLOCK_QUERIES, FAR), tl.float32)
    largest = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    num_whole = length // BLOCK_KEYS * BLOCK_KEYS
    keys = of_head + NUM_HEADS * DIM + key[:, None] * row_stride
    for _ in range(0, num_whole, BLOCK_KEYS):
        k_near, v_near = tl.load(keys + near), tl.load(keys + NUM_HEADS * DIM + near)
        k_far = tl.load(keys + far, mask=is_far, other=0.0)
        v_far = tl.load(keys + NUM_HEADS * DIM + far, mask=is_far, other=0.0)
        scores = tl.dot(q_far, tl.trans(k_far), tl.dot(q_near, tl.trans(k_near))) * scale
        found_near, found_far, largest, total = _add(found_near, found_far, largest, total, scores, v_near, v_far)
        keys += BLOCK_KEYS * row_stride
    if num_whole < length:
        is_key = num_whole + key < length
        is_row = is_key[:, None]
        k_near = tl.load(keys + near, mask=is_row, other=0.0)
        v_near = tl.load(keys + NUM_HEADS * DIM + near, mask=is_row, other=0.0)
        k_far = tl.load(keys + far, mask=is_row & is_far, other=0.0)
        v_far = tl.load(keys + NUM_HEADS * DIM + far, mask=is_row & is_far, other=0.0)
        scores = tl.dot(q_far, tl.trans(k_far), tl.dot(q_near, tl.trans(k_near))) * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        found_near, found_far, largest, total = _add(found_near, found_far, largest, total, scores, v_near, v_far)
    at = out + (start + query).to(tl.int64)[:, None] * (NUM_HEADS * DIM) + tl.program_id(1) * DIM
    tl.store(at + near, (found_near / total[:, None]).to(q_near.dtype), mask=is_query)
    tl.store(at + far, (found_far / total[:, None]).to(q_near.dtype), mask=is_query & is_far)


@triton.jit
def _add(found_near, found_far, largest, total, scores, v_near, v_far):
    """Adds what a block of keys gives to the sums, which are those of powers below the largest score."""
    highest = tl.maximum(largest, tl.max(scores, 1))
    shrink = tl.exp2(largest - highest)
    weights = tl.exp2(scores - highest[:, None])
    total = total * shrink + tl.sum(weights, 1)
    rounded = weights.to(v_near.dtype)
    found_near = tl.dot(rounded, v_near, found_near * shrink[:, None])
    found_far = tl.dot(rounded, v_far, found_far * shrink[:, None])
    return found_near, found_far, highest, total
