"""Decode attention as one Triton kernel: RoPE, append, split-KV attention and the merge of the splits.

It is memory bound: each cached key and value is read once, for all query heads of its kv head together. A long context
is split into pieces that run at the same time (flash-decoding), and the piece that ends last merges them. The launch
depends only on sizes, never on lengths, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from services.attn_worker.layers.mha.triton_cache_layout import (
    cache_offset,
    join_halves,
    joined_dims,
    load_tile_blocks,
    padded_dims,
    tile_offsets,
)
from services.attn_worker.layers.mha.triton_decode_many import PAIR, attend_many
from services.attn_worker.layers.mha.triton_decode_quantized import attend_quantized
from services.attn_worker.layers.mha.triton_decode_sinks import attend_far_sinks
from services.attn_worker.layers.mha.triton_new_token import load_new_token
from services.attn_worker.layers.mha.triton_quantized import int8_scale, kv_format, to_factor, to_fp8, to_int8
from services.attn_worker.layers.mha.triton_rope_append import RotaryPairs, rotate
from services.attn_worker.layers.mha.triton_scores import ScoreOptions, adjust_scores, sink_weight
from services.attn_worker.layers.mha.work_items import NUM_FIELDS

_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
# Whole programs per SM, those of unsplit contexts, by which tiles and pieces are chosen:
ONE_WARP_FROM = 8  # over 8 bits; with fewer, one warp each leaves too many of the SM's units idle
ONE_WARP_FROM_ALONE = 4  # the same with one query head per kv head, where whole contexts are split
SPLIT_BELOW = 24  # of those; with more, splitting gains nothing
FEW_BELOW = 1  # over 16 bits: contexts are split into pieces of few tiles, and merging them takes a part of the time
ALL_AT_ONCE_BELOW = 3  # over 16 bits all programs of four warps run at once, and so do twice as many of two warps


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Sizes of the kernel's loop: `block_n` keys per tile, `num_stages` tiles in flight.

    `num_programs`: per SM, into which the contexts of a step are split, if whole ones are fewer.
    `is_for_few`: the kernel is compiled for few sequences, whose time is that of accesses that wait for one another.
    `is_for_many`: it has the loop of `triton_decode_many.py`, if blocks are large enough. Four such programs share an
    SM, and hold three tiles each when the flag is set.
    """

    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int = 2
    is_for_few: bool = False
    is_for_many: bool = False


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results of split contexts, in device memory; counters are zero between steps."""

    outputs: torch.Tensor  # float32 [max_items, attn_size of the widest layer]; a layer uses the first elements
    log_sums: torch.Tensor  # float32 [max_items, num_heads], log2 of the sum of exponentials
    counters: torch.Tensor  # int32 [max_items, most num_kv_heads], pieces done, by first item of a row


def choose_decode_tiles(
    dtype: torch.dtype, cache_dtype: torch.dtype, group: int, head_dim: int, programs_per_sm: float
) -> DecodeTiles:
    """Chooses small tiles, so that several programs share an SM; measured in bench/results/attention.md.

    `programs_per_sm`: those of whole contexts. Few sequences leave SMs free, and get larger tiles. With a cache of 8
    bits programs of a single warp are faster, as no warp waits for another, if they are many. Tiles for heads of more
    than 256 dimensions have not been measured, nor the loop for many sequences with several heads per kv head or other
    sizes of heads.
    """
    is_exact = cache_dtype.itemsize > 1
    num_programs = _programs_of_many(cache_dtype, group, programs_per_sm)
    if head_dim > 256:
        return DecodeTiles(16 if dtype == torch.float32 else 32, 8, 2, num_programs)
    if dtype == torch.float32:
        return DecodeTiles(16, 4, 2, num_programs)
    one_warp_from = ONE_WARP_FROM_ALONE if group == 1 else ONE_WARP_FROM
    if not is_exact and group <= 16 and programs_per_sm >= one_warp_from:
        return DecodeTiles(32, 1, 3, num_programs) if cache_dtype == torch.int8 else DecodeTiles(16, 1, 4, num_programs)
    if head_dim <= 128 and group <= 16 and cache_dtype != torch.int8:
        choose = _tiles_of_few if is_exact else _fp8_tiles_of_few
        if (tiles := choose(group, programs_per_sm)) is not None:
            return tiles
    if group == 1 and head_dim == 128 and is_exact:
        return DecodeTiles(PAIR, 1, 4, num_programs, is_for_many=True)
    if group == 1 and head_dim < 128 and is_exact and programs_per_sm < ALL_AT_ONCE_BELOW:
        return DecodeTiles(32, 4, 3, num_programs, is_for_few=True)
    num_warps = 2 if group <= 16 else 4 if group <= 32 else 8  # larger groups need more registers
    return DecodeTiles(32, num_warps, 3, num_programs)


def _programs_of_many(cache_dtype: torch.dtype, group: int, programs_per_sm: float) -> int:
    """Into how many programs per SM contexts are split if tiles are not those for few sequences.

    Over a cache of 8 bits an SM runs up to 14 programs, and many short ones leave it idle for less time in the end.
    Over 16 bits only the longest of many contexts are split, so that no program ends long after the others. With
    several heads per kv head a program reads less, and so many pieces cost more than they gain.
    """
    if group > 1:
        return 4 if cache_dtype == torch.int8 and 1 / 8 < programs_per_sm <= 3 else 2
    if cache_dtype.itemsize > 1:
        return 2 if programs_per_sm < FEW_BELOW else 4
    if programs_per_sm < ONE_WARP_FROM_ALONE:
        return 8
    return 40 if programs_per_sm < SPLIT_BELOW else 2


def _tiles_of_few(group: int, programs_per_sm: float) -> DecodeTiles | None:
    """Those over a cache of 16 bits; None: the sequences are not few.

    Three such programs fit on an SM, or two with more heads per kv head. Contexts are split into as many, because with
    fewer some SMs would get three and others one. Where whole contexts are nearly two an SM, they have four stages, of
    which only two fit.
    """
    if programs_per_sm >= (ALL_AT_ONCE_BELOW if group > 1 else FEW_BELOW):
        return None
    if group > 1 and 1.5 < programs_per_sm <= 2:
        return DecodeTiles(64, 4, 4, is_for_few=True)
    return DecodeTiles(64, 4, 3, num_programs=3 if group <= 4 else 2, is_for_few=True)


def _fp8_tiles_of_few(group: int, programs_per_sm: float) -> DecodeTiles | None:
    """The same over FP8: six programs of two warps fit on an SM, and four if they have four stages."""
    if programs_per_sm <= 1 / 8:
        return DecodeTiles(64, 4, 3, num_programs=3, is_for_few=True)
    if programs_per_sm <= 3:
        return DecodeTiles(64, 2, 3, num_programs=6, is_for_few=True)
    if programs_per_sm <= 4:
        return DecodeTiles(64, 2, 4, is_for_few=True)
    return DecodeTiles(64, 2, 3, is_for_few=True) if programs_per_sm <= 6 else None


def decode_attention(
    qkv: torch.Tensor,  # [num_tokens, qkv_size]
    out: torch.Tensor,  # [num_tokens, attn_size]
    cache: torch.Tensor,  # [num_blocks + 1, num_kv_heads, 2, block_size, head_dim]
    scales: torch.Tensor | None,  # of the layer, see `BlockStorage`
    angles: torch.Tensor,  # float32 [num_angle_rows, head_dim], cos then sin
    items: torch.Tensor,  # int32 [num_items, NUM_FIELDS], see work_items.fill_decode_items
    block_tables: torch.Tensor,  # int32, flat
    workspace: DecodeWorkspace,
    tiles: DecodeTiles,
    scores: ScoreOptions,
    pairs: RotaryPairs | None,  # None: whole heads, (d, d + head_dim / 2)
    log_sums: torch.Tensor | None = None,  # float32 [num_tokens, num_heads], written to; None: not wanted
) -> None:
    """Runs all items: stores the new keys and values and writes the attention output of the items' rows.

    `log_sums`: log2 of the sum of exponentials of each row and head, with which attention over parts of the keys can be
    merged.
    """
    num_kv_heads, _, block_size, head_dim = cache.shape[1:]
    group = out.shape[1] // (num_kv_heads * head_dim)
    head_dim_padded = max(16, triton.next_power_of_2(head_dim))
    group_padded = triton.next_power_of_2(group)
    elements = group_padded * head_dim_padded  # of the outputs of a piece
    # Not beside tokens before a window, which have queries as rows: it has not been tried with them.
    if tiles.is_for_many and (block_size % 16 or scores.num_sink_tokens):
        tiles = DecodeTiles(block_n=PAIR, num_warps=2, num_stages=3)
    if tiles.is_for_few:
        num_merged = min(16, max(2, 2048 * tiles.num_warps // elements))
    else:
        merge_tile = 2048 if tiles.num_warps == 1 else 4096 if group == 1 else 8192
        num_merged = max(2, merge_tile // elements)
    _decode_kernel[(num_kv_heads, items.shape[0])](
        qkv,
        out,
        cache,
        None if kv_format(cache) == "plain" else cache.view(torch.int16),
        scales,
        angles,
        items,
        block_tables,
        workspace.outputs,
        workspace.log_sums,
        workspace.counters,
        scores.slopes,
        scores.sinks,
        log_sums,
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
        GROUP=group,
        GROUP_PADDED=group_padded,
        NUM_QUERIES=max(16 if kv_format(cache) == "plain" and not tiles.is_for_many else 8, group_padded),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        BLOCK_N=tiles.block_n,
        MERGE_N=num_merged,
        NUM_STAGES=tiles.num_stages,
        IS_FOR_FEW=tiles.is_for_few,
        IS_FOR_MANY=tiles.is_for_many,
        num_warps=tiles.num_warps,
        **dependent_launch(qkv.device),
    )


@functools.cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Options with which the kernel is launched while the one before it ends, which takes a flag of the channel.

    The kernel that sets the next flag is launched in the same way. See `channel/cuda_flags.py`.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _DEPENDENT_LAUNCH_CAPABILITY:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def _decode_kernel(
    qkv,
    out,
    cache,
    pairs,  # the same of 8 bits as int16; None if FORMAT is "plain"
    scales,
    angles,
    items,
    block_tables,
    partial_outputs,
    partial_log_sums,
    counters,
    slopes,
    sinks,
    log_sums,  # None: not wanted
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
    GROUP_PADDED: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_FOR_FEW: tl.constexpr,
    IS_FOR_MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program runs one item for one kv head. Its queries are the GROUP heads, padded for the tensor cores."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    fields = items + item * NUM_FIELDS
    row = tl.load(fields)
    table_start = tl.load(fields + 1)
    first_key = tl.load(fields + 2)
    end_key = tl.load(fields + 3)
    first_item = tl.load(fields + 4)
    num_items = tl.load(fields + 5)
    slot = tl.load(fields + 6)
    angle_row = tl.load(fields + 7)
    if row < 0:
        if PDL:
            gdc_wait()
        return

    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out.dtype.element_ty
    offs_g, offs_h = tl.arange(0, NUM_QUERIES), tl.arange(0, HALF)
    offs_n, mask_h = tl.arange(0, BLOCK_N), offs_h < half
    offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    heads = kv_head * GROUP + offs_g
    mask_q = (offs_g < GROUP)[:, None] & mask_h[None, :]
    out_rows = out + row.to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + offs_d[None, :]
    mask_out = (offs_g < GROUP)[:, None] & mask_d[None, :]
    table = block_tables + table_start
    # If the new token is the item's only key, there is no tile at all (not an empty one).
    first_tile = tl.where(first_key < end_key, first_key // BLOCK_N * BLOCK_N, end_key)
    blocks = load_tile_blocks(table, first_tile, BLOCK_N, BLOCK_SIZE)
    cos = tl.load(angles + angle_row * HEAD_DIM + offs_h, mask=mask_h, other=0.0)
    sin = tl.load(angles + angle_row * HEAD_DIM + half + offs_h, mask=mask_h, other=0.0)
    if num_items == 0:
        if PDL:
            gdc_wait()
        tl.store(out_rows, tl.zeros([NUM_QUERIES, HEAD_DIM_PADDED], dtype), mask=mask_out)
        if log_sums is not None:
            nothing = tl.full([NUM_QUERIES], float("-inf"), tl.float32)
            tl.store(log_sums + row * (NUM_KV_HEADS * GROUP) + heads, nothing, mask=offs_g < GROUP)
        return

    qkv_row = qkv + row.to(tl.int64) * qkv_stride
    dims, mask_dims = joined_dims(HEAD_DIM, HALF)
    query_1 = tl.zeros([NUM_QUERIES, HALF], dtype)
    if FORMAT != "plain":
        query_1 = to_factor(query_1, dtype)
    new_key_1 = tl.zeros([HALF], tl.float32)
    query_2, new_key_2 = query_1, new_key_1
    new_value = tl.zeros([HEAD_DIM_PADDED], dtype)
    # Cached keys and values were written before the step: the loop's first loads of them come before the wait. Not so
    # in steps of split contexts, which want log-sums: the kernel before has just appended keys that are read.
    waits_in_loop: tl.constexpr = log_sums is None and (FORMAT == "plain" or IS_FOR_FEW)
    if not waits_in_loop or first_tile >= end_key:
        query_1, query_2, new_key_1, new_key_2, new_value = load_new_token(
            qkv_row, heads, kv_head, slot, cos, sin, FORMAT, ROTARY_DIM, HAS_PAIRS, NUM_KV_HEADS, GROUP,
            NUM_QUERIES, HEAD_DIM, HEAD_DIM_PADDED, HALF, dtype, PDL,
        )  # fmt: skip
    if FORMAT == "fp8":
        key_scale, value_scale = tl.load(scales), tl.load(scales + 1)
    is_adjusted: tl.constexpr = SOFTCAP > 0 or slopes is not None
    slope = tl.zeros([NUM_QUERIES], tl.float32)
    if slopes is not None:  # then angle rows are positions
        slope = tl.load(slopes + heads, mask=offs_g < GROUP, other=0.0)

    if IS_FOR_MANY:
        log_max, exp_sum, acc, query_1, query_2, new_key_1, new_key_2, new_value = attend_many(
            query_1, query_2, new_key_1, new_key_2, new_value, qkv_row, heads, slot, cos, sin, cache, table, first_tile,
            first_key, end_key, kv_head, slope, angle_row, SCALE, RAW_SCALE, SOFTCAP, slopes is not None, ROTARY_DIM,
            HAS_PAIRS, NUM_QUERIES, NUM_KV_HEADS, GROUP, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, HALF, NUM_STAGES, dtype,
            waits_in_loop, PDL,
        )  # fmt: skip
    elif FORMAT == "plain":
        query = join_halves(query_1, query_2)
        log_max = tl.full([NUM_QUERIES], float("-inf"), tl.float32)
        exp_sum = tl.zeros([NUM_QUERIES], tl.float32)
        acc = tl.zeros([NUM_QUERIES, HEAD_DIM_PADDED], tl.float32)
        for start in tl.range(first_tile, end_key, BLOCK_N, num_stages=NUM_STAGES):
            offsets = tile_offsets(blocks, start, kv_head, BLOCK_N, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
            cached = cache + offsets[:, None]
            # One tile ahead: with both loads in one iteration, the pipeline would need twice the stages.
            blocks = load_tile_blocks(table, start + BLOCK_N, BLOCK_N, BLOCK_SIZE)
            keys = start + offs_n
            mask_n = (keys >= first_key) & (keys < end_key)
            key = tl.load(cached + dims[None, :], mask=mask_n[:, None] & mask_dims[None, :], other=0.0)
            mask_v = mask_n[:, None] & mask_d[None, :]
            value = tl.load(cached + (BLOCK_SIZE * HEAD_DIM + offs_d)[None, :], mask=mask_v, other=0.0)
            if waits_in_loop and start == first_tile:
                query_1, query_2, new_key_1, new_key_2, new_value = load_new_token(
                    qkv_row, heads, kv_head, slot, cos, sin, FORMAT, ROTARY_DIM, HAS_PAIRS, NUM_KV_HEADS, GROUP,
                    NUM_QUERIES, HEAD_DIM, HEAD_DIM_PADDED, HALF, dtype, PDL,
                )  # fmt: skip
                query = join_halves(query_1, query_2)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            if is_adjusted:
                distance = angle_row - keys
                scores = adjust_scores(
                    scores, slope[:, None], distance[None, :], RAW_SCALE, SOFTCAP, slopes is not None
                )
            scores = tl.where(mask_n[None, :], scores, float("-inf"))
            new_max = tl.maximum(log_max, tl.max(scores, axis=1) * SCALE)
            weights = tl.exp2(scores * SCALE - new_max[:, None])
            decay = tl.exp2(log_max - new_max)
            exp_sum = exp_sum * decay + tl.sum(weights, axis=1)
            acc = tl.dot(weights.to(dtype), value, acc * decay[:, None], input_precision="ieee")
            log_max = new_max
    else:
        log_max, exp_sum, acc, query_1, query_2, new_key_1, new_key_2, new_value = attend_quantized(
            query_1, query_2, new_key_1, new_key_2, new_value, qkv_row, heads, slot, cos, sin,
            pairs, scales, table, blocks, first_tile, first_key, end_key, kv_head, slope, angle_row, FORMAT,
            IS_INTERPRETED, SCALE, RAW_SCALE, SOFTCAP, slopes is not None, ROTARY_DIM, HAS_PAIRS, NUM_QUERIES,
            NUM_KV_HEADS, GROUP, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, HALF, BLOCK_N, NUM_STAGES, dtype,
            waits_in_loop, PDL,
        )  # fmt: skip

    if NUM_SINK_TOKENS > 0:  # the first item of a row adds those before its window
        place_angle = angles + (angle_row + PLACE_ROWS) * HEAD_DIM
        acc, exp_sum, log_max = attend_far_sinks(
            acc, exp_sum, log_max, qkv_row, heads, mask_q, cache, pairs, scales, place_angle, table,
            tl.where(item == first_item, tl.minimum(first_key, NUM_SINK_TOKENS), 0), kv_head, FORMAT, IS_INTERPRETED,
            SCALE, RAW_SCALE, SOFTCAP, ROTARY_DIM, HAS_PAIRS, NUM_QUERIES, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
            HEAD_DIM_PADDED, HALF, BLOCK_N, NUM_STAGES, dtype,
        )  # fmt: skip

    if slot >= 0:
        new_key_1, new_key_2 = rotate(new_key_1, new_key_2, cos, sin)
        # Attended as it is stored, so that text that is computed again as a prompt gives the same.
        if FORMAT == "fp8":
            key_1, key_2 = to_fp8(new_key_1, key_scale), to_fp8(new_key_2, key_scale)
            stored_value = to_fp8(new_value.to(tl.float32), value_scale)
        elif FORMAT == "int8":
            exact_value = new_value.to(tl.float32)
            new_key_scale = int8_scale(new_key_1, new_key_2, 0)
            new_value_scale = int8_scale(exact_value, exact_value, 0)
            place = scales + cache_offset(slot // BLOCK_SIZE, kv_head, slot % BLOCK_SIZE, NUM_KV_HEADS, BLOCK_SIZE, 1)
            tl.store(place, new_key_scale)
            tl.store(place + BLOCK_SIZE, new_value_scale)
            key_1, key_2 = to_int8(new_key_1, new_key_scale), to_int8(new_key_2, new_key_scale)
            stored_value = to_int8(exact_value, new_value_scale)
        else:
            key_1, key_2, stored_value = new_key_1.to(dtype), new_key_2.to(dtype), new_value
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        target = cache_offset(block, kv_head, offset, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        tl.store(cache + target + offs_h, key_1, mask=mask_h)
        tl.store(cache + target + half + offs_h, key_2, mask=mask_h)
        tl.store(cache + target + BLOCK_SIZE * HEAD_DIM + offs_d, stored_value, mask=mask_d)
        products = query_1.to(tl.float32) * key_1.to(tl.float32)[None, :]
        products += query_2.to(tl.float32) * key_2.to(tl.float32)[None, :]
        score = tl.sum(products, axis=1)
        if FORMAT == "fp8":
            score = score * key_scale
        elif FORMAT == "int8":
            score = score * new_key_scale
        if is_adjusted:
            score = adjust_scores(score, 0.0, tl.zeros([NUM_QUERIES], tl.int32), RAW_SCALE, SOFTCAP, False)
        score = score * SCALE
        new_max = tl.maximum(log_max, score)
        weight = tl.exp2(score - new_max)
        decay = tl.exp2(log_max - new_max)
        exp_sum = exp_sum * decay + weight
        attended_value = stored_value.to(tl.float32)
        if FORMAT == "int8":
            attended_value = attended_value * new_value_scale
        acc = acc * decay[:, None] + weight[:, None] * attended_value[None, :]
        log_max = new_max

    if sinks is not None:  # noqa: SIM102  this is known when the kernel is compiled
        if num_items == 1:  # else it joins the sum of all pieces
            exp_sum = exp_sum + sink_weight(sinks, heads, offs_g < GROUP, log_max)
    acc = acc / exp_sum[:, None]
    if FORMAT == "fp8":
        acc = acc * value_scale
    if num_items == 1:
        tl.store(out_rows, acc.to(dtype), mask=mask_out)
        if log_sums is not None:
            own_sum = log_max + tl.log2(exp_sum)
            tl.store(log_sums + row * (NUM_KV_HEADS * GROUP) + heads, own_sum, mask=offs_g < GROUP)
        return

    partial_row = item * (NUM_KV_HEADS * GROUP) + heads
    tl.store(partial_log_sums + partial_row, log_max + tl.log2(exp_sum), mask=offs_g < GROUP)
    partial = partial_outputs + partial_row.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(partial, acc, mask=mask_out)
    tl.debug_barrier()  # all threads store before one of them increments the counter
    counter = counters + first_item * NUM_KV_HEADS + kv_head
    num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if num_done == num_items - 1:
        tl.store(counter, 0)
        offs_r = tl.arange(0, GROUP_PADDED)
        rows = first_item * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
        merge: tl.constexpr = _merge_piece_by_piece if IS_FOR_FEW else _merge
        merged, merged_sum = merge(
            partial_outputs + rows.to(tl.int64) * HEAD_DIM,
            partial_log_sums + rows,
            None if sinks is None else sinks + kv_head * GROUP,
            num_items,
            NUM_KV_HEADS * GROUP,
            GROUP,
            GROUP_PADDED,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            MERGE_N,
        )
        target = out + row.to(tl.int64) * out_stride
        target += (kv_head * GROUP + offs_r)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(target, merged.to(dtype), mask=(offs_r < GROUP)[:, None] & mask_d[None, :])
        if log_sums is not None:
            own_heads = row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + offs_r
            tl.store(log_sums + own_heads, merged_sum, mask=offs_r < GROUP)


@triton.jit
def _merge(
    outputs,  # float32, at the first item and head; items lie item_stride heads apart
    log_sums,
    sinks,  # at the first head; None: the model has none
    num_items,
    item_stride,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MERGE_N: tl.constexpr,
):
    """Sums partial outputs, weighted by their sums of exponentials: float32 [GROUP_PADDED, HEAD_DIM_PADDED].

    And the log2 of the whole sum of exponentials, float32 [GROUP_PADDED].
    """
    offs_s = tl.arange(0, MERGE_N)
    offs_r = tl.arange(0, GROUP_PADDED)
    offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    log_max = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    for start in range(0, num_items, MERGE_N):
        pieces = (start + offs_s) * item_stride
        mask = (start + offs_s < num_items)[:, None] & (offs_r < GROUP)[None, :]
        heads = pieces[:, None] + offs_r[None, :]
        # Other SMs wrote these values in this launch, so the loads must bypass this SM's first-level cache.
        log_sum = tl.load(log_sums + heads, mask=mask, other=float("-inf"), cache_modifier=".cg")
        mask_3d = mask[:, :, None] & mask_d[None, None, :]
        address = outputs + heads[:, :, None].to(tl.int64) * HEAD_DIM + offs_d[None, None, :]
        output = tl.load(address, mask=mask_3d, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(log_max, tl.max(log_sum, axis=0))
        weights = tl.exp2(log_sum - new_max[None, :])
        decay = tl.exp2(log_max - new_max)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * output, axis=0)
        log_max = new_max
    if sinks is not None:
        total = total + sink_weight(sinks, offs_r, offs_r < GROUP, log_max)
    return acc / total[:, None], log_max + tl.log2(total)


@triton.jit
def _merge_piece_by_piece(
    outputs,
    log_sums,
    sinks,
    num_items,
    item_stride,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MERGE_N: tl.constexpr,
):
    """The same as `_merge`, with more registers and without shared memory: each piece is a tensor of its own."""
    offs_r = tl.arange(0, GROUP_PADDED)
    offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    mask_r = offs_r < GROUP
    log_max = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    for start in range(0, num_items, MERGE_N):
        sums, pieces = (), ()
        new_max = log_max
        for index in tl.static_range(MERGE_N):
            is_piece = start + index < num_items
            heads = (start + index) * item_stride + offs_r
            log_sum = tl.load(log_sums + heads, mask=mask_r & is_piece, other=float("-inf"), cache_modifier=".cg")
            address = outputs + heads[:, None].to(tl.int64) * HEAD_DIM + offs_d[None, :]
            mask = mask_r[:, None] & mask_d[None, :] & is_piece
            pieces += (tl.load(address, mask=mask, other=0.0, cache_modifier=".cg"),)
            sums += (log_sum,)
        for index in tl.static_range(MERGE_N):
            new_max = tl.maximum(new_max, sums[index])
        decay = tl.exp2(log_max - new_max)
        total = total * decay
        acc = acc * decay[:, None]
        for index in tl.static_range(MERGE_N):
            weight = tl.exp2(sums[index] - new_max)
            total += weight
            acc += weight[:, None] * pieces[index]
        log_max = new_max
    if sinks is not None:
        total = total + sink_weight(sinks, offs_r, mask_r, log_max)
    return acc / total[:, None], log_max + tl.log2(total)
