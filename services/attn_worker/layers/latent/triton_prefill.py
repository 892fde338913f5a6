"""Latent attention of prompt chunks as Triton kernels: one appends the keys, one attends to all keys in the cache.

The rows of a tile are 16 heads of a few tokens: each key is loaded once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.latent.triton_attend import MAX_ROWS, attend_latent, load_rotated
from services.attn_worker.layers.mha.triton_cache_layout import join_halves, padded_dims
from services.attn_worker.layers.mha.triton_prefill import PrefillTiles
from services.attn_worker.layers.mha.triton_rope_append import RotaryPairs
from services.attn_worker.layers.mha.triton_scores import ScoreOptions
from services.attn_worker.layers.mha.work_items import NUM_FIELDS

HEADS_PER_TILE = 16  # with more heads, tiles of the same tokens run side by side
_TOKENS_PER_PROGRAM = 4  # that one program appends


def choose_latent_prefill_tiles(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, group: int, max_context_len: int, has_many_rows: bool
) -> PrefillTiles:
    """Tiles that fit into 227 KB of shared memory with heads of 512 latent and 64 rotated dimensions.

    `block_m` tokens make a tile of HEADS_PER_TILE rows each.
    """
    if dtype == torch.float32:
        return PrefillTiles(block_m=1, block_n=16, num_warps=8, num_stages=2)
    return PrefillTiles(block_m=MAX_ROWS // HEADS_PER_TILE, block_n=64, num_warps=8, num_stages=2)


def append_latent(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 1) * (rotary_dim + rank)], each head's rotated dimensions first
    cache: torch.Tensor,  # [num_blocks + 1, 1, 1, block_size, rotary_dim + rank]
    scales: None,  # the cache has the model's dtype
    angles: torch.Tensor,  # float32 [num_angle_rows, rotary_dim], cos then sin
    angle_rows: torch.Tensor,  # int32 [num_tokens]
    slots: torch.Tensor,  # int32 [num_tokens], -1: skip the row
    pairs: RotaryPairs,
) -> None:
    """Rotates the keys of the given rows and stores them in their slots."""
    num_tokens, head_dim = slots.shape[0], cache.shape[-1]
    rank = head_dim - pairs.rotary_dim
    _latent_append_kernel[(triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)](
        qkv,
        cache,
        angles,
        angle_rows,
        slots,
        num_tokens,
        qkv.stride(0),
        KEY_START=qkv.shape[1] - head_dim,
        HAS_PAIRS=pairs.are_neighbours,
        ROTARY_DIM=pairs.rotary_dim,
        RANK=rank,
        RANK_PADDED=triton.next_power_of_2(rank),
        HALF=triton.next_power_of_2(pairs.rotary_dim // 2),
        TOKENS=_TOKENS_PER_PROGRAM,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _latent_append_kernel(
    qkv,
    cache,
    angles,
    angle_rows,
    slots,
    num_tokens,
    qkv_stride,
    KEY_START: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program appends the keys of TOKENS rows."""
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + rows, mask=rows < num_tokens, other=-1)
    mask = slot >= 0
    source = qkv + rows.to(tl.int64) * qkv_stride + KEY_START
    of_tokens = angles + tl.load(angle_rows + rows, mask=mask, other=0) * ROTARY_DIM
    rotated_1, rotated_2 = load_rotated(source, of_tokens, mask, ROTARY_DIM, HAS_PAIRS, HALF)
    half: tl.constexpr = ROTARY_DIM // 2
    offs_h = tl.arange(0, HALF)
    offs_r, mask_r = padded_dims(RANK, RANK_PADDED)
    mask_h = mask[:, None] & (offs_h < half)[None, :]
    mask_r = mask[:, None] & mask_r[None, :]
    target = cache + slot.to(tl.int64)[:, None] * (ROTARY_DIM + RANK)
    latent = tl.load(source[:, None] + (ROTARY_DIM + offs_r)[None, :], mask=mask_r, other=0.0)
    tl.store(target + offs_h[None, :], rotated_1.to(cache.dtype.element_ty), mask=mask_h)
    tl.store(target + (half + offs_h)[None, :], rotated_2.to(cache.dtype.element_ty), mask=mask_h)
    tl.store(target + (ROTARY_DIM + offs_r)[None, :], latent, mask=mask_r)


def prefill_latent(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 1) * (rotary_dim + rank)], each head's rotated dimensions first
    out: torch.Tensor,  # [num_tokens, num_heads * rank]
    cache: torch.Tensor,  # [num_blocks + 1, 1, 1, block_size, rotary_dim + rank]
    scales: None,  # the cache has the model's dtype
    angles: torch.Tensor,  # float32 [num_angle_rows, rotary_dim], cos then sin
    angle_rows: torch.Tensor,  # int32 [num_tokens]
    items: torch.Tensor,  # int32 [num_items, NUM_FIELDS], see work_items.prefill_items
    block_tables: torch.Tensor,  # int32, flat
    window: None,
    tiles: PrefillTiles,
    scores: ScoreOptions,
    pairs: RotaryPairs,
) -> None:
    """Computes the attention of all items' rows; their keys must already be in the cache."""
    block_size, head_dim = cache.shape[3:]
    rank = head_dim - pairs.rotary_dim
    num_heads = out.shape[1] // rank
    _latent_prefill_kernel[(triton.cdiv(num_heads, HEADS_PER_TILE), items.shape[0])](
        qkv,
        out,
        cache,
        angles,
        angle_rows,
        items,
        block_tables,
        qkv.stride(0),
        out.stride(0),
        SCALE=scores.softmax_scale,
        HAS_PAIRS=pairs.are_neighbours,
        NUM_FIELDS=NUM_FIELDS,
        NUM_HEADS=num_heads,
        NUM_ROWS=tiles.block_m * HEADS_PER_TILE,
        HEADS_PER_TILE=HEADS_PER_TILE,
        BLOCK_SIZE=block_size,
        ROTARY_DIM=pairs.rotary_dim,
        RANK=rank,
        RANK_PADDED=max(16, triton.next_power_of_2(rank)),
        HALF=max(16, triton.next_power_of_2(pairs.rotary_dim // 2)),
        BLOCK_N=tiles.block_n,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


@triton.jit
def _latent_prefill_kernel(
    qkv,
    out,
    cache,
    angles,
    angle_rows,
    items,
    block_tables,
    qkv_stride,
    out_stride,
    SCALE: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program runs HEADS_PER_TILE heads of the tokens of one item."""
    fields = items + tl.program_id(1) * NUM_FIELDS
    first_row = tl.load(fields)
    if first_row < 0:  # NO_ITEM
        return
    num_tokens = tl.load(fields + 1)
    first_position = tl.load(fields + 2)
    table = block_tables + tl.load(fields + 3)

    head_dim: tl.constexpr = ROTARY_DIM + RANK
    dtype: tl.constexpr = out.dtype.element_ty
    offs_m = tl.arange(0, NUM_ROWS)
    tokens = offs_m // HEADS_PER_TILE
    heads = tl.program_id(0) * HEADS_PER_TILE + offs_m % HEADS_PER_TILE
    mask = (tokens < num_tokens) & (heads < NUM_HEADS)
    rows = (first_row + tokens).to(tl.int64)
    offs_r, mask_r = padded_dims(RANK, RANK_PADDED)
    mask_r = mask[:, None] & mask_r[None, :]
    source = qkv + rows * qkv_stride + heads * head_dim
    of_tokens = angles + tl.load(angle_rows + rows, mask=mask, other=0) * ROTARY_DIM
    rotated_1, rotated_2 = load_rotated(source, of_tokens, mask, ROTARY_DIM, HAS_PAIRS, HALF)
    latent = tl.load(source[:, None] + (ROTARY_DIM + offs_r)[None, :], mask=mask_r, other=0.0)
    acc, exp_sum, _ = attend_latent(
        tl.zeros([NUM_ROWS, RANK_PADDED], tl.float32), tl.zeros([NUM_ROWS], tl.float32),
        tl.full([NUM_ROWS], float("-inf"), tl.float32), join_halves(rotated_1.to(dtype), rotated_2.to(dtype)), latent,
        cache, table, 0, first_position + num_tokens, first_position + tokens, SCALE, BLOCK_SIZE, ROTARY_DIM, RANK,
        RANK_PADDED, HALF, BLOCK_N, NUM_STAGES,
    )  # fmt: skip
    target = out + rows[:, None] * out_stride + heads[:, None] * RANK + offs_r[None, :]
    tl.store(target, (acc / exp_sum[:, None]).to(dtype), mask=mask_r)
