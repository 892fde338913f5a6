"""The part of a gated delta layer that has no recurrence, as a Triton kernel: convolution, SiLU, norms and gates.

See `gated_delta.py` for the formulas. Its programs share nothing, so tokens of one sequence run side by side; what they
compute is the input of `triton_gated_delta.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.recurrent.gated_delta import NORM_EPS
from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.attn_worker.layers.recurrent.triton_parts import convolve_row, keep_last_rows, load_part, softplus
from services.common.families.shape import GatedDelta

ITEM_TOKENS = 16  # at most, of an item


@dataclass(frozen=True, slots=True)
class Convolved:
    """What the recurrence reads of a step's rows in one layer; the layers use it one after the other."""

    rows: torch.Tensor  # [max_num_tokens, conv_dim], of the model's dtype: q, k and v after SiLU
    norms: torch.Tensor  # float32 [max_num_tokens, 2 * num_key_heads]: factors of each head of q, then of k
    gates: torch.Tensor  # float32 [max_num_tokens, 2 * num_value_heads]: decay of each value head, then strength


def convolve_items(
    qkv: torch.Tensor, convolved: Convolved, items: torch.Tensor, storage: StateStorage, layer: int, sizes: GatedDelta
) -> None:
    """Fills the items' rows of `convolved`, and keeps the last rows of each part in its target.

    qkv: [>= num_tokens, row_size], of the model's dtype. items: int32 [num_items, ITEM_FIELDS]; one without tokens
    copies the rows that its source keeps to its target.
    """
    _convolve_items[(len(items), 2 * sizes.num_key_heads + sizes.num_value_heads)](
        qkv,
        convolved.rows,
        convolved.norms,
        convolved.gates,
        items,
        storage.past_rows[layer],
        storage.conv[layer],
        storage.a_log[layer],
        storage.dt_bias[layer],
        NUM_KEY_HEADS=sizes.num_key_heads,
        NUM_VALUE_HEADS=sizes.num_value_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        CONV_SIZE=sizes.conv_size,
        BLOCK=triton.next_power_of_2(max(sizes.key_dim, sizes.value_dim)),
        SCALE=sizes.key_dim**-0.5,
        NORM_EPS=NORM_EPS,
        num_warps=1,
    )


@triton.jit
def _convolve_items(
    qkv_ptr,
    rows_ptr,
    norms_ptr,
    gates_ptr,
    items_ptr,
    past_ptr,  # float32 [num_slots, conv_size - 1, conv_dim]
    conv_ptr,  # float32 [conv_dim, conv_size]
    a_log_ptr,
    dt_bias_ptr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """One head of q, k or v, for the tokens of one item."""
    CONV_DIM: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM
    ROW_SIZE: tl.constexpr = CONV_DIM + 2 * NUM_VALUE_HEADS
    PAST: tl.constexpr = CONV_SIZE - 1
    item_ptr, head = items_ptr + 6 * tl.program_id(0), tl.program_id(1)
    first_row, num_tokens, source, target = load_part(item_ptr)
    start, end = tl.load(item_ptr + 4), tl.load(item_ptr + 5)

    value_head = head - 2 * NUM_KEY_HEADS  # negative: a head of q or k
    dims = tl.arange(0, BLOCK)
    if value_head < 0:
        channels = head * KEY_DIM + dims
        mask = dims < KEY_DIM
    else:
        channels = 2 * NUM_KEY_HEADS * KEY_DIM + value_head * VALUE_DIM + dims
        mask = dims < VALUE_DIM
    new_ptr = qkv_ptr + first_row * ROW_SIZE
    old_ptr = past_ptr + source * PAST * CONV_DIM

    for token in range(start, end):
        total = convolve_row(
            new_ptr, old_ptr, conv_ptr, token, channels, mask, BLOCK, CONV_SIZE, CONV_DIM, ROW_SIZE
        )
        total = total.to(rows_ptr.dtype.element_ty).to(tl.float32)  # as torch rounds
        values = (total * tl.sigmoid(total)).to(rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + (first_row + token) * CONV_DIM + channels, values, mask)
        if value_head < 0:
            rounded = values.to(tl.float32)
            norm = tl.rsqrt(tl.sum(rounded * rounded) + NORM_EPS) * tl.where(head < NUM_KEY_HEADS, SCALE, 1.0)
            tl.store(norms_ptr + (first_row + token) * (2 * NUM_KEY_HEADS) + head, norm)
        else:
            b_ptr = new_ptr + token * ROW_SIZE + CONV_DIM + value_head
            strength = tl.sigmoid(tl.load(b_ptr).to(tl.float32))
            x = tl.load(b_ptr + NUM_VALUE_HEADS).to(tl.float32) + tl.load(dt_bias_ptr + value_head)
            time_step = softplus(x)
            decay = tl.exp(-tl.exp(tl.load(a_log_ptr + value_head)) * time_step)
            gate_ptr = gates_ptr + (first_row + token) * (2 * NUM_VALUE_HEADS) + value_head
            tl.store(gate_ptr, decay)
            tl.store(gate_ptr + NUM_VALUE_HEADS, strength)

    if end == num_tokens:
        keep_last_rows(new_ptr, old_ptr, past_ptr, target, num_tokens, channels, mask, CONV_DIM, ROW_SIZE, PAST)
