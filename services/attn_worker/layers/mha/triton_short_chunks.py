"""Attention of short chunks behind a context as a Triton kernel that splits the context: drafts, next turns of chats.

A chunk of up to 64 tokens behind a long context has too few blocks of queries for a GPU, so its keys are split into
pieces that run at the same time, as in `triton_decode.py`, and the piece that ends last merges them. A program holds
tokens of one sequence with all query heads of one kv head, so that each key is read once for all of them. Keys of the
context and of the chunk itself are treated alike: all are in the cache by then, or each piece stores its own before it
reads. The launch depends only on sizes, so it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.attn_worker.layers.mha.triton_cache_layout import join_halves, padded_dims
from services.attn_worker.layers.mha.triton_decode import DecodeWorkspace, dependent_launch
from services.attn_worker.layers.mha.triton_prefill import attend_tiles
from services.attn_worker.layers.mha.triton_quantized import kv_format, to_factor
from services.attn_worker.layers.mha.triton_rope_append import RotaryPairs, append_tokens, pair_sources, rotate
from services.attn_worker.layers.mha.triton_scores import ScoreOptions, sink_weight
from services.attn_worker.layers.mha.work_items import NUM_FIELDS

MAX_SHORT_CHUNK = 64  # tokens; longer chunks have enough blocks of queries
# In keys. Behind shorter contexts, merging tiles of many rows costs more than splitting gains: on an H100 the kernel is
# as fast as the prefill kernel behind about 3,000 keys for one head per kv head, and 1,000 for groups of four.
_SHORTEST_CONTEXT, _SHORTEST_CONTEXT_OF_GROUPS = 4096, 2048
_FEW_ROWS = 16  # the fewest that the tensor cores take
_MERGED_ELEMENTS = 2048  # of partial outputs that a warp holds at a time


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """Sizes of the kernel's loop: `num_rows` queries, of `num_tokens` tokens, by `block_n` keys.

    `num_programs`: per SM, into which the contexts of a step are split.
    """

    num_rows: int
    num_tokens: int
    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int = 2


def most_tokens_of_few_rows(group: int) -> int:
    """The most tokens of a chunk that is one tile of the fewest rows; 0: those of a single token are more."""
    return _FEW_ROWS // triton.next_power_of_2(group)


def shortest_split_context(group: int) -> int:
    """From which length of their contexts on, in keys, chunks that need tiles of many rows are split."""
    return _SHORTEST_CONTEXT if group == 1 else _SHORTEST_CONTEXT_OF_GROUPS


def choose_chunk_tiles(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, group: int, max_num_tokens: int
) -> ChunkTiles:
    """Small tiles if chunks of `max_num_tokens` fit into them, as drafts do; else the size of the prefill kernel's."""
    group_padded = triton.next_power_of_2(group)
    is_small = max_num_tokens <= most_tokens_of_few_rows(group)
    most = 32 if dtype == torch.float32 or head_dim > 128 else 64
    num_rows = max(group_padded, _FEW_ROWS if is_small else most)
    num_tokens = num_rows // group_padded
    if head_dim > 256:
        return ChunkTiles(num_rows, num_tokens, 16 if dtype == torch.float32 else 32, num_warps=8, num_stages=2)
    if dtype == torch.float32:
        return ChunkTiles(num_rows, num_tokens, block_n=16, num_warps=4, num_stages=2)
    is_exact = cache_dtype.itemsize > 1
    num_warps = 2 if num_rows == _FEW_ROWS and not is_exact else 4 if num_rows <= 64 else 8
    block_n = 32 if (num_rows == _FEW_ROWS and not is_exact) or head_dim > 128 else 64
    if not is_exact:
        return ChunkTiles(num_rows, num_tokens, block_n, num_warps, num_stages=2 if num_rows == _FEW_ROWS else 1)
    # As many as fit, as for few sequences of one token each.
    num_programs = 3 if num_rows == _FEW_ROWS and group <= 4 and head_dim <= 128 else 2
    return ChunkTiles(num_rows, num_tokens, block_n, num_warps, num_stages=3, num_programs=num_programs)


def attend_short_chunks(
    qkv: torch.Tensor,  # [num_tokens, qkv_size]
    out: torch.Tensor,  # [num_tokens, attn_size]
    cache: torch.Tensor,  # [num_blocks + 1, num_kv_heads, 2, block_size, head_dim]
    scales: torch.Tensor | None,  # of the layer, see `BlockStorage`
    angles: torch.Tensor,  # float32 [num_angle_rows, head_dim], cos then sin
    angle_rows: torch.Tensor,  # int32 [num_tokens]
    items: torch.Tensor,  # int32 [num_items, NUM_FIELDS], see work_items.chunk_items
    block_tables: torch.Tensor,  # int32, flat
    workspace: DecodeWorkspace,  # outputs of [split items, num_kv_heads * tiles.num_rows * head_dim]
    window: int | None,
    tiles: ChunkTiles,
    scores: ScoreOptions,
    pairs: RotaryPairs | None,  # None: whole heads, (d, d + head_dim / 2)
    slots: torch.Tensor | None = None,  # int32 [num_tokens]; None: keys and values of the chunks are in the cache
) -> None:
    """Computes the attention of all items' rows.

    With `slots` it also stores the keys and values of these rows; then each chunk must be a single tile.
    """
    num_kv_heads, _, block_size, head_dim = cache.shape[1:]
    group = out.shape[1] // (num_kv_heads * head_dim)
    head_dim_padded = max(16, triton.next_power_of_2(head_dim))
    _short_chunk_kernel[(num_kv_heads, items.shape[0])](
        qkv,
        out,
        cache,
        scales,
        angles,
        angle_rows,
        items,
        block_tables,
        workspace.outputs,
        workspace.log_sums,
        workspace.counters,
        scores.slopes,
        scores.sinks,
        slots,
        qkv.stride(0),
        out.stride(0),
        FORMAT=kv_format(cache),
        IS_INTERPRETED=cache.device.type == "cpu",
        SCALE=scores.softmax_scale,
        RAW_SCALE=scores.scale,
        SOFTCAP=scores.softcap,
        ROTARY_DIM=head_dim if pairs is None else pairs.rotary_dim,
        HAS_PAIRS=pairs is not None and pairs.are_neighbours,
        NUM_FIELDS=NUM_FIELDS,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=triton.next_power_of_2(group),
        NUM_ROWS=tiles.num_rows,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        WINDOW=window or 0,
        BLOCK_N=tiles.block_n,
        MERGE_N=max(1, _MERGED_ELEMENTS * tiles.num_warps // (tiles.num_rows * head_dim_padded)),
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **dependent_launch(qkv.device),
    )


@triton.jit
def _short_chunk_kernel(
    qkv,
    out,
    cache,
    scales,
    angles,
    angle_rows,
    items,
    block_tables,
    partial_outputs,
    partial_log_sums,
    counters,
    slopes,
    sinks,
    slots,  # None: all keys are in the cache
    qkv_stride,
    out_stride,
    FORMAT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
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
    BLOCK_N: tl.constexpr,
    MERGE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program runs one item for one kv head. Its rows are the GROUP_PADDED heads of each token."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    fields = items + item * NUM_FIELDS
    first_row = tl.load(fields)
    num_tokens = tl.load(fields + 1)
    first_position = tl.load(fields + 2)
    table = block_tables + tl.load(fields + 3)
    first_key = tl.load(fields + 4)
    end_key = tl.load(fields + 5)
    first_item = tl.load(fields + 6)
    num_items = tl.load(fields + 7)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # as `load_new_token` does
    if first_row < 0:
        return

    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out.dtype.element_ty
    has_alibi: tl.constexpr = slopes is not None
    offs_m, offs_h = tl.arange(0, NUM_ROWS), tl.arange(0, HALF)
    offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    tokens = offs_m // GROUP_PADDED
    heads = kv_head * GROUP + offs_m % GROUP_PADDED
    mask_m = (tokens < num_tokens) & (offs_m % GROUP_PADDED < GROUP)
    mask_q = mask_m[:, None] & (offs_h < half)[None, :]
    rows = (first_row + tokens).to(tl.int64)
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
    if FORMAT == "plain":
        query = join_halves(query_1.to(dtype), query_2.to(dtype))
    else:
        query = join_halves(to_factor(query_1, dtype), to_factor(query_2, dtype))
    slope = tl.zeros([NUM_ROWS, 1], tl.float32)
    if has_alibi:
        slope = tl.load(slopes + heads, mask=mask_m, other=0.0)[:, None]

    if slots is not None:  # each piece stores those of its keys that are new, and reads no others that are
        new_tokens = tl.arange(0, NUM_ROWS // GROUP_PADDED)
        new_keys, new_rows = first_position + new_tokens, first_row + new_tokens
        is_new = (new_tokens < num_tokens) & (new_keys >= first_key) & (new_keys < end_key)
        slot = tl.load(slots + new_rows, mask=is_new, other=-1)
        angle_row = tl.load(angle_rows + new_rows, mask=is_new, other=0)
        append_tokens(
            qkv, cache, scales, angles, new_rows, slot, angle_row, kv_head, qkv_stride, FORMAT,
            NUM_KV_HEADS * GROUP * HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HALF, ROTARY_DIM, HAS_PAIRS,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have stored before one of them reads

    log_max = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    exp_sum = tl.zeros([NUM_ROWS], tl.float32)
    acc = tl.zeros([NUM_ROWS, HEAD_DIM_PADDED], tl.float32)
    positions = first_position + tokens
    # Tiles before the chunk are visible to all rows and need no mask, unless there is a window.
    masked_start = first_key
    if WINDOW == 0:
        masked_start = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end_key), first_key)
        acc, exp_sum, log_max = attend_tiles(
            acc, exp_sum, log_max, query, cache, scales, table, kv_head, positions, positions, first_key, masked_start,
            end_key, False, FORMAT, IS_INTERPRETED, SCALE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, HALF,
            WINDOW, BLOCK_N, NUM_STAGES, slope, RAW_SCALE, SOFTCAP, has_alibi,
        )  # fmt: skip
    acc, exp_sum, log_max = attend_tiles(
        acc, exp_sum, log_max, query, cache, scales, table, kv_head, positions, positions, masked_start, end_key,
        end_key, True, FORMAT, IS_INTERPRETED, SCALE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, HALF, WINDOW,
        BLOCK_N, NUM_STAGES, slope, RAW_SCALE, SOFTCAP, has_alibi,
    )  # fmt: skip

    if FORMAT == "fp8":
        acc = acc * tl.load(scales + 1)
    out_rows = out + rows[:, None] * out_stride + heads[:, None] * HEAD_DIM + offs_d[None, :]
    mask_out = mask_m[:, None] & mask_d[None, :]
    if num_items == 1:
        if sinks is not None:
            exp_sum = exp_sum + sink_weight(sinks, heads, mask_m, log_max)
        tl.store(out_rows, (acc / exp_sum[:, None]).to(dtype), mask=mask_out)
        return

    # Rows that see no key of this piece have a sum of 0: their part in the merged sum is 2 ** -inf.
    acc = acc / tl.where(exp_sum > 0, exp_sum, 1.0)[:, None]
    partial_row = (item * NUM_KV_HEADS + kv_head) * NUM_ROWS + offs_m
    tl.store(partial_log_sums + partial_row, log_max + tl.log2(exp_sum))
    partial = partial_outputs + partial_row.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(partial, acc, mask=mask_out)
    tl.debug_barrier()  # all threads store before one of them increments the counter
    counter = counters + first_item * NUM_KV_HEADS + kv_head
    num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if num_done == num_items - 1:
        tl.store(counter, 0)
        log_max = tl.full([NUM_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([NUM_ROWS], tl.float32)
        acc = tl.zeros([NUM_ROWS, HEAD_DIM_PADDED], tl.float32)
        for start in range(0, num_items, MERGE_N):
            sums, pieces = (), ()
            new_max = log_max
            for index in tl.static_range(MERGE_N):
                is_row = mask_m & (start + index < num_items)
                merged_rows = ((first_item + start + index) * NUM_KV_HEADS + kv_head) * NUM_ROWS + offs_m
                address = partial_outputs + merged_rows.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :]
                mask = is_row[:, None] & mask_d[None, :]
                # Other SMs wrote these values in this launch, so the loads must bypass this SM's first-level cache.
                sums += (tl.load(partial_log_sums + merged_rows, is_row, float("-inf"), cache_modifier=".cg"),)
                pieces += (tl.load(address, mask, 0.0, cache_modifier=".cg"),)
            for index in tl.static_range(MERGE_N):
                new_max = tl.maximum(new_max, sums[index])
            # The first pieces may hold no key in a row's window; subtracting -inf from itself would be NaN.
            offset = tl.where(new_max == float("-inf"), 0.0, new_max)
            decay = tl.exp2(log_max - offset)
            total = total * decay
            acc = acc * decay[:, None]
            for index in tl.static_range(MERGE_N):
                weight = tl.exp2(sums[index] - offset)
                total += weight
                acc += weight[:, None] * pieces[index]
            log_max = new_max
        if sinks is not None:
            total = total + sink_weight(sinks, heads, mask_m, log_max)
        tl.store(out_rows, (acc / total[:, None]).to(dtype), mask=mask_out)
