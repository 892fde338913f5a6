"""Attention of prompt chunks as a Triton kernel: ragged, causal, over the paged cache.

A program holds a block of queries of one head and loops over the keys that they see (FlashAttention,
arXiv:2307.08691). Keys of the cached prefix and of the step itself are treated alike: all are in the cache by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.mha.triton_cache_layout import (
    join_halves,
    joined_dims,
    load_tile_blocks,
    padded_dims,
    tile_offsets,
)
from services.attn_worker.layers.mha.triton_quantized import (
    LOG_LARGEST_WEIGHT,
    kv_format,
    to_factor,
    to_float16,
    weigh_values,
)
from services.attn_worker.layers.mha.triton_rope_append import RotaryPairs, pair_sources, rotate
from services.attn_worker.layers.mha.triton_scores import ScoreOptions, adjust_scores, sink_weight
from services.attn_worker.layers.mha.work_items import NUM_FIELDS

SHORT_CONTEXT = 512  # up to this length half-empty tiles on the diagonal cost more than small tiles


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Sizes of the kernel's loop: tiles of `block_m` tokens, with `num_heads` queries of each, by `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_heads: int = 1  # of one kv head, so that its keys are read once for all of them
    max_registers: int | None = None  # of a thread


def choose_prefill_tiles(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, group: int, max_context_len: int, has_many_rows: bool
) -> PrefillTiles:
    """Chooses tiles for two programs per SM, so that one computes while the other waits; measured on an H200.

    With a cache of 8 bits, whose tiles pass through registers, more programs that share an SM hide more than tiles that
    are loaded ahead. A program of several heads reads their keys once, but few rows then have too few programs. Those
    tiles have been measured for heads of 128 dimensions, and none for heads of more than 256.
    """
    if head_dim > 256:
        return PrefillTiles(block_m=32, block_n=16 if dtype == torch.float32 else 32, num_warps=8, num_stages=2)
    if dtype == torch.float32:
        return PrefillTiles(block_m=32, block_n=16, num_warps=4, num_stages=2)
    if has_many_rows and head_dim == 128 and group % 2 == 0:
        if cache_dtype == torch.float8_e4m3fn:
            return PrefillTiles(block_m=32, block_n=64, num_warps=4, num_stages=1, num_heads=2, max_registers=168)
        if cache_dtype == dtype:
            heads = 4 if group % 4 == 0 else 2
            return PrefillTiles(128 // heads, block_n=64, num_warps=8, num_stages=2, num_heads=heads, max_registers=128)
    if cache_dtype == torch.float8_e4m3fn and head_dim == 128:
        return PrefillTiles(block_m=64, block_n=64, num_warps=4, num_stages=1, max_registers=168)
    if cache_dtype.itemsize == 1:
        return PrefillTiles(block_m=64, block_n=32 if head_dim > 128 else 64, num_warps=4, num_stages=1)
    block_n = 32 if head_dim > 128 or max_context_len <= SHORT_CONTEXT else 64
    return PrefillTiles(block_m=64, block_n=block_n, num_warps=4, num_stages=3)


def prefill_attention(
    qkv: torch.Tensor,  # [num_tokens, qkv_size]
    out: torch.Tensor,  # [num_tokens, attn_size]
    cache: torch.Tensor,  # [num_blocks + 1, num_kv_heads, 2, block_size, head_dim]
    scales: torch.Tensor | None,  # of the layer, see `BlockStorage`
    angles: torch.Tensor,  # float32 [num_angle_rows, head_dim], cos then sin
    angle_rows: torch.Tensor,  # int32 [num_tokens]
    items: torch.Tensor,  # int32 [num_items, NUM_FIELDS], see work_items.prefill_items
    block_tables: torch.Tensor,  # int32, flat
    window: int | None,
    tiles: PrefillTiles,
    scores: ScoreOptions,
    pairs: RotaryPairs | None,  # None: whole heads, (d, d + head_dim / 2)
    log_sums: torch.Tensor | None = None,  # float32 [num_tokens, num_heads], written to; None: not wanted
    num_later: torch.Tensor | None = None,  # int32 [num_tokens], see `StepMetadata`; not together with `log_sums`
) -> None:
    """Computes the attention of all items' rows; their keys and values must already be in the cache.

    `log_sums`: as in `decode_attention`. With it the rows see no key from the fifth column of their item on: what is
    here may be a part of their keys. With `num_later` that column is the end of the keys that the item's rows see.
    """
    num_kv_heads, _, block_size, head_dim = cache.shape[1:]
    num_heads = out.shape[1] // head_dim
    _prefill_kernel[(items.shape[0], num_heads // tiles.num_heads)](
        qkv,
        out,
        cache,
        scales,
        angles,
        angle_rows,
        items,
        block_tables,
        scores.slopes,
        scores.sinks,
        log_sums,
        num_later,
        qkv.stride(0),
        out.stride(0),
        FORMAT=kv_format(cache),
        IS_INTERPRETED=cache.device.type == "cpu",
        SCALE=scores.softmax_scale,
        RAW_SCALE=scores.scale,
        SOFTCAP=scores.softcap,
        ROTARY_DIM=head_dim if pairs is None else pairs.rotary_dim,
        HAS_PAIRS=pairs is not None and pairs.are_neighbours,
        NUM_SINK_TOKENS=scores.num_sink_tokens,
        PLACE_ROWS=scores.place_rows,
        NUM_FIELDS=NUM_FIELDS,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        WINDOW=window or 0,
        BLOCK_M=tiles.block_m,
        HEADS=tiles.num_heads,
        BLOCK_N=tiles.block_n,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        maxnreg=tiles.max_registers,
    )


@triton.jit
def _prefill_kernel(
    qkv,
    out,
    cache,
    scales,
    angles,
    angle_rows,
    items,
    block_tables,
    slopes,
    sinks,
    log_sums,  # None: not wanted
    num_later,  # None: no row sees keys after it
    qkv_stride,
    out_stride,
    FORMAT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    SCALE: tl.constexpr,
    RAW_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    NUM_SINK_TOKENS: tl.constexpr,
    PLACE_ROWS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program runs one item for HEADS query heads, whose rows follow each other."""
    fields = items + tl.program_id(0) * NUM_FIELDS
    first_row = tl.load(fields)
    if first_row < 0:  # NO_ITEM
        return
    num_rows = tl.load(fields + 1)
    first_position = tl.load(fields + 2)
    table = block_tables + tl.load(fields + 3)
    kv_head = tl.program_id(1) * HEADS // GROUP

    half: tl.constexpr = HEAD_DIM // 2
    num_rows_padded: tl.constexpr = HEADS * BLOCK_M
    offs_m = tl.arange(0, num_rows_padded)
    if HEADS == 1:
        head = tl.program_id(1)
        first_dim = head * HEAD_DIM
    else:
        head = tl.program_id(1) * HEADS + offs_m // BLOCK_M
        first_dim = (head * HEAD_DIM)[:, None]
        offs_m = offs_m % BLOCK_M
    offs_h = tl.arange(0, HALF)
    offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    mask_m = offs_m < num_rows
    mask_q = mask_m[:, None] & (offs_h < half)[None, :]
    rows = first_row + offs_m
    angle = angles + tl.load(angle_rows + rows, mask=mask_m, other=0)[:, None] * HEAD_DIM + offs_h[None, :]
    cos = tl.load(angle, mask=mask_q, other=0.0)
    sin = tl.load(angle + half, mask=mask_q, other=0.0)
    if ROTARY_DIM == HEAD_DIM and not HAS_PAIRS:
        source = qkv + rows.to(tl.int64)[:, None] * qkv_stride + first_dim + offs_h[None, :]
        query_1 = tl.load(source, mask=mask_q, other=0.0).to(tl.float32)
        query_2 = tl.load(source + half, mask=mask_q, other=0.0).to(tl.float32)
    else:
        source = qkv + rows.to(tl.int64)[:, None] * qkv_stride + first_dim
        first, second = pair_sources(source, offs_h[None, :], HEAD_DIM, ROTARY_DIM, HAS_PAIRS)
        query_1 = tl.load(first, mask=mask_q, other=0.0).to(tl.float32)
        query_2 = tl.load(second, mask=mask_q, other=0.0).to(tl.float32)
    query_1, query_2 = rotate(query_1, query_2, cos, sin)
    dtype: tl.constexpr = out.dtype.element_ty
    if FORMAT == "plain":
        query = join_halves(query_1.to(dtype), query_2.to(dtype))
    else:
        query = join_halves(to_factor(query_1, dtype), to_factor(query_2, dtype))

    log_max = tl.full([num_rows_padded], float("-inf"), tl.float32)
    exp_sum = tl.zeros([num_rows_padded], tl.float32)
    acc = tl.zeros([num_rows_padded, HEAD_DIM_PADDED], tl.float32)
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + head)
        if HEADS > 1:
            slope = slope[:, None]
    has_alibi: tl.constexpr = slopes is not None
    positions = first_position + offs_m
    end = first_position + num_rows
    if NUM_SINK_TOKENS > 0:  # those before the rows' windows; queries are rotated by their places for them
        place_row = tl.load(angle_rows + rows, mask=mask_m, other=0) + PLACE_ROWS
        place_angle = angles + place_row[:, None] * HEAD_DIM + offs_h[None, :]
        place_cos = tl.load(place_angle, mask=mask_q, other=0.0)
        place_sin = tl.load(place_angle + half, mask=mask_q, other=0.0)
        heads_of_rows = qkv + rows.to(tl.int64)[:, None] * qkv_stride + first_dim
        first, second = pair_sources(heads_of_rows, offs_h[None, :], HEAD_DIM, ROTARY_DIM, HAS_PAIRS)
        far_1 = tl.load(first, mask=mask_q, other=0.0).to(tl.float32)
        far_2 = tl.load(second, mask=mask_q, other=0.0).to(tl.float32)
        far_1, far_2 = rotate(far_1, far_2, place_cos, place_sin)
        if FORMAT == "plain":
            far_query = join_halves(far_1.to(dtype), far_2.to(dtype))
        else:
            far_query = join_halves(to_factor(far_1, dtype), to_factor(far_2, dtype))
        num_far = tl.minimum(tl.maximum(end - WINDOW, 0), NUM_SINK_TOKENS)
        acc, exp_sum, log_max = attend_tiles(
            acc, exp_sum, log_max, far_query, cache, scales, table, kv_head, positions, positions, 0,
            num_far, end, True, FORMAT, IS_INTERPRETED, SCALE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
            HEAD_DIM_PADDED, HALF, WINDOW, BLOCK_N, 1, slope, RAW_SCALE, SOFTCAP, has_alibi, NUM_SINK_TOKENS,
        )  # fmt: skip
    # Tiles in [full_start, full_end) are visible to all rows and need no mask.
    full_end = (first_position + 1) // BLOCK_N * BLOCK_N
    if log_sums is not None:
        num_keys = tl.load(fields + 4)
        positions = tl.minimum(positions, num_keys - 1)
        full_end = tl.minimum(full_end, num_keys // BLOCK_N * BLOCK_N)
        end = tl.minimum(end, num_keys)
    last_seen = positions
    last_row_end = end
    if num_later is not None:
        last_seen = positions + tl.load(num_later + rows, mask=mask_m, other=0)
        end = tl.load(fields + 4)
    full_start = 0
    if WINDOW > 0:
        seen_by_first = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_start = tl.cdiv(tl.maximum(last_row_end - WINDOW, 0), BLOCK_N) * BLOCK_N
        acc, exp_sum, log_max = attend_tiles(
            acc, exp_sum, log_max, query, cache, scales, table, kv_head, positions, last_seen, seen_by_first,
            tl.minimum(full_start, full_end), end, True, FORMAT, IS_INTERPRETED, SCALE, NUM_KV_HEADS, BLOCK_SIZE,
            HEAD_DIM, HEAD_DIM_PADDED, HALF, WINDOW, BLOCK_N, NUM_STAGES, slope, RAW_SCALE, SOFTCAP, has_alibi,
        )  # fmt: skip
    acc, exp_sum, log_max = attend_tiles(
        acc, exp_sum, log_max, query, cache, scales, table, kv_head, positions, last_seen, full_start,
        full_end, end, False, FORMAT, IS_INTERPRETED, SCALE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
        HEAD_DIM_PADDED, HALF, WINDOW, BLOCK_N, NUM_STAGES, slope, RAW_SCALE, SOFTCAP, has_alibi,
    )  # fmt: skip
    acc, exp_sum, log_max = attend_tiles(
        acc, exp_sum, log_max, query, cache, scales, table, kv_head, positions, last_seen, full_end,
        end, end, True, FORMAT, IS_INTERPRETED, SCALE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
        HEAD_DIM_PADDED, HALF, WINDOW, BLOCK_N, NUM_STAGES, slope, RAW_SCALE, SOFTCAP, has_alibi,
    )  # fmt: skip

    target = out + rows.to(tl.int64)[:, None] * out_stride + first_dim + offs_d[None, :]
    if sinks is not None:
        exp_sum = exp_sum + sink_weight(sinks, tl.full([num_rows_padded], 0, tl.int32) + head, mask_m, log_max)
    if log_sums is not None:
        own_sums = log_sums + rows * (NUM_KV_HEADS * GROUP) + head
        tl.store(own_sums, log_max + tl.log2(exp_sum), mask=mask_m)
    acc = acc / exp_sum[:, None]
    if FORMAT == "fp8":
        acc = acc * tl.load(scales + 1)
    result = acc.to(dtype)
    tl.store(target, result, mask=mask_m[:, None] & mask_d[None, :])


@triton.jit
def attend_tiles(
    acc,
    exp_sum,
    log_max,
    query,
    cache,
    scales,
    table,
    kv_head,
    positions,
    last_seen,  # the last key that each row sees
    start,
    stop,  # the tiles cover keys [start, stop); keys from `end` on are masked
    end,
    IS_MASKED: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    slope,  # of ALiBi; unused if not HAS_ALIBI
    RAW_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    NUM_SINK_TOKENS: tl.constexpr = 0,
):
    """Adds the tiles of keys from `start` up to `stop` to the running softmax.

    With NUM_SINK_TOKENS only keys of these first tokens count, and only for rows whose windows lack them.
    """
    dims, mask_dims = joined_dims(HEAD_DIM, HALF)
    offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    offs_n = tl.arange(0, BLOCK_N)
    blocks = load_tile_blocks(table, start, BLOCK_N, BLOCK_SIZE)
    is_adjusted: tl.constexpr = SOFTCAP > 0 or HAS_ALIBI
    scale = SCALE
    if FORMAT == "fp8":
        key_scale = tl.load(scales)
        if not is_adjusted:
            scale = key_scale * SCALE
    for first_key in tl.range(start, stop, BLOCK_N, num_stages=NUM_STAGES):
        offsets = tile_offsets(blocks, first_key, kv_head, BLOCK_N, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        if FORMAT == "int8":
            places = scales + tile_offsets(blocks, first_key, kv_head, BLOCK_N, NUM_KV_HEADS, BLOCK_SIZE, 1)
        # One tile ahead: with both loads in one iteration, the pipeline would need twice the stages.
        blocks = load_tile_blocks(table, first_key + BLOCK_N, BLOCK_N, BLOCK_SIZE)
        keys = first_key + offs_n
        mask_n = keys < end if IS_MASKED else tl.full([BLOCK_N], True, tl.int1)
        cached = cache + offsets[:, None]
        key = tl.load(cached + dims[None, :], mask=mask_n[:, None] & mask_dims[None, :], other=0.0)
        mask_v = mask_n[:, None] & mask_d[None, :]
        value = tl.load(cached + (BLOCK_SIZE * HEAD_DIM + offs_d)[None, :], mask=mask_v, other=0.0)
        if FORMAT != "plain":
            key = to_float16(key, FORMAT, IS_INTERPRETED).to(query.dtype)
            value = to_float16(value, FORMAT, IS_INTERPRETED).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if FORMAT == "int8":
            scores = scores * tl.load(places, mask=mask_n, other=0.0)[None, :]
        if is_adjusted:
            if FORMAT == "fp8":
                scores = scores * key_scale
            scores = adjust_scores(
                scores, slope, positions[:, None] - keys[None, :], RAW_SCALE, SOFTCAP, HAS_ALIBI
            )
        if IS_MASKED:
            is_seen = last_seen[:, None] >= keys[None, :]
            if NUM_SINK_TOKENS > 0:
                is_seen = (positions[:, None] - keys[None, :] >= WINDOW) & (keys < NUM_SINK_TOKENS)[None, :]
            elif WINDOW > 0:
                is_seen = is_seen & (positions[:, None] - keys[None, :] < WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        tile_max = tl.max(scores, axis=1) * scale
        if FORMAT != "plain":
            tile_max -= LOG_LARGEST_WEIGHT
        new_max = tl.maximum(log_max, tile_max)
        # Rows that have seen nothing yet keep a maximum of -inf; subtracting it from itself would be NaN.
        offset = tl.where(new_max == float("-inf"), 0.0, new_max) if IS_MASKED else new_max
        weights = tl.exp2(scores * scale - offset[:, None])
        decay = tl.exp2(log_max - offset)
        exp_sum = exp_sum * decay + tl.sum(weights, axis=1)
        if FORMAT == "int8":
            value_scales = tl.load(places + BLOCK_SIZE, mask=mask_n, other=0.0)
            weights = weigh_values(weights, value_scales[None, :], query.dtype)
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        log_max = new_max
    return acc, exp_sum, log_max
