"""Layers with a selective scan, as a Triton kernel. The reference is `run_selective_scan`.

A program has some channels of one sequence, whose vectors stay in registers, and goes through the tokens one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.attn_worker.layers.recurrent.triton_parts import load_part, softplus
from services.common.families.shape import SelectiveScan

_TILE_ELEMENTS = 512  # at most, 16 registers of each thread


def run_scan_parts(
    qkv: torch.Tensor,  # [>= num_tokens, row_size], of the model's dtype
    out: torch.Tensor,  # [>= num_tokens, num_channels], of the model's dtype, written in place
    parts: torch.Tensor,  # int32 [num_parts, PART_FIELDS] of `triton_parts`
    storage: StateStorage,
    layer: int,
    sizes: SelectiveScan,
) -> None:
    """Runs a wave of one layer. A part without tokens is padding: its row of `out` becomes zero."""
    state_block = triton.next_power_of_2(sizes.state_size)
    channel_block = max(1, _TILE_ELEMENTS // state_block)
    _scan_parts[(len(parts), triton.cdiv(sizes.num_channels, channel_block))](
        qkv,
        out,
        parts,
        storage.matrices[layer],
        storage.a_logs[layer],
        storage.d[layer],
        NUM_CHANNELS=sizes.num_channels,
        STATE_SIZE=sizes.state_size,
        STATE_BLOCK=state_block,
        CHANNEL_BLOCK=channel_block,
        num_warps=1,
    )


@triton.jit
def _scan_parts(
    qkv_ptr,
    out_ptr,
    parts_ptr,
    matrices_ptr,  # float32 [num_slots, num_channels, state_size]
    a_logs_ptr,
    d_ptr,
    NUM_CHANNELS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    ROW_SIZE: tl.constexpr = 2 * (NUM_CHANNELS + STATE_SIZE)
    SLOT_SIZE: tl.constexpr = NUM_CHANNELS * STATE_SIZE
    part_ptr = parts_ptr + 4 * tl.program_id(0)
    first_row, num_tokens, source, target = load_part(part_ptr)

    channels = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    state_dims = tl.arange(0, STATE_BLOCK)
    is_channel, is_state = channels < NUM_CHANNELS, state_dims < STATE_SIZE
    tile = channels[:, None] * STATE_SIZE + state_dims[None, :]
    is_tile = is_channel[:, None] & is_state[None, :]
    state = tl.load(matrices_ptr + source * SLOT_SIZE + tile, is_tile, 0.0)
    rates = tl.exp(tl.load(a_logs_ptr + tile, is_tile, 0.0))
    skip = tl.load(d_ptr + channels, is_channel, 0.0)

    x_ptrs = qkv_ptr + first_row * ROW_SIZE + channels
    b_ptrs = qkv_ptr + first_row * ROW_SIZE + NUM_CHANNELS + state_dims
    out_ptrs = out_ptr + first_row * NUM_CHANNELS + channels
    if num_tokens == 0:
        tl.store(out_ptrs, tl.zeros((CHANNEL_BLOCK,), out_ptr.dtype.element_ty), is_channel)

    for _ in range(num_tokens):
        x = tl.load(x_ptrs, is_channel, 0.0).to(tl.float32)
        raw = tl.load(x_ptrs + NUM_CHANNELS + 2 * STATE_SIZE, is_channel, 0.0).to(tl.float32)
        b = tl.load(b_ptrs, is_state, 0.0).to(tl.float32)
        c = tl.load(b_ptrs + STATE_SIZE, is_state, 0.0).to(tl.float32)
        time_step = softplus(raw)
        state = state * tl.exp(-rates * time_step[:, None]) + (time_step * x)[:, None] * b[None, :]
        values = tl.sum(state * c[None, :], axis=1) + skip * x
        tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), is_channel)
        x_ptrs += ROW_SIZE
        b_ptrs += ROW_SIZE
        out_ptrs += NUM_CHANNELS

    tl.store(matrices_ptr + target * SLOT_SIZE + tile, state, is_tile)
