"""The recurrence of a gated delta layer as a Triton kernel, and the states that it reads and writes.

See `gated_delta.py` for the rule. A program is one warp. It has some value dimensions of one value head of one
sequence: a tile of the head's matrix, which stays in registers while the program goes through the tokens one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.attn_worker.layers.recurrent.triton_gated_delta_convolution import Convolved
from services.attn_worker.layers.recurrent.triton_parts import load_part
from services.common.families.shape import GatedDelta

_TILE_ELEMENTS = 1024  # at most, 32 registers of each thread


def run_parts(
    convolved: Convolved, out: torch.Tensor, parts: torch.Tensor, storage: StateStorage, layer: int, sizes: GatedDelta
) -> None:
    """Runs a wave of one layer after `convolve_items` of the same wave.

    out: [>= num_tokens, value_size], of the model's dtype, written in place. parts: int32 [num_parts, PART_FIELDS]. One
    without tokens is padding: its row of `out` becomes zero, and its target gets its source's state.
    """
    key_block = triton.next_power_of_2(sizes.key_dim)
    value_block = min(max(1, _TILE_ELEMENTS // key_block), triton.next_power_of_2(sizes.value_dim))
    _run_parts[(len(parts), sizes.num_value_heads, triton.cdiv(sizes.value_dim, value_block))](
        convolved.rows,
        convolved.norms,
        convolved.gates,
        out,
        parts,
        storage.matrices[layer],
        NUM_KEY_HEADS=sizes.num_key_heads,
        NUM_VALUE_HEADS=sizes.num_value_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=value_block,
        num_warps=1,
    )


@triton.jit
def _run_parts(
    rows_ptr,
    norms_ptr,
    gates_ptr,
    out_ptr,
    parts_ptr,
    matrices_ptr,  # float32 [num_slots, num_value_heads, key_dim, value_dim]
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = NUM_VALUE_HEADS * VALUE_DIM
    CONV_DIM: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    SLOT_SIZE: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    part_ptr, head, block = parts_ptr + 4 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, num_tokens, source, target = load_part(part_ptr)
    key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)

    key_dims = tl.arange(0, KEY_BLOCK)
    value_dims = block * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_key, is_value = key_dims < KEY_DIM, value_dims < VALUE_DIM
    tile = head * KEY_DIM * VALUE_DIM + key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    is_tile = is_key[:, None] & is_value[None, :]
    state = tl.load(matrices_ptr + source * SLOT_SIZE + tile, is_tile, 0.0)

    q_ptrs = rows_ptr + first_row * CONV_DIM + key_head * KEY_DIM + key_dims
    v_ptrs = rows_ptr + first_row * CONV_DIM + 2 * KEY_SIZE + head * VALUE_DIM + value_dims
    norm_ptr = norms_ptr + first_row * (2 * NUM_KEY_HEADS) + key_head
    gate_ptr = gates_ptr + first_row * (2 * NUM_VALUE_HEADS) + head
    out_ptrs = out_ptr + first_row * VALUE_SIZE + head * VALUE_DIM + value_dims
    if num_tokens == 0:
        tl.store(out_ptrs, tl.zeros((VALUE_BLOCK,), tl.float32).to(out_ptr.dtype.element_ty), is_value)

    for _ in range(num_tokens):
        q = tl.load(q_ptrs, is_key, 0.0).to(tl.float32) * tl.load(norm_ptr)
        k = tl.load(q_ptrs + KEY_SIZE, is_key, 0.0).to(tl.float32) * tl.load(norm_ptr + NUM_KEY_HEADS)
        v = tl.load(v_ptrs, is_value, 0.0).to(tl.float32)
        decay, strength = tl.load(gate_ptr), tl.load(gate_ptr + NUM_VALUE_HEADS)
        state = state * decay
        change = strength * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * change[None, :]
        values = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), is_value)
        q_ptrs += CONV_DIM
        v_ptrs += CONV_DIM
        norm_ptr += 2 * NUM_KEY_HEADS
        gate_ptr += 2 * NUM_VALUE_HEADS
        out_ptrs += VALUE_SIZE

    tl.store(matrices_ptr + target * SLOT_SIZE + tile, state, is_tile)
