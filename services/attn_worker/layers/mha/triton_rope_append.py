"""RoPE, and appending the keys and values of prompts to the paged cache, as Triton functions and a kernel.

The prefill kernel rotates queries itself, and the decode kernel also appends (`triton_decode.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.mha.triton_cache_layout import cache_offset
from services.attn_worker.layers.mha.triton_quantized import int8_scale, kv_format, to_fp8, to_int8

_TOKENS_PER_PROGRAM = 16


@dataclass(frozen=True, slots=True)
class RotaryPairs:
    """Which dimensions of a head are rotated together, if not each with the one half a head further."""

    rotary_dim: int  # the first dimensions of the head are rotated
    are_neighbours: bool  # (2d, 2d + 1), not (d, d + rotary_dim / 2)


@triton.jit
def rotate(first_half, second_half, cos, sin):
    """Rotates heads, given and returned as halves in float32: RoPE (arXiv:2104.09864), pairs (d, d + head_dim / 2)."""
    return first_half * cos - second_half * sin, second_half * cos + first_half * sin


@triton.jit
def pair_sources(source, offs, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HAS_PAIRS: tl.constexpr):
    """The addresses of the two dimensions that each lane rotates: `source` is a head's start, `offs` are the lanes.

    For all cases but the plain one, pairs (d, d + HEAD_DIM / 2), which kernels write out: the compiler then adds the
    second half's distance where it loads. If only ROTARY_DIM dimensions are rotated, the further lanes have the rest of
    the head, with a cosine of 1. So the halves in registers and in the cache's keys may have the dimensions in another
    order. Products of q and k are the same in every order.
    """
    half: tl.constexpr = HEAD_DIM // 2
    rotary_half: tl.constexpr = ROTARY_DIM // 2
    is_rotated = offs < rotary_half
    if HAS_PAIRS:
        first, second = 2 * offs, 2 * offs + 1
    else:
        first, second = offs, offs + rotary_half
    return (
        source + tl.where(is_rotated, first, offs + rotary_half),
        source + tl.where(is_rotated, second, offs + half),
    )


def append_prefill(
    qkv: torch.Tensor,  # [num_tokens, qkv_size]
    cache: torch.Tensor,  # [num_blocks + 1, num_kv_heads, 2, block_size, head_dim]
    scales: torch.Tensor | None,  # of the layer, see `BlockStorage`
    angles: torch.Tensor,  # float32 [num_angle_rows, head_dim], cos then sin
    angle_rows: torch.Tensor,  # int32 [num_tokens]
    slots: torch.Tensor,  # int32 [num_tokens], -1: skip the row
    pairs: RotaryPairs | None = None,  # None: whole heads, (d, d + head_dim / 2)
) -> None:
    """Rotates the keys of the given rows and stores keys and values in their slots."""
    num_tokens = slots.shape[0]
    num_kv_heads, _, block_size, head_dim = cache.shape[1:]
    _append_kernel[(triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM), num_kv_heads)](
        qkv,
        cache,
        scales,
        angles,
        angle_rows,
        slots,
        num_tokens,
        qkv.stride(0),
        FORMAT=kv_format(cache),
        KEY_START=qkv.shape[1] - 2 * num_kv_heads * head_dim,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        TOKENS=_TOKENS_PER_PROGRAM,
        ROTARY_DIM=head_dim if pairs is None else pairs.rotary_dim,
        HAS_PAIRS=pairs is not None and pairs.are_neighbours,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _append_kernel(
    qkv,
    cache,
    scales,
    angles,
    angle_rows,
    slots,
    num_tokens,
    qkv_stride,
    FORMAT: tl.constexpr,
    KEY_START: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
):
    """One program appends one head of TOKENS rows."""
    kv_head = tl.program_id(1)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_step = rows < num_tokens
    slot = tl.load(slots + rows, mask=in_step, other=-1)
    angle_row = tl.load(angle_rows + rows, mask=in_step, other=0)
    append_tokens(
        qkv, cache, scales, angles, rows, slot, angle_row, kv_head, qkv_stride, FORMAT, KEY_START, NUM_KV_HEADS,
        BLOCK_SIZE, HEAD_DIM, HALF, ROTARY_DIM, HAS_PAIRS,
    )  # fmt: skip


@triton.jit
def append_tokens(
    qkv,
    cache,
    scales,
    angles,
    rows,  # [n]
    slot,  # [n], negative: skip the row
    angle_row,  # [n]
    kv_head,
    qkv_stride,
    FORMAT: tl.constexpr,
    KEY_START: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
):
    """Rotates the keys of one head of these rows, and stores keys and values."""
    half: tl.constexpr = HEAD_DIM // 2
    offs = tl.arange(0, HALF)
    mask = (slot >= 0)[:, None] & (offs < half)[None, :]

    head_start = qkv + (rows.to(tl.int64) * qkv_stride + KEY_START + kv_head * HEAD_DIM)[:, None]
    source = head_start + offs[None, :]
    if ROTARY_DIM == HEAD_DIM and not HAS_PAIRS:
        key_1 = tl.load(source, mask=mask, other=0.0)
        key_2 = tl.load(source + half, mask=mask, other=0.0)
    else:
        first, second = pair_sources(head_start, offs[None, :], HEAD_DIM, ROTARY_DIM, HAS_PAIRS)
        key_1 = tl.load(first, mask=mask, other=0.0)
        key_2 = tl.load(second, mask=mask, other=0.0)
    value_1 = tl.load(source + NUM_KV_HEADS * HEAD_DIM, mask=mask, other=0.0)
    value_2 = tl.load(source + NUM_KV_HEADS * HEAD_DIM + half, mask=mask, other=0.0)
    angle = angles + angle_row[:, None] * HEAD_DIM + offs[None, :]
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + half, mask=mask, other=0.0)
    key_1, key_2 = rotate(key_1.to(tl.float32), key_2.to(tl.float32), cos, sin)
    if FORMAT == "fp8":
        key_scale, value_scale = tl.load(scales), tl.load(scales + 1)
        key_1, key_2 = to_fp8(key_1, key_scale), to_fp8(key_2, key_scale)
        value_1, value_2 = to_fp8(value_1.to(tl.float32), value_scale), to_fp8(value_2.to(tl.float32), value_scale)
    elif FORMAT == "int8":
        value_1, value_2 = value_1.to(tl.float32), value_2.to(tl.float32)
        key_scale, value_scale = int8_scale(key_1, key_2, 1), int8_scale(value_1, value_2, 1)
        place = scales + cache_offset(slot // BLOCK_SIZE, kv_head, slot % BLOCK_SIZE, NUM_KV_HEADS, BLOCK_SIZE, 1)
        tl.store(place, key_scale, mask=slot >= 0)
        tl.store(place + BLOCK_SIZE, value_scale, mask=slot >= 0)
        key_1, key_2 = to_int8(key_1, key_scale[:, None]), to_int8(key_2, key_scale[:, None])
        value_1, value_2 = to_int8(value_1, value_scale[:, None]), to_int8(value_2, value_scale[:, None])

    target = cache_offset(slot // BLOCK_SIZE, kv_head, slot % BLOCK_SIZE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    target = cache + target[:, None] + offs[None, :]
    tl.store(target, key_1.to(cache.dtype.element_ty), mask=mask)
    tl.store(target + half, key_2.to(cache.dtype.element_ty), mask=mask)
    tl.store(target + BLOCK_SIZE * HEAD_DIM, value_1, mask=mask)
    tl.store(target + BLOCK_SIZE * HEAD_DIM + half, value_2, mask=mask)
