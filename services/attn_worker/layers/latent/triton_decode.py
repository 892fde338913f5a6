"""Decode with latent attention as two Triton kernels: one rotates, appends and attends, one merges split contexts.

Each cached key is read once for up to 64 query heads, which are the rows of one tile; the tiles of more heads run side
by side and find the keys in the second-level cache. A long context is split into pieces as in `triton_decode.py`. The
pieces of a row have too much output for one program to merge, so a second launch does it, by head. Both launches depend
only on sizes, never on lengths, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.latent.triton_attend import MAX_ROWS, attend_latent, load_rotated
from services.attn_worker.layers.mha.triton_cache_layout import join_halves, padded_dims
from services.attn_worker.layers.mha.triton_decode import DecodeTiles, DecodeWorkspace
from services.attn_worker.layers.mha.triton_rope_append import RotaryPairs
from services.attn_worker.layers.mha.triton_scores import ScoreOptions
from services.attn_worker.layers.mha.work_items import NUM_FIELDS

_MERGED_AT_ONCE = 16  # pieces of one head whose outputs are held in registers


def decode_rows(num_heads: int, dtype: torch.dtype) -> int:
    """The number of rows of a tile; a token's heads take as few tiles as they can."""
    most = 16 if dtype == torch.float32 else MAX_ROWS
    return min(most, max(16, triton.next_power_of_2(num_heads)))


def decode_load(num_heads: int, dtype: torch.dtype) -> int:
    """The programs of one item, counted double if each fills an SM."""
    num_rows = decode_rows(num_heads, dtype)
    return triton.cdiv(num_heads, num_rows) * (2 if num_rows == MAX_ROWS else 1)


def choose_latent_decode_tiles(
    dtype: torch.dtype, cache_dtype: torch.dtype, num_heads: int, head_dim: int, programs_per_sm: float
) -> DecodeTiles:
    """Tiles that fit into 227 KB of shared memory with heads of 512 latent and 64 rotated dimensions."""
    if dtype == torch.float32:
        return DecodeTiles(block_n=16, num_warps=8, num_stages=2)
    if decode_rows(num_heads, dtype) <= 32:  # for two programs per SM
        return DecodeTiles(block_n=32, num_warps=4, num_stages=3)
    return DecodeTiles(block_n=64, num_warps=8, num_stages=2)


def decode_latent(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 1) * (rotary_dim + rank)], each head's rotated dimensions first
    out: torch.Tensor,  # [num_tokens, num_heads * rank]
    cache: torch.Tensor,  # [num_blocks + 1, 1, 1, block_size, rotary_dim + rank]
    scales: None,  # the cache has the model's dtype
    angles: torch.Tensor,  # float32 [num_angle_rows, rotary_dim], cos then sin
    items: torch.Tensor,  # int32 [num_items, NUM_FIELDS], see work_items.fill_decode_items
    block_tables: torch.Tensor,  # int32, flat
    workspace: DecodeWorkspace,  # outputs of [max_items, num_heads * rank]
    tiles: DecodeTiles,
    scores: ScoreOptions,
    pairs: RotaryPairs,
) -> None:
    """Runs all items: stores the new keys and writes the attention output of the items' rows."""
    block_size, head_dim = cache.shape[3:]
    rank, num_items = head_dim - pairs.rotary_dim, items.shape[0]
    num_heads = out.shape[1] // rank
    rank_padded = max(16, triton.next_power_of_2(rank))
    num_rows = decode_rows(num_heads, qkv.dtype)
    _latent_decode_kernel[(triton.cdiv(num_heads, num_rows), num_items)](
        qkv,
        out,
        cache,
        angles,
        items,
        block_tables,
        workspace.outputs,
        workspace.log_sums,
        qkv.stride(0),
        out.stride(0),
        SCALE=scores.softmax_scale,
        HAS_PAIRS=pairs.are_neighbours,
        NUM_FIELDS=NUM_FIELDS,
        NUM_HEADS=num_heads,
        NUM_ROWS=num_rows,
        BLOCK_SIZE=block_size,
        ROTARY_DIM=pairs.rotary_dim,
        RANK=rank,
        RANK_PADDED=rank_padded,
        HALF=max(16, triton.next_power_of_2(pairs.rotary_dim // 2)),
        BLOCK_N=tiles.block_n,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    _merge_kernel[(num_heads, num_items)](
        out,
        items,
        workspace.outputs,
        workspace.log_sums,
        out.stride(0),
        NUM_FIELDS=NUM_FIELDS,
        NUM_HEADS=num_heads,
        RANK=rank,
        RANK_PADDED=rank_padded,
        MERGE_N=_MERGED_AT_ONCE,
        num_warps=4,
    )


@triton.jit
def _latent_decode_kernel(
    qkv,
    out,
    cache,
    angles,
    items,
    block_tables,
    partial_outputs,
    partial_log_sums,
    qkv_stride,
    out_stride,
    SCALE: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program runs one item for NUM_ROWS heads."""
    item = tl.program_id(1)
    fields = items + item * NUM_FIELDS
    row = tl.load(fields)
    table_start = tl.load(fields + 1)
    first_key = tl.load(fields + 2)
    end_key = tl.load(fields + 3)
    num_items = tl.load(fields + 5)
    slot = tl.load(fields + 6)
    angle_row = tl.load(fields + 7)
    if row < 0:
        return

    dtype: tl.constexpr = out.dtype.element_ty
    head_dim: tl.constexpr = ROTARY_DIM + RANK
    heads = tl.program_id(0) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    offs_r, mask_r = padded_dims(RANK, RANK_PADDED)
    mask_heads = heads < NUM_HEADS
    mask_out = mask_heads[:, None] & mask_r[None, :]
    out_rows = out + row.to(tl.int64) * out_stride + heads[:, None] * RANK + offs_r[None, :]
    if num_items == 0:
        tl.store(out_rows, tl.zeros([NUM_ROWS, RANK_PADDED], dtype), mask=mask_out)
        return

    qkv_row = qkv + row.to(tl.int64) * qkv_stride
    source = qkv_row + heads * head_dim
    of_token = angles + angle_row * ROTARY_DIM
    rotated_1, rotated_2 = load_rotated(source, of_token + heads * 0, mask_heads, ROTARY_DIM, HAS_PAIRS, HALF)
    rotated_1, rotated_2 = rotated_1.to(dtype), rotated_2.to(dtype)
    latent = tl.load(source[:, None] + (ROTARY_DIM + offs_r)[None, :], mask=mask_out, other=0.0)

    # The new token is not read from the cache: the item that appends it begins its softmax with it.
    one = tl.arange(0, 1)
    new_source = qkv_row + NUM_HEADS * head_dim
    appends = slot >= 0
    new_1, new_2 = load_rotated(
        new_source + one * 0, of_token + one * 0, (one == 0) & appends, ROTARY_DIM, HAS_PAIRS, HALF
    )
    new_1, new_2 = new_1.to(dtype), new_2.to(dtype)
    new_latent = tl.load(new_source + ROTARY_DIM + offs_r, mask=mask_r & appends, other=0.0)
    scores = tl.sum(rotated_1.to(tl.float32) * new_1.to(tl.float32), axis=1)
    scores += tl.sum(rotated_2.to(tl.float32) * new_2.to(tl.float32), axis=1)
    scores += tl.sum(latent.to(tl.float32) * new_latent.to(tl.float32)[None, :], axis=1)
    log_max = tl.where(appends, scores * SCALE, float("-inf"))
    exp_sum = tl.zeros([NUM_ROWS], tl.float32) + tl.where(appends, 1.0, 0.0)
    acc = tl.zeros([NUM_ROWS, RANK_PADDED], tl.float32) + new_latent.to(tl.float32)[None, :]
    if appends:
        target = cache + slot.to(tl.int64) * head_dim
        half: tl.constexpr = ROTARY_DIM // 2
        offs_h = tl.arange(0, HALF)
        mask_h = (offs_h < half)[None, :] & (tl.program_id(0) == 0)
        tl.store(target + offs_h[None, :], new_1, mask=mask_h)
        tl.store(target + half + offs_h[None, :], new_2, mask=mask_h)
        tl.store(target + ROTARY_DIM + offs_r, new_latent, mask=mask_r & (tl.program_id(0) == 0))

    acc, exp_sum, log_max = attend_latent(
        acc, exp_sum, log_max, join_halves(rotated_1, rotated_2), latent, cache, block_tables + table_start, first_key,
        end_key, tl.zeros([NUM_ROWS], tl.int32) + end_key, SCALE, BLOCK_SIZE, ROTARY_DIM, RANK, RANK_PADDED, HALF,
        BLOCK_N, NUM_STAGES,
    )  # fmt: skip

    acc = acc / exp_sum[:, None]
    if num_items == 1:
        tl.store(out_rows, acc.to(dtype), mask=mask_out)
        return
    partial_rows = item * NUM_HEADS + heads
    tl.store(partial_log_sums + partial_rows, log_max + tl.log2(exp_sum), mask=mask_heads)
    tl.store(partial_outputs + partial_rows.to(tl.int64)[:, None] * RANK + offs_r[None, :], acc, mask=mask_out)


@triton.jit
def _merge_kernel(
    out,
    items,
    partial_outputs,
    partial_log_sums,
    out_stride,
    NUM_FIELDS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    MERGE_N: tl.constexpr,
):
    """One program sums the pieces of one head of a row, weighted by their sums of exponentials.

    The program of the row's first item does it, if there are several.
    """
    head = tl.program_id(0)
    first_item = tl.program_id(1)
    fields = items + first_item * NUM_FIELDS
    row = tl.load(fields)
    num_items = tl.load(fields + 5)
    if (row < 0) | (tl.load(fields + 4) != first_item) | (num_items < 2):
        return
    offs_s = tl.arange(0, MERGE_N)
    offs_r, mask_r = padded_dims(RANK, RANK_PADDED)
    log_max = float("-inf")
    total = 0.0
    acc = tl.zeros([RANK_PADDED], tl.float32)
    for start in range(0, num_items, MERGE_N):
        mask = start + offs_s < num_items
        partial_rows = (first_item + start + offs_s) * NUM_HEADS + head
        log_sums = tl.load(partial_log_sums + partial_rows, mask=mask, other=float("-inf"))
        address = partial_outputs + partial_rows.to(tl.int64)[:, None] * RANK + offs_r[None, :]
        outputs = tl.load(address, mask=mask[:, None] & mask_r[None, :], other=0.0)
        new_max = tl.maximum(log_max, tl.max(log_sums, axis=0))
        weights = tl.exp2(log_sums - new_max)
        decay = tl.exp2(log_max - new_max)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(weights[:, None] * outputs, axis=0)
        log_max = new_max
    target = out + row.to(tl.int64) * out_stride + head * RANK + offs_r
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=mask_r)
