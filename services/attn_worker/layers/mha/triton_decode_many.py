"""The loop of the decode kernel (`triton_decode.py`) for many sequences over keys and values of 16 bits.

With many sequences the card takes all the power that it may, and lowers its clock: an instruction less in this loop is
energy, with which products beside it run faster. So keys and values are the first factors of the products, which have
16 rows on the tensor cores, and queries, of which a program has few, are the 8 columns of the second one; the blocks of
a tile are scalars; and weights are added up over keys once, behind the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.attn_worker.layers.mha.triton_cache_layout import (
    cache_offset,
    join_halves,
    joined_dims,
    opaque,
    padded_dims,
)
from services.attn_worker.layers.mha.triton_new_token import load_new_token
from services.attn_worker.layers.mha.triton_scores import adjust_scores

PAIR = 32  # keys of a tile, in two halves, each in one block: sizes of blocks are multiples of 16


@triton.jit
def attend_many(
    query_1,  # [NUM_QUERIES, HALF], rotated
    query_2,
    new_key_1,  # [HALF], not rotated
    new_key_2,
    new_value,  # [HEAD_DIM_PADDED]
    qkv_row,
    heads,
    slot,
    cos,
    sin,
    cache,
    table,
    first_tile,
    first_key,
    end_key,
    kv_head,
    slope,  # [NUM_QUERIES], of ALiBi; unused if not HAS_ALIBI
    position,  # of the new token; unused if not HAS_ALIBI
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
    NUM_STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    WAITS: tl.constexpr,  # whether the new token is there only after a wait, before which the first keys are read
    PDL: tl.constexpr,
):
    """The running softmax over the item's cached keys: (maximum, sum of exponentials, weighted sum of values).

    And the new token, which is loaded here if it `WAITS` and there are cached keys.
    """
    query = opaque(tl.trans(join_halves(query_1, query_2))).to(query_1.dtype)
    key_dims, mask_key = joined_dims(HEAD_DIM, HALF)
    value_dims, mask_value = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    offs_n = tl.arange(0, 16)
    key_places = offs_n[:, None] * HEAD_DIM + key_dims[None, :]
    value_places = offs_n[None, :] * HEAD_DIM + value_dims[:, None]
    num_keys = (end_key - first_key).to(tl.uint32)
    log_max = tl.full([NUM_QUERIES], float("-inf"), tl.float32)
    sums = tl.zeros([16, NUM_QUERIES], tl.float32)
    acc = tl.zeros([HEAD_DIM_PADDED, NUM_QUERIES], tl.float32)
    block = tl.load(table + first_tile // BLOCK_SIZE)
    later_block = tl.load(table + (first_tile + 16) // BLOCK_SIZE)
    for start in tl.range(first_tile, end_key, 32, num_stages=NUM_STAGES):
        later = start + 16
        place, later_place = start % BLOCK_SIZE, later % BLOCK_SIZE
        keys = cache + cache_offset(block, kv_head, place, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        later_keys = cache + cache_offset(later_block, kv_head, later_place, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        values, later_values = keys + BLOCK_SIZE * HEAD_DIM, later_keys + BLOCK_SIZE * HEAD_DIM
        # One tile ahead: with both loads in one iteration, the pipeline would need twice the stages.
        block = tl.load(table + (start + 32) // BLOCK_SIZE)
        later_block = tl.load(table + (later + 32) // BLOCK_SIZE)
        # One comparison for both ends: a key before the first one becomes a large number.
        mask = (offs_n + (start - first_key)).to(tl.uint32) < num_keys
        later_mask = (offs_n + (later - first_key)).to(tl.uint32) < num_keys
        key = tl.load(keys + key_places, mask=mask[:, None] & mask_key[None, :], other=0.0)
        value = tl.load(values + value_places, mask=mask[None, :] & mask_value[:, None], other=0.0)
        later_key = tl.load(later_keys + key_places, mask=later_mask[:, None] & mask_key[None, :], other=0.0)
        later_value = tl.load(later_values + value_places, mask=later_mask[None, :] & mask_value[:, None], other=0.0)
        if WAITS and start == first_tile:
            query_1, query_2, new_key_1, new_key_2, new_value = load_new_token(
                qkv_row, heads, kv_head, slot, cos, sin, "plain", ROTARY_DIM, HAS_PAIRS, NUM_KV_HEADS, GROUP,
                NUM_QUERIES, HEAD_DIM, HEAD_DIM_PADDED, HALF, DTYPE, PDL,
            )  # fmt: skip
            query = opaque(tl.trans(join_halves(query_1, query_2))).to(DTYPE)
        scores = tl.dot(key, query, input_precision="ieee")
        later_scores = tl.dot(later_key, query, input_precision="ieee")
        if SOFTCAP > 0 or HAS_ALIBI:
            distance = (position - start - offs_n)[:, None]
            scores = adjust_scores(scores, slope[None, :], distance, RAW_SCALE, SOFTCAP, HAS_ALIBI)
            later_scores = adjust_scores(later_scores, slope[None, :], distance - 16, RAW_SCALE, SOFTCAP, HAS_ALIBI)
        scores = tl.where(mask[:, None], scores, float("-inf"))
        later_scores = tl.where(later_mask[:, None], later_scores, float("-inf"))
        new_max = tl.maximum(log_max, tl.max(tl.maximum(scores, later_scores), axis=0) * SCALE)
        weights = tl.exp2(scores * SCALE - new_max[None, :])
        later_weights = tl.exp2(later_scores * SCALE - new_max[None, :])
        decay = tl.exp2(log_max - new_max)
        sums = sums * decay[None, :] + (weights + later_weights)
        acc = tl.dot(value, weights.to(query.dtype), acc * decay[None, :], input_precision="ieee")
        acc = tl.dot(later_value, later_weights.to(query.dtype), acc, input_precision="ieee")
        log_max = new_max
    return log_max, tl.sum(sums, axis=0), tl.trans(acc), query_1, query_2, new_key_1, new_key_2, new_value
