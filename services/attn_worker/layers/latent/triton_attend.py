"""The loop of latent attention over cached keys, shared by the Triton kernels for decode rows and for prompts.

The cache of a layer is [num_blocks + 1, 1, 1, block_size, head_dim]: one key for each token, its rotated dimensions
first. The others are the latent vector, which is also the value, so a tile of keys is loaded once and multiplied twice.
A program's rows are query heads of one token or of several: all read the same keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.attn_worker.layers.mha.triton_cache_layout import (
    joined_dims,
    load_tile_blocks,
    offsets_in_blocks,
    padded_dims,
)
from services.attn_worker.layers.mha.triton_rope_append import rotate

MAX_ROWS = 64  # of a tile: their sums of 512 latent dimensions fill half of an SM's registers


@triton.jit
def load_rotated(
    source,  # addresses of heads
    angles,  # addresses of their tokens' angles, of the same shape
    mask,
    ROTARY_DIM: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Loads the rotated part of heads, and rotates it: two halves in float32, of the shape of `source` and [HALF]."""
    half: tl.constexpr = ROTARY_DIM // 2
    offs_h = tl.arange(0, HALF)
    mask_h = mask[:, None] & (offs_h < half)[None, :]
    if HAS_PAIRS:
        first, second = 2 * offs_h, 2 * offs_h + 1
    else:
        first, second = offs_h, offs_h + half
    first_half = tl.load(source[:, None] + first[None, :], mask=mask_h, other=0.0).to(tl.float32)
    second_half = tl.load(source[:, None] + second[None, :], mask=mask_h, other=0.0).to(tl.float32)
    cos = tl.load(angles[:, None] + offs_h[None, :], mask=mask_h, other=0.0)
    sin = tl.load(angles[:, None] + (half + offs_h)[None, :], mask=mask_h, other=0.0)
    return rotate(first_half, second_half, cos, sin)


@triton.jit
def attend_latent(
    acc,  # float32 [NUM_ROWS, RANK_PADDED]
    exp_sum,  # float32 [NUM_ROWS]
    log_max,  # float32 [NUM_ROWS]
    rotated,  # halves of the queries' rotated part, joined: [NUM_ROWS, 2 * HALF]
    latent,  # the queries' other dimensions: [NUM_ROWS, RANK_PADDED]
    cache,
    table,
    first_key,
    end_key,
    last_keys,  # int32 [NUM_ROWS], the last key that each row sees
    SCALE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Adds keys [first_key, end_key) to the running softmax. Each row must have seen a key after the first tile."""
    head_dim: tl.constexpr = ROTARY_DIM + RANK
    dims, mask_dims = joined_dims(ROTARY_DIM, HALF)
    offs_r, mask_r = padded_dims(RANK, RANK_PADDED)
    offs_n = tl.arange(0, BLOCK_N)
    # Without keys there is no tile at all (not an empty one).
    first_tile = tl.where(first_key < end_key, first_key // BLOCK_N * BLOCK_N, end_key)
    blocks = load_tile_blocks(table, first_tile, BLOCK_N, BLOCK_SIZE)
    for start in tl.range(first_tile, end_key, BLOCK_N, num_stages=NUM_STAGES):
        slots = blocks.to(tl.int64) * BLOCK_SIZE + offsets_in_blocks(start, BLOCK_N, BLOCK_SIZE)
        cached = cache + slots[:, None] * head_dim
        # One tile ahead: with both loads in one iteration, the pipeline would need twice the stages.
        blocks = load_tile_blocks(table, start + BLOCK_N, BLOCK_N, BLOCK_SIZE)
        keys = start + offs_n
        mask_n = (keys >= first_key) & (keys < end_key)
        key_latent = tl.load(cached + (ROTARY_DIM + offs_r)[None, :], mask=mask_n[:, None] & mask_r[None, :], other=0.0)
        key_rotated = tl.load(cached + dims[None, :], mask=mask_n[:, None] & mask_dims[None, :], other=0.0)
        scores = tl.dot(rotated, tl.trans(key_rotated), input_precision="ieee")
        scores = tl.dot(latent, tl.trans(key_latent), scores, input_precision="ieee")
        is_seen = mask_n[None, :] & (keys[None, :] <= last_keys[:, None])
        scores = tl.where(is_seen, scores * SCALE, float("-inf"))
        new_max = tl.maximum(log_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(log_max - new_max)
        exp_sum = exp_sum * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latent.dtype), key_latent, acc * decay[:, None], input_precision="ieee")
        log_max = new_max
    return acc, exp_sum, log_max
