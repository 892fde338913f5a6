"""What the decode kernel (`triton_decode.py`) reads of its step: the new token's queries, key and value."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.attn_worker.layers.mha.triton_cache_layout import padded_dims
from services.attn_worker.layers.mha.triton_quantized import to_factor
from services.attn_worker.layers.mha.triton_rope_append import pair_sources, rotate


@triton.jit
def load_new_token(
    qkv_row,
    heads,  # [NUM_QUERIES]
    kv_head,
    slot,  # negative: the item has no new token
    cos,  # [HALF]
    sin,
    FORMAT: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Waits for the step's qkv: halves of the rotated queries and of the unrotated new key, and its value.

    Then lets the product behind the next flag be launched: an SM whose programs have ended reads weights while others
    read keys. By then all programs of this kernel have their place.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    half: tl.constexpr = HEAD_DIM // 2
    offs_h = tl.arange(0, HALF)
    mask_h = offs_h < half
    mask_q = (tl.arange(0, NUM_QUERIES) < GROUP)[:, None] & mask_h[None, :]
    offs_d, mask_d = padded_dims(HEAD_DIM, HEAD_DIM_PADDED)
    is_plain: tl.constexpr = ROTARY_DIM == HEAD_DIM and not HAS_PAIRS
    source = qkv_row + heads[:, None] * HEAD_DIM + offs_h[None, :]
    if is_plain:
        query_1 = tl.load(source, mask=mask_q, other=0.0).to(tl.float32)
        query_2 = tl.load(source + half, mask=mask_q, other=0.0).to(tl.float32)
    else:
        source = qkv_row + heads[:, None] * HEAD_DIM
        first, second = pair_sources(source, offs_h[None, :], HEAD_DIM, ROTARY_DIM, HAS_PAIRS)
        query_1 = tl.load(first, mask=mask_q, other=0.0).to(tl.float32)
        query_2 = tl.load(second, mask=mask_q, other=0.0).to(tl.float32)
    # The new token is not read from the cache: its item adds it after its cached keys.
    source = qkv_row + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM
    if is_plain:
        new_key_1 = tl.load(source + offs_h, mask=mask_h & (slot >= 0), other=0.0).to(tl.float32)
        new_key_2 = tl.load(source + half + offs_h, mask=mask_h & (slot >= 0), other=0.0).to(tl.float32)
    else:
        first, second = pair_sources(source, offs_h, HEAD_DIM, ROTARY_DIM, HAS_PAIRS)
        new_key_1 = tl.load(first, mask=mask_h & (slot >= 0), other=0.0).to(tl.float32)
        new_key_2 = tl.load(second, mask=mask_h & (slot >= 0), other=0.0).to(tl.float32)
    new_value = tl.load(source + NUM_KV_HEADS * HEAD_DIM + offs_d, mask=mask_d & (slot >= 0), other=0.0)
    query_1, query_2 = rotate(query_1, query_2, cos[None, :], sin[None, :])
    if FORMAT == "plain":
        query_1, query_2 = query_1.to(DTYPE), query_2.to(DTYPE)
    else:
        query_1, query_2 = to_factor(query_1, DTYPE), to_factor(query_2, DTYPE)
    return query_1, query_2, new_key_1, new_key_2, new_value
