"""Layers with a state space or a short convolution, as Triton kernels. The reference is `TorchRecurrences`.

The convolution of all tokens runs side by side. The recurrence goes through the tokens of a sequence one after the
other, or in chunks of 64 by products of tiles (see `state_space.py:run_chunks`): a program has some dimensions of one
head, and keeps its tile of the head's matrix in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.recurrent.state_space import CHUNK_SIZE
from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.attn_worker.layers.recurrent.triton_gated_delta_chunks import narrow_product
from services.attn_worker.layers.recurrent.triton_parts import convolve_row, keep_last_rows, load_part, softplus
from services.common.families.shape import ShortConvolution, StateSpace

_CHANNELS = 256  # of a program
_TILE_ELEMENTS = 1024  # at most, 32 registers of each thread
_CHUNKED_DIMS = 32  # of a head, for a program that runs chunks


def convolve_channels(
    qkv: torch.Tensor,  # [>= num_tokens, row_size], of the model's dtype
    out: torch.Tensor,  # [max_num_tokens, conv_dim], of the model's dtype
    items: torch.Tensor,  # int32 [num_items, ITEM_FIELDS] of `triton_parts`
    storage: StateStorage,
    layer: int,
    sizes: StateSpace | ShortConvolution,
) -> None:
    """Fills the items' rows of `out`, after SiLU for Mamba's, and keeps the last rows of each part in its target.

    An item without tokens copies the rows that its source keeps to its target, and its row of `out` becomes zero.
    """
    _convolve_channels[(len(items), triton.cdiv(sizes.conv_dim, _CHANNELS))](
        qkv,
        out,
        items,
        storage.past_rows[layer],
        storage.conv[layer],
        storage.conv_bias.get(layer),
        CONV_DIM=sizes.conv_dim,
        ROW_SIZE=sizes.row_size,
        CONV_SIZE=sizes.conv_size,
        IS_ACTIVATED=isinstance(sizes, StateSpace) or sizes.is_activated,
        BLOCK=_CHANNELS,
        num_warps=2,
    )


def run_state_space_parts(
    qkv: torch.Tensor,  # [>= num_tokens, row_size], of the model's dtype
    convolved: torch.Tensor,  # what `convolve_channels` of the same wave has written
    out: torch.Tensor,  # [>= num_tokens, value_size], of the model's dtype, written in place
    parts: torch.Tensor,  # int32 [num_parts, PART_FIELDS] of `triton_parts`
    storage: StateStorage,
    layer: int,
    sizes: StateSpace,
) -> None:
    """Runs a wave of one layer, token by token. A part without tokens is padding: its row of `out` becomes zero."""
    state_block = triton.next_power_of_2(sizes.state_size)
    head_block = min(max(1, _TILE_ELEMENTS // state_block), triton.next_power_of_2(sizes.head_dim))
    grid = len(parts), sizes.num_heads, triton.cdiv(sizes.head_dim, head_block)
    arguments, shape = _arguments(storage, layer, sizes)
    blocks = {"STATE_BLOCK": state_block, "HEAD_BLOCK": head_block}
    _run_parts[grid](qkv, convolved, out, parts, *arguments, **shape, **blocks, num_warps=1)


def run_chunked_state_space(
    qkv: torch.Tensor,
    convolved: torch.Tensor,
    out: torch.Tensor,
    parts: torch.Tensor,
    storage: StateStorage,
    layer: int,
    sizes: StateSpace,
) -> None:
    """Runs parts of a wave, each with tokens, as `run_state_space_parts` does, but in chunks."""
    head_block = min(_CHUNKED_DIMS, max(16, triton.next_power_of_2(sizes.head_dim)))
    grid = len(parts), sizes.num_heads, triton.cdiv(sizes.head_dim, head_block)
    arguments, shape = _arguments(storage, layer, sizes)
    _run_chunks[grid](
        qkv,
        convolved,
        out,
        parts,
        *arguments,
        **shape,
        STATE_BLOCK=max(16, triton.next_power_of_2(sizes.state_size)),
        HEAD_BLOCK=head_block,
        CHUNK=CHUNK_SIZE,
        # Three products of 10 bits are almost float32; one has more bits than the values of models in 16.
        PRECISION="tf32x3" if convolved.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=1,
    )


def _arguments(storage: StateStorage, layer: int, sizes: StateSpace) -> tuple[tuple[Any, ...], dict[str, int]]:
    """What both kernels of the recurrence get: states, weights and limits, and constants."""
    tensors = (each[layer] for each in (storage.matrices, storage.a_log, storage.dt_bias, storage.d))
    shape = {
        "NUM_HEADS": sizes.num_heads,
        "HEAD_DIM": sizes.head_dim,
        "STATE_SIZE": sizes.state_size,
        "NUM_GROUPS": sizes.num_groups,
    }
    return (*tensors, *sizes.time_step_limits), shape


@triton.jit
def _convolve_channels(
    qkv_ptr,
    out_ptr,
    items_ptr,
    past_ptr,  # float32 [num_slots, conv_size - 1, conv_dim]
    conv_ptr,  # float32 [conv_dim, conv_size]
    bias_ptr,  # float32 [conv_dim]
    CONV_DIM: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    CONV_SIZE: tl.constexpr,
    IS_ACTIVATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels, for the tokens of one item."""
    PAST: tl.constexpr = CONV_SIZE - 1
    item_ptr = items_ptr + 6 * tl.program_id(0)
    first_row, num_tokens, source, target = load_part(item_ptr)
    start, end = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CONV_DIM
    new_ptr = qkv_ptr + first_row * ROW_SIZE
    old_ptr = past_ptr + source * PAST * CONV_DIM
    if num_tokens == 0:
        tl.store(out_ptr + first_row * CONV_DIM + channels, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask)

    for token in range(start, end):
        total = convolve_row(
            new_ptr, old_ptr, conv_ptr, token, channels, mask, BLOCK, CONV_SIZE, CONV_DIM, ROW_SIZE
        )
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channels, mask, 0.0)
        if IS_ACTIVATED:
            total = total.to(out_ptr.dtype.element_ty).to(tl.float32)  # as torch rounds
            total = total * tl.sigmoid(total)
        tl.store(out_ptr + (first_row + token) * CONV_DIM + channels, total.to(out_ptr.dtype.element_ty), mask)

    if end == num_tokens:
        keep_last_rows(new_ptr, old_ptr, past_ptr, target, num_tokens, channels, mask, CONV_DIM, ROW_SIZE, PAST)


@triton.jit
def _run_parts(
    qkv_ptr,
    convolved_ptr,
    out_ptr,
    parts_ptr,
    matrices_ptr,  # float32 [num_slots, num_heads, state_size, head_dim]
    a_log_ptr,
    dt_bias_ptr,
    d_ptr,
    least_time_step,
    greatest_time_step,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    VALUE_SIZE: tl.constexpr = NUM_HEADS * HEAD_DIM
    GROUP_SIZE: tl.constexpr = NUM_GROUPS * STATE_SIZE
    CONV_DIM: tl.constexpr = VALUE_SIZE + 2 * GROUP_SIZE
    ROW_SIZE: tl.constexpr = CONV_DIM + NUM_HEADS
    SLOT_SIZE: tl.constexpr = VALUE_SIZE * STATE_SIZE
    part_ptr, head, block = parts_ptr + 4 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, num_tokens, source, target = load_part(part_ptr)
    group = head // (NUM_HEADS // NUM_GROUPS)

    state_dims, head_dims = tl.arange(0, STATE_BLOCK), block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    is_state, is_head = state_dims < STATE_SIZE, head_dims < HEAD_DIM
    tile = head * STATE_SIZE * HEAD_DIM + state_dims[:, None] * HEAD_DIM + head_dims[None, :]
    is_tile = is_state[:, None] & is_head[None, :]
    state = tl.load(matrices_ptr + source * SLOT_SIZE + tile, is_tile, 0.0)

    x_ptrs = convolved_ptr + first_row * CONV_DIM + head * HEAD_DIM + head_dims
    b_ptrs = convolved_ptr + first_row * CONV_DIM + VALUE_SIZE + group * STATE_SIZE + state_dims
    dt_ptr = qkv_ptr + first_row * ROW_SIZE + CONV_DIM + head
    out_ptrs = out_ptr + first_row * VALUE_SIZE + head * HEAD_DIM + head_dims
    rate, bias, skip = tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    if num_tokens == 0:
        tl.store(out_ptrs, tl.zeros((HEAD_BLOCK,), tl.float32).to(out_ptr.dtype.element_ty), is_head)

    for _ in range(num_tokens):
        x = tl.load(x_ptrs, is_head, 0.0).to(tl.float32)
        b = tl.load(b_ptrs, is_state, 0.0).to(tl.float32)
        c = tl.load(b_ptrs + GROUP_SIZE, is_state, 0.0).to(tl.float32)
        time_step = _time_steps(tl.load(dt_ptr).to(tl.float32) + bias, least_time_step, greatest_time_step)
        state = state * tl.exp(-rate * time_step) + b[:, None] * (time_step * x)[None, :]
        values = tl.sum(state * c[:, None], axis=0) + skip * x
        tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), is_head)
        x_ptrs += CONV_DIM
        b_ptrs += CONV_DIM
        dt_ptr += ROW_SIZE
        out_ptrs += VALUE_SIZE

    tl.store(matrices_ptr + target * SLOT_SIZE + tile, state, is_tile)


@triton.jit
def _run_chunks(
    qkv_ptr,
    convolved_ptr,
    out_ptr,
    parts_ptr,
    matrices_ptr,  # float32 [num_slots, num_heads, state_size, head_dim]
    a_log_ptr,
    dt_bias_ptr,
    d_ptr,
    least_time_step,
    greatest_time_step,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    VALUE_SIZE: tl.constexpr = NUM_HEADS * HEAD_DIM
    GROUP_SIZE: tl.constexpr = NUM_GROUPS * STATE_SIZE
    CONV_DIM: tl.constexpr = VALUE_SIZE + 2 * GROUP_SIZE
    ROW_SIZE: tl.constexpr = CONV_DIM + NUM_HEADS
    SLOT_SIZE: tl.constexpr = VALUE_SIZE * STATE_SIZE
    part_ptr, head, block = parts_ptr + 4 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, num_tokens, source, target = load_part(part_ptr)
    group = head // (NUM_HEADS // NUM_GROUPS)

    tokens, state_dims = tl.arange(0, CHUNK), tl.arange(0, STATE_BLOCK)
    head_dims = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    is_state, is_head = state_dims < STATE_SIZE, head_dims < HEAD_DIM
    tile = head * STATE_SIZE * HEAD_DIM + state_dims[:, None] * HEAD_DIM + head_dims[None, :]
    is_tile = is_state[:, None] & is_head[None, :]
    state = tl.load(matrices_ptr + source * SLOT_SIZE + tile, is_tile, 0.0)
    rate, bias, skip = tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)

    for start in range(0, num_tokens, CHUNK):
        rows, is_token = first_row + start + tokens, start + tokens < num_tokens
        is_row = is_token[:, None]
        x_ptrs = convolved_ptr + rows[:, None] * CONV_DIM + head * HEAD_DIM + head_dims[None, :]
        x = tl.load(x_ptrs, is_row & is_head[None, :], 0.0).to(tl.float32)
        b_ptrs = convolved_ptr + rows[:, None] * CONV_DIM + VALUE_SIZE + group * STATE_SIZE + state_dims[None, :]
        b = tl.load(b_ptrs, is_row & is_state[None, :], 0.0)
        c = tl.load(b_ptrs + GROUP_SIZE, is_row & is_state[None, :], 0.0)
        raw = tl.load(qkv_ptr + rows * ROW_SIZE + CONV_DIM + head, is_token, 0.0).to(tl.float32) + bias
        time_steps = tl.where(is_token, _time_steps(raw, least_time_step, greatest_time_step), 0.0)
        values = time_steps[:, None] * x
        sums, last = -rate * tl.cumsum(time_steps, axis=0), -rate * tl.sum(time_steps, axis=0)

        # Exponents above the diagonal are positive and could overflow, so they are cut before exp.
        pairs = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        scores = pairs * tl.dot(c, tl.trans(b), input_precision=PRECISION)
        scores = tl.where(tokens[:, None] >= tokens[None, :], scores, 0.0)
        found = tl.exp(sums)[:, None] * narrow_product(c, state, PRECISION)
        found += tl.dot(scores, values, input_precision=PRECISION) + skip * x
        kept = tl.exp(tl.minimum(last - sums, 0.0))[:, None] * values
        state = tl.exp(last) * state + narrow_product(tl.trans(b), kept, PRECISION)
        out_ptrs = out_ptr + rows[:, None] * VALUE_SIZE + head * HEAD_DIM + head_dims[None, :]
        tl.store(out_ptrs, found.to(out_ptr.dtype.element_ty), is_row & is_head[None, :])

    tl.store(matrices_ptr + target * SLOT_SIZE + tile, state, is_tile)


@triton.jit
def _time_steps(raw, least, greatest):
    """softplus, within the limits."""
    return tl.minimum(tl.maximum(softplus(raw), least), greatest)
