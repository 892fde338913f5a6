"""What Triton kernels of layers with states have alike: the fields of a part, the convolution of its rows, softplus.

A part is some tokens of a sequence in a wave. It reads the state of its source slot, and leaves one in its target.
"""

from __future__ import annotations

import triton
import triton.language as tl

PART_FIELDS = 4  # int32: first row, number of tokens, source, target
ITEM_FIELDS = 6  # of some tokens of a part: the part's fields, then their first token in the part, and their end


@triton.jit
def load_part(part_ptr):
    """First row, number of tokens, source and target of a part, or of an item's part."""
    first_row, num_tokens = tl.load(part_ptr).to(tl.int64), tl.load(part_ptr + 1)
    source, target = tl.load(part_ptr + 2).to(tl.int64), tl.load(part_ptr + 3).to(tl.int64)
    return first_row, num_tokens, source, target


@triton.jit
def convolve_row(
    new_ptr,  # the first row of a part
    old_ptr,  # float32 [PAST, CONV_DIM]: rows before it, which its source keeps
    conv_ptr,  # float32 [CONV_DIM, CONV_SIZE]
    token,
    channels,
    mask,
    BLOCK: tl.constexpr,
    CONV_SIZE: tl.constexpr,
    CONV_DIM: tl.constexpr,
    ROW_SIZE: tl.constexpr,
):
    """Channels of the convolution at a token of a part, float32 [BLOCK]."""
    PAST: tl.constexpr = CONV_SIZE - 1
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(CONV_SIZE):
        weight = tl.load(conv_ptr + channels * CONV_SIZE + tap, mask, 0.0)
        row = token + tap - PAST
        total += weight * _load_row(new_ptr, old_ptr, row, channels, mask, ROW_SIZE, CONV_DIM, PAST)
    return total


@triton.jit
def keep_last_rows(
    new_ptr,
    old_ptr,
    past_ptr,  # float32 [num_slots, PAST, CONV_DIM]
    target,
    num_tokens,
    channels,
    mask,
    CONV_DIM: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    PAST: tl.constexpr,
):
    """Keeps channels of a part's last rows in its target, for the next part of the sequence."""
    for kept in tl.static_range(PAST):
        row = num_tokens - PAST + kept
        values = _load_row(new_ptr, old_ptr, row, channels, mask, ROW_SIZE, CONV_DIM, PAST)
        tl.store(past_ptr + (target * PAST + kept) * CONV_DIM + channels, values, mask)


@triton.jit
def _load_row(
    new_ptr, old_ptr, row, channels, mask, ROW_SIZE: tl.constexpr, CONV_DIM: tl.constexpr, PAST: tl.constexpr
):
    """Channels of a row of a part, float32. Rows before its first one are those that its source keeps."""
    new = tl.load(new_ptr + row * ROW_SIZE + channels, mask & (row >= 0), 0.0).to(tl.float32)
    return new + tl.load(old_ptr + (row + PAST) * CONV_DIM + channels, mask & (row < 0), 0.0)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as torch computes it: x itself above 20."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
