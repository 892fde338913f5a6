"""The loop of the decode kernel (`triton_decode.py`) over keys and values that are stored in 8 bits.

Half the bytes of bfloat16 leave half the time for each number, so that few instructions may handle it. The tensor cores
want two neighbours along the summed dimension in one register, and for values that is the context: shared memory
transposes 16-bit elements on the way to registers, not bytes. So the loop loads pairs of numbers as 16-bit elements and
splits them in registers: one product takes the even dimensions of all heads, another one the odd ones.

Keys and values are the first factors of the products, which have 16 rows on the tensor cores, and queries, of which a
program has few, are the 8 columns of the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.attn_worker.layers.mha.triton_cache_layout import (
    join_halves,
    joined_dims,
    load_tile_blocks,
    opaque,
    padded_dims,
    tile_offsets,
)
from services.attn_worker.layers.mha.triton_new_token import load_new_token
from services.attn_worker.layers.mha.triton_quantized import LOG_LARGEST_WEIGHT, split_pairs, weigh_values
from services.attn_worker.layers.mha.triton_scores import adjust_scores


@triton.jit
def attend_quantized(
    query_1,  # [NUM_QUERIES, HALF], as `load_new_token` gives it, like the next four
    query_2,
    new_key_1,
    new_key_2,
    new_value,
    qkv_row,  # where it finds them; unused if not WAITS, like the next four
    heads,
    slot,
    cos,
    sin,
    pairs,  # int16, the cache of the layer
    scales,
    table,
    blocks,  # of the first tile
    first_tile,
    first_key,
    end_key,
    kv_head,
    slope,  # [NUM_QUERIES], of ALiBi; unused if not HAS_ALIBI
    position,  # of the new token; unused if not HAS_ALIBI
    FORMAT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    SCALE: tl.constexpr,
    RAW_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    WAITS: tl.constexpr,  # whether the new token is there only after a wait, before which the first keys are read
    PDL: tl.constexpr,
):
    """The running softmax over the item's cached keys: (maximum, sum of exponentials, weighted sum of values).

    And the new token, which is loaded here if it `WAITS` and there are cached keys.
    """
    num_pairs: tl.constexpr = HEAD_DIM // 2
    even_query, odd_query = _split_query(query_1, query_2, NUM_QUERIES, HALF)
    key_dims, mask_key = joined_dims(num_pairs, HALF // 2)
    value_dims, mask_value = padded_dims(num_pairs, HEAD_DIM_PADDED // 2)
    offs_n = tl.arange(0, BLOCK_N)
    if FORMAT == "fp8":
        key_scale = tl.load(scales)

    log_max = tl.full([NUM_QUERIES], float("-inf"), tl.float32)
    exp_sum = tl.zeros([NUM_QUERIES], tl.float32)
    even_acc = tl.zeros([HEAD_DIM_PADDED // 2, NUM_QUERIES], tl.float32)
    odd_acc = tl.zeros([HEAD_DIM_PADDED // 2, NUM_QUERIES], tl.float32)
    for start in tl.range(first_tile, end_key, BLOCK_N, num_stages=NUM_STAGES):
        offsets = tile_offsets(blocks, start, kv_head, BLOCK_N, NUM_KV_HEADS, BLOCK_SIZE, num_pairs)
        if FORMAT == "int8":
            places = scales + tile_offsets(blocks, start, kv_head, BLOCK_N, NUM_KV_HEADS, BLOCK_SIZE, 1)
        # One tile ahead: with both loads in one iteration, the pipeline would need twice the stages.
        blocks = load_tile_blocks(table, start + BLOCK_N, BLOCK_N, BLOCK_SIZE)
        keys = start + offs_n
        mask_n = (keys >= first_key) & (keys < end_key)
        key = tl.load(pairs + offsets[:, None] + key_dims[None, :], mask=mask_n[:, None] & mask_key[None, :], other=0)
        values = pairs + offsets[None, :] + (BLOCK_SIZE * num_pairs + value_dims)[:, None]
        value = tl.load(values, mask=mask_n[None, :] & mask_value[:, None], other=0)
        if WAITS and start == first_tile:
            query_1, query_2, new_key_1, new_key_2, new_value = load_new_token(
                qkv_row, heads, kv_head, slot, cos, sin, FORMAT, ROTARY_DIM, HAS_PAIRS, NUM_KV_HEADS, GROUP,
                NUM_QUERIES, HEAD_DIM, HEAD_DIM_PADDED, HALF, DTYPE, PDL,
            )  # fmt: skip
            even_query, odd_query = _split_query(query_1, query_2, NUM_QUERIES, HALF)
        even_key, odd_key = split_pairs(key, FORMAT, IS_INTERPRETED)
        scores = tl.dot(even_key.to(query_1.dtype), even_query, input_precision="ieee")
        scores = tl.dot(odd_key.to(query_1.dtype), odd_query, scores, input_precision="ieee")
        if FORMAT == "int8":
            scores = scores * tl.load(places, mask=mask_n, other=0.0)[:, None]
        elif FORMAT == "fp8":
            scores = scores * key_scale
        if SOFTCAP > 0 or HAS_ALIBI:
            distance = (position - keys)[:, None]
            scores = adjust_scores(scores, slope[None, :], distance, RAW_SCALE, SOFTCAP, HAS_ALIBI)
        scores = tl.where(mask_n[:, None], scores, float("-inf"))
        new_max = tl.maximum(log_max, tl.max(scores, axis=0) * SCALE - LOG_LARGEST_WEIGHT)
        weights = tl.exp2(scores * SCALE - new_max[None, :])
        decay = tl.exp2(log_max - new_max)
        exp_sum = exp_sum * decay + tl.sum(weights, axis=0)
        if FORMAT == "int8":
            value_scales = tl.load(places + BLOCK_SIZE, mask=mask_n, other=0.0)
            weights = weigh_values(weights, value_scales[:, None], query_1.dtype)
        weights = weights.to(query_1.dtype)
        even_value, odd_value = split_pairs(value, FORMAT, IS_INTERPRETED)
        even_value, odd_value = even_value.to(query_1.dtype), odd_value.to(query_1.dtype)
        even_acc = tl.dot(even_value, weights, even_acc * decay[None, :], input_precision="ieee")
        odd_acc = tl.dot(odd_value, weights, odd_acc * decay[None, :], input_precision="ieee")
        log_max = new_max
    acc = tl.permute(tl.join(even_acc, odd_acc), (1, 0, 2))
    acc = tl.reshape(acc, (NUM_QUERIES, HEAD_DIM_PADDED))
    return log_max, exp_sum, acc, query_1, query_2, new_key_1, new_key_2, new_value


@triton.jit
def _split_query(query_1, query_2, NUM_QUERIES: tl.constexpr, HALF: tl.constexpr):
    """The even dimensions and the odd ones, each [HALF, NUM_QUERIES]."""
    even, odd = tl.split(tl.reshape(join_halves(query_1, query_2), (NUM_QUERIES, HALF, 2)))
    return opaque(tl.trans(even)), opaque(tl.trans(odd))
