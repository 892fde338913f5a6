"""Attention of any rows as one Triton kernel with one order of additions: ragged, causal, over the paged cache.

Keys are taken in *pieces* of `PIECE` positions of the text, which begin at its multiples. A piece is a running softmax
over tiles of keys (FlashAttention, arXiv:2307.08691), and a row folds its pieces in their order. A piece of which a row
sees nothing changes none of its bits. So neither a chunk's first row nor the step's other rows matter.

One program computes all pieces of its rows, or one piece, and then the program of these rows that ends last folds them:
that depends on the load, and changes no bit. Nor does the number of rows of a tile: an element of a product on the
tensor cores is the same in each, as long as the instruction is (below 64 rows, Hopper's is that of Ampere), and sums
over keys are products, too, since other sums depend on which thread has which key.
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
from services.attn_worker.layers.mha.triton_rope_append import RotaryPairs, pair_sources, rotate
from services.attn_worker.layers.mha.triton_scores import ScoreOptions, adjust_scores, sink_weight
from services.attn_worker.layers.mha.work_items import NUM_FIELDS

PIECE = 256  # keys
FEW_ROWS, MANY_ROWS = 16, 32  # of a tile; the fewest that tensor cores take, and the most with their instruction
_BLOCK_N = 32  # keys of a tile: part of the order of additions
_SUM_COLUMNS = 16  # the fewest that a product has


@dataclass(frozen=True, slots=True)
class PieceWorkspace:
    """Results of single pieces, in device memory; counters are zero between steps."""

    outputs: torch.Tensor  # float32 [items * kv heads * rows of a tile * head_dim] at least
    sums: torch.Tensor  # float32 [2, items * kv heads * rows of a tile]: of exponentials, and log2 of their unit
    counters: torch.Tensor  # int32 [items * kv heads], pieces done, by first item of a tile


def num_warps_of(num_rows: int, head_dim: int) -> int:
    """As measured on an H100; they do not change the order of additions."""
    return 2 if num_rows == MANY_ROWS and head_dim <= 128 else 4


def attend_pieces(
    qkv: torch.Tensor,  # [num_tokens, qkv_size]
    out: torch.Tensor,  # [num_tokens, attn_size]
    cache: torch.Tensor,  # [num_blocks + 1, num_kv_heads, 2, block_size, head_dim]
    angles: torch.Tensor,  # float32 [num_angle_rows, head_dim], cos then sin
    angle_rows: torch.Tensor,  # int32 [num_tokens]
    items: torch.Tensor,  # int32 [num_items, NUM_FIELDS], see piece_items.py
    block_tables: torch.Tensor,  # int32, flat
    workspace: PieceWorkspace,
    window: int | None,
    num_rows: int,  # of a tile: FEW_ROWS or MANY_ROWS, or the next power of two of heads in a group
    scores: ScoreOptions,
    pairs: RotaryPairs | None,  # None: whole heads, (d, d + head_dim / 2)
) -> None:
    """Computes the attention of all items' rows; their keys and values must already be in the cache."""
    num_kv_heads, _, block_size, head_dim = cache.shape[1:]
    group = out.shape[1] // (num_kv_heads * head_dim)
    _attend_kernel[(num_kv_heads, items.shape[0])](
        qkv,
        out,
        cache,
        angles,
        angle_rows,
        items,
        block_tables,
        workspace.outputs,
        workspace.sums,
        workspace.counters,
        scores.slopes,
        scores.sinks,
        qkv.stride(0),
        out.stride(0),
        workspace.sums.stride(0),
        SCALE=scores.softmax_scale,
        RAW_SCALE=scores.scale,
        SOFTCAP=scores.softcap,
        ROTARY_DIM=head_dim if pairs is None else pairs.rotary_dim,
        HAS_PAIRS=pairs is not None and pairs.are_neighbours,
        NUM_FIELDS=NUM_FIELDS,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=triton.next_power_of_2(group),
        NUM_ROWS=num_rows,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        WINDOW=window or 0,
        PIECE=PIECE,
        BLOCK_N=_BLOCK_N,
        SUM_COLUMNS=_SUM_COLUMNS,
        NUM_STAGES=3 if head_dim <= 128 else 2,
        num_warps=num_warps_of(num_rows, head_dim),
    )


@triton.jit
def _attend_kernel(
    qkv,
    out,
    cache,
    angles,
    angle_rows,
    items,
    block_tables,
    outputs,
    sums,
    counters,
    slopes,
    sinks,
    qkv_stride,
    out_stride,
    sums_stride,
    SCALE: tl.constexpr,
    RAW_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    PIECE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program runs one item for one kv head. Its rows are the GROUP_PADDED heads of each token."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    fields = items + item * NUM_FIELDS
    first_row = tl.load(fields)
    num_tokens = tl.load(fields + 1)
    first_position = tl.load(fields + 2)
    table = block_tables + tl.load(fields + 3)
    first_piece = tl.load(fields + 4)
    end_piece = tl.load(fields + 5)
    first_item = tl.load(fields + 6)
    num_items = tl.load(fields + 7)
    if first_row < 0:  # NO_ITEM
        return

    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out.dtype.element_ty
    offs_m, offs_h = tl.arange(0, NUM_ROWS), tl.arange(0, HALF)
    offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    tokens = offs_m // GROUP_PADDED
    heads = kv_head * GROUP + offs_m % GROUP_PADDED
    mask_m = (tokens < num_tokens) & (offs_m % GROUP_PADDED < GROUP)
    rows = (first_row + tokens).to(tl.int64)
    out_rows = out + rows[:, None] * out_stride + heads[:, None] * HEAD_DIM + offs_d[None, :]
    mask_out = mask_m[:, None] & mask_d[None, :]
    if num_items == 0:  # padding
        tl.store(out_rows, tl.zeros([NUM_ROWS, HEAD_DIM_PADDED], dtype), mask=mask_out)
        return

    mask_q = mask_m[:, None] & (offs_h < half)[None, :]
    angle = angles + tl.load(angle_rows + rows, mask=mask_m, other=0)[:, None] * HEAD_DIM + offs_h[None, :]
    cos = tl.load(angle, mask=mask_q, other=0.0)
    sin = tl.load(angle + half, mask=mask_q, other=0.0)
    source = qkv + rows[:, None] * qkv_stride + heads[:, None] * HEAD_DIM
    if ROTARY_DIM == HEAD_DIM and not HAS_PAIRS:
        source += offs_h[None, :]
        query_1 = tl.load(source, mask=mask_q, other=0.0).to(tl.float32)
        query_2 = tl.load(source + half, mask=mask_q, other=0.0).to(tl.float32)
    else:
        first, second = pair_sources(source, offs_h[None, :], HEAD_DIM, ROTARY_DIM, HAS_PAIRS)
        query_1 = tl.load(first, mask=mask_q, other=0.0).to(tl.float32)
        query_2 = tl.load(second, mask=mask_q, other=0.0).to(tl.float32)
    query_1, query_2 = rotate(query_1, query_2, cos, sin)
    query = join_halves(query_1.to(dtype), query_2.to(dtype))
    slope = tl.zeros([NUM_ROWS, 1], tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + heads, mask=mask_m, other=0.0)[:, None]

    positions = first_position + tokens
    end_key = first_position + num_tokens
    lowest_key = 0
    if WINDOW > 0:
        lowest_key = tl.maximum(first_position - WINDOW + 1, 0)
    dims, mask_dims = joined_dims(HEAD_DIM, HALF)
    offs_n = tl.arange(0, BLOCK_N)
    ones = tl.full([BLOCK_N, SUM_COLUMNS], 1.0, dtype)

    log_max = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_ROWS], tl.float32)
    acc = tl.zeros([NUM_ROWS, HEAD_DIM_PADDED], tl.float32)
    for piece in range(first_piece, end_piece):
        piece_max = tl.full([NUM_ROWS], float("-inf"), tl.float32)
        piece_sums = tl.zeros([NUM_ROWS, SUM_COLUMNS], tl.float32)  # equal columns
        piece_acc = tl.zeros([NUM_ROWS, HEAD_DIM_PADDED], tl.float32)
        start = piece * PIECE
        stop = tl.minimum(start + PIECE, end_key)
        # Tiles without any key that a row sees change nothing.
        start = tl.maximum(start, lowest_key // BLOCK_N * BLOCK_N)
        blocks = load_tile_blocks(table, start, BLOCK_N, BLOCK_SIZE)
        for first_key in tl.range(start, stop, BLOCK_N, num_stages=NUM_STAGES):
            offsets = tile_offsets(blocks, first_key, kv_head, BLOCK_N, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
            # One tile ahead: with both loads in one iteration, the pipeline would need twice the stages.
            blocks = load_tile_blocks(table, first_key + BLOCK_N, BLOCK_N, BLOCK_SIZE)
            keys = first_key + offs_n
            mask_n = (keys >= lowest_key) & (keys < end_key)
            cached = cache + offsets[:, None]
            key = tl.load(cached + dims[None, :], mask=mask_n[:, None] & mask_dims[None, :], other=0.0)
            mask_v = mask_n[:, None] & mask_d[None, :]
            value = tl.load(cached + (BLOCK_SIZE * HEAD_DIM + offs_d)[None, :], mask=mask_v, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            distance = positions[:, None] - keys[None, :]
            if SOFTCAP > 0 or slopes is not None:
                scores = adjust_scores(scores, slope, distance, RAW_SCALE, SOFTCAP, slopes is not None)
            is_seen = distance >= 0
            if WINDOW > 0:
                is_seen = is_seen & (distance < WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
            new_max = tl.maximum(piece_max, tl.max(scores, axis=1) * SCALE)
            # Rows that have seen nothing yet keep a maximum of -inf; subtracting it from itself would be NaN.
            offset = tl.where(new_max == float("-inf"), 0.0, new_max)
            factor = tl.full([NUM_ROWS, BLOCK_N], SCALE, tl.float32)
            # Written as one operation, so that the compiler has no choice.
            weights = tl.exp2(tl.fma(scores, factor, tl.zeros_like(scores) - offset[:, None])).to(dtype)
            decay = tl.exp2(piece_max - offset)[:, None]
            piece_sums = tl.dot(weights, ones, piece_sums * decay, input_precision="ieee")
            piece_acc = tl.dot(weights, value, piece_acc * decay, input_precision="ieee")
            piece_max = new_max
        acc, total, log_max = _fold(
            acc, total, log_max, piece_acc, tl.max(piece_sums, axis=1), piece_max, NUM_ROWS, HEAD_DIM_PADDED
        )

    if num_items > 1:
        num_all = sums_stride
        partial_rows = (item * NUM_KV_HEADS + kv_head) * NUM_ROWS + offs_m
        tl.store(sums + partial_rows, total)
        tl.store(sums + num_all + partial_rows, log_max)
        tl.store(outputs + partial_rows.to(tl.int64)[:, None] * HEAD_DIM_PADDED + offs_d[None, :], acc)
        tl.debug_barrier()  # all threads store before one of them increments the counter
        counter = counters + first_item * NUM_KV_HEADS + kv_head
        num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if num_done < num_items - 1:
            return
        tl.store(counter, 0)
        log_max = tl.full([NUM_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([NUM_ROWS], tl.float32)
        acc = tl.zeros([NUM_ROWS, HEAD_DIM_PADDED], tl.float32)
        first = (first_item * NUM_KV_HEADS + kv_head) * NUM_ROWS
        stride: tl.constexpr = NUM_KV_HEADS * NUM_ROWS
        for index in range(0, num_items, 4):  # four loads are under way at a time
            at = first + index * stride + offs_m
            acc_0, total_0, max_0 = _load_piece(outputs, sums, num_all, at, index < num_items, HEAD_DIM_PADDED)
            at += stride
            acc_1, total_1, max_1 = _load_piece(outputs, sums, num_all, at, index + 1 < num_items, HEAD_DIM_PADDED)
            at += stride
            acc_2, total_2, max_2 = _load_piece(outputs, sums, num_all, at, index + 2 < num_items, HEAD_DIM_PADDED)
            at += stride
            acc_3, total_3, max_3 = _load_piece(outputs, sums, num_all, at, index + 3 < num_items, HEAD_DIM_PADDED)
            acc, total, log_max = _fold(acc, total, log_max, acc_0, total_0, max_0, NUM_ROWS, HEAD_DIM_PADDED)
            acc, total, log_max = _fold(acc, total, log_max, acc_1, total_1, max_1, NUM_ROWS, HEAD_DIM_PADDED)
            acc, total, log_max = _fold(acc, total, log_max, acc_2, total_2, max_2, NUM_ROWS, HEAD_DIM_PADDED)
            acc, total, log_max = _fold(acc, total, log_max, acc_3, total_3, max_3, NUM_ROWS, HEAD_DIM_PADDED)

    if sinks is not None:
        total = total + sink_weight(sinks, heads, mask_m, log_max)
    tl.store(out_rows, (acc / total[:, None]).to(dtype), mask=mask_out)


@triton.jit
def _load_piece(outputs, sums, num_all, partial_rows, is_there, HEAD_DIM_PADDED: tl.constexpr):
    """What a program has stored of its piece; an empty piece if `is_there` is false.

    Another SM wrote it in this launch, so the loads must bypass this SM's first-level cache.
    """
    mask = (partial_rows >= 0) & is_there
    total = tl.load(sums + partial_rows, mask=mask, other=0.0, cache_modifier=".cg")
    log_max = tl.load(sums + num_all + partial_rows, mask=mask, other=float("-inf"), cache_modifier=".cg")
    places = partial_rows.to(tl.int64)[:, None] * HEAD_DIM_PADDED + tl.arange(0, HEAD_DIM_PADDED)[None, :]
    acc = tl.load(outputs + places, mask=mask[:, None], other=0.0, cache_modifier=".cg")
    return acc, total, log_max


@triton.jit
def _fold(
    acc,
    total,
    log_max,
    piece_acc,
    piece_total,
    piece_max,
    NUM_ROWS: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Adds a piece to weighted values, their sum of exponentials, and log2 of the unit of both.

    An empty piece (0, 0, -inf) changes nothing, and a piece added to an empty sum is that piece, to the bit.
    """
    new_max = tl.maximum(log_max, piece_max)
    offset = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay, factor = tl.exp2(log_max - offset), tl.exp2(piece_max - offset)
    # Written with the operations that round, so that the compiler has no choice.
    total = tl.fma(piece_total, factor, total * decay)
    wide = tl.zeros([NUM_ROWS, HEAD_DIM_PADDED], tl.float32) + factor[:, None]
    acc = tl.fma(piece_acc, wide, acc * decay[:, None])
    return acc, total, new_max
