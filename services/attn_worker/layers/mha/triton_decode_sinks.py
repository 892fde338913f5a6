"""The part of the decode kernel (`triton_decode.py`) for the first tokens of a text, which all see: StreamingLLM.

It is compiled only for models that have such sinks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.attn_worker.layers.mha.triton_cache_layout import (
    join_halves,
    joined_dims,
    load_tile_blocks,
    padded_dims,
    tile_offsets,
)
from services.attn_worker.layers.mha.triton_decode_quantized import attend_quantized
from services.attn_worker.layers.mha.triton_quantized import to_factor
from services.attn_worker.layers.mha.triton_rope_append import pair_sources, rotate
from services.attn_worker.layers.mha.triton_scores import adjust_scores


@triton.jit
def attend_far_sinks(
    acc,  # of the window's keys, as are the two sums
    exp_sum,
    log_max,
    qkv_row,
    heads,  # [NUM_QUERIES]
    mask_q,
    cache,
    pairs,
    scales,
    place_angle,  # where the angles for the token's place among those that it sees begin
    table,
    num_far,  # number of sinks before the window; 0: nothing is added
    kv_head,
    FORMAT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    SCALE: tl.constexpr,
    RAW_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    dtype: tl.constexpr,
):
    """Adds the sinks to the running softmax: (weighted sum of values, sum of exponentials, maximum).

    Keys are stored with the rotation of their positions in the text, which for sinks are their places among the tokens
    that are seen, too. So the query is rotated by its place for them.
    """
    offs_h = tl.arange(0, HALF)
    mask_h = offs_h < HEAD_DIM // 2
    cos = tl.load(place_angle + offs_h, mask=mask_h, other=0.0)
    sin = tl.load(place_angle + HEAD_DIM // 2 + offs_h, mask=mask_h, other=0.0)
    source = qkv_row + heads[:, None] * HEAD_DIM
    first, second = pair_sources(source, offs_h[None, :], HEAD_DIM, ROTARY_DIM, HAS_PAIRS)
    query_1 = tl.load(first, mask=mask_q, other=0.0).to(tl.float32)
    query_2 = tl.load(second, mask=mask_q, other=0.0).to(tl.float32)
    query_1, query_2 = rotate(query_1, query_2, cos[None, :], sin[None, :])
    if FORMAT == "plain":
        query = join_halves(query_1.to(dtype), query_2.to(dtype))
        dims, mask_dims = joined_dims(HEAD_DIM, HALF)
        offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
        offs_n = tl.arange(0, BLOCK_N)
        for start in tl.range(0, num_far, BLOCK_N, num_stages=1):
            blocks = load_tile_blocks(table, start, BLOCK_N, BLOCK_SIZE)
            offsets = tile_offsets(blocks, start, kv_head, BLOCK_N, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
            cached = cache + offsets[:, None]
            mask_n = start + offs_n < num_far
            key = tl.load(cached + dims[None, :], mask=mask_n[:, None] & mask_dims[None, :], other=0.0)
            mask_v = mask_n[:, None] & mask_d[None, :]
            value = tl.load(cached + (BLOCK_SIZE * HEAD_DIM + offs_d)[None, :], mask=mask_v, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            if SOFTCAP > 0:
                scores = adjust_scores(scores, 0.0, offs_n[None, :], RAW_SCALE, SOFTCAP, False)
            scores = tl.where(mask_n[None, :], scores, float("-inf"))
            new_max = tl.maximum(log_max, tl.max(scores, axis=1) * SCALE)
            weights = tl.exp2(scores * SCALE - new_max[:, None])
            decay = tl.exp2(log_max - new_max)
            exp_sum = exp_sum * decay + tl.sum(weights, axis=1)
            acc = tl.dot(weights.to(dtype), value, acc * decay[:, None], input_precision="ieee")
            log_max = new_max
    elif num_far > 0:
        factor_1, factor_2 = to_factor(query_1, dtype), to_factor(query_2, dtype)
        blocks = load_tile_blocks(table, 0, BLOCK_N, BLOCK_SIZE)
        no_slope = tl.zeros([NUM_QUERIES], tl.float32)
        far_max, far_sum, far_acc, _, _, _, _, _ = attend_quantized(
            factor_1, factor_2, 0, 0, 0, qkv_row, heads, 0, cos, sin,
            pairs, scales, table, blocks, 0, 0, num_far, kv_head, no_slope, 0, FORMAT,
            IS_INTERPRETED, SCALE, RAW_SCALE, SOFTCAP, False, ROTARY_DIM, HAS_PAIRS, NUM_QUERIES,
            NUM_KV_HEADS, 1, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PADDED, HALF, BLOCK_N, NUM_STAGES, dtype, False, False,
        )  # fmt: skip
        new_max = tl.maximum(log_max, far_max)
        decay, far_decay = tl.exp2(log_max - new_max), tl.exp2(far_max - new_max)
        exp_sum = exp_sum * decay + far_sum * far_decay
        acc = acc * decay[:, None] + far_acc * far_decay[:, None]
        log_max = new_max
    return acc, exp_sum, log_max
