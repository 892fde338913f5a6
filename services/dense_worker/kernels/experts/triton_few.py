"""The experts of a few tokens, in two kernels that stream the weights of each token's experts. Nothing is sorted.

The time is that of reading these weights. Tokens that share an expert read it once each, later ones from the cache.
Reference: `model.experts.routed_experts.RoutedExperts.mix`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.common.families.shape import Activation, ClampedSwiglu
from services.dense_worker.kernels.experts.triton_gates import activate, gate_name
from services.dense_worker.kernels.linear.triton_gemv import choose_gemv_tiles
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_DOWN_COLUMNS = 1024  # features in a step of the loop of `down`
_DOWN_ROWS = 4  # of weights in a program


def few_gate_up(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, hidden], rows contiguous
    experts: torch.Tensor,  # int32 [n, num_per_token]
    weight: torch.Tensor,  # [num_experts * 2 * intermediate, hidden], x's dtype
    bias: torch.Tensor | None,  # [weight's rows]
    num_valid: torch.Tensor | None,  # int32 [1]: rows from here on are padding; None: no padding
    out: torch.Tensor,  # [n * num_per_token, intermediate], contiguous
    activation: Activation,
    clamped: ClampedSwiglu | None,  # instead of `activation`
) -> None:
    """Writes activation(gate) * up of each pair of a token and an expert to `out`."""
    num_pairs, out_features = out.shape
    in_features = x.shape[1]
    tiles = choose_gemv_tiles(in_features, is_gated=True)
    num_parts = max(1, launcher.num_sms * tiles.programs_per_sm // num_pairs)  # of an expert's rows
    rows_per_program = triton.cdiv(triton.cdiv(out_features, num_parts), tiles.block_out) * tiles.block_out
    launcher(
        _few_gate_up_kernel,
        (triton.cdiv(out_features, rows_per_program), num_pairs),
        out,
        x,
        experts,
        weight,
        bias,
        num_valid,
        out_features,
        in_features,
        rows_per_program,
        x.stride(0),
        0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit,
        GATE=gate_name(activation, clamped),
        NUM_PER_TOKEN=experts.shape[1],
        IS_PADDED=in_features < tiles.block_in,
        BLOCK_IN=tiles.block_in,
        BLOCK_OUT=tiles.block_out,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


def few_down(
    launcher: KernelLauncher,
    activation: torch.Tensor,  # [n * num_per_token, intermediate], contiguous
    experts: torch.Tensor,  # int32 [n, num_per_token]
    weights: torch.Tensor,  # float32 [n, num_per_token]: of the experts
    weight: torch.Tensor,  # [num_experts * hidden, intermediate], activation's dtype
    bias: torch.Tensor | None,  # [weight's rows]
    shared: torch.Tensor | None,  # float32 [n, hidden], contiguous: added
    num_valid: torch.Tensor | None,  # int32 [1]: rows from here on become zero; None: no row does
    out: torch.Tensor,  # [n, hidden], contiguous
) -> None:
    """Writes the weighted sum of the products of each token's experts to `out`."""
    num_rows, out_features = out.shape
    in_features = activation.shape[1]
    block_in = min(triton.next_power_of_2(in_features), _DOWN_COLUMNS)
    launcher(
        _few_down_kernel,
        (triton.cdiv(out_features, _DOWN_ROWS), num_rows),
        out,
        activation,
        experts,
        weights,
        weight,
        bias,
        shared,
        num_valid,
        out_features,
        in_features,
        NUM_PER_TOKEN=experts.shape[1],
        IS_LOOP=in_features > block_in,
        BLOCK_IN=block_in,
        BLOCK_OUT=_DOWN_ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows_per_program"])
def _few_gate_up_kernel(
    out,
    x,
    experts,
    weight,
    bias,
    num_valid,
    out_features,
    in_features,
    rows_per_program,
    x_stride,
    alpha,
    limit,
    GATE: tl.constexpr,
    NUM_PER_TOKEN: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes `rows_per_program` features of one pair."""
    dtype: tl.constexpr = weight.dtype.element_ty
    begin(PDL)
    pair = tl.program_id(1)
    token = pair // NUM_PER_TOKEN
    is_valid = True
    if num_valid is not None:
        is_valid = token < tl.load(num_valid)
    if is_valid:
        start = tl.program_id(0) * rows_per_program
        end = tl.minimum(start + rows_per_program, out_features)
        columns = tl.arange(0, BLOCK_IN)
        is_column = columns < in_features if IS_PADDED else tl.full([BLOCK_IN], True, tl.int1)
        first_row = tl.load(experts + pair).to(tl.int64) * 2 * out_features
        first_weight = weight + first_row * in_features
        up_offset = out_features.to(tl.int64) * in_features
        x_row = tl.load(x + token.to(tl.int64) * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)
        for first in tl.range(start, end, BLOCK_OUT, num_stages=NUM_STAGES):
            rows = first + tl.arange(0, BLOCK_OUT)
            is_row = rows < end
            tile = first_weight + rows.to(tl.int64)[:, None] * in_features + columns[None, :]
            mask = is_row[:, None] & is_column[None, :]
            w = tl.load(tile, mask=mask, other=0.0)
            w_up = tl.load(tile + up_offset, mask=mask, other=0.0)
            gate = tl.sum(w.to(tl.float32) * x_row[None, :], 1)
            up = tl.sum(w_up.to(tl.float32) * x_row[None, :], 1)
            if bias is not None:
                its_bias = bias + first_row + rows
                gate += tl.load(its_bias, mask=is_row, other=0.0).to(tl.float32)
                up += tl.load(its_bias + out_features, mask=is_row, other=0.0).to(tl.float32)
            y = activate(gate, up, alpha, limit, GATE, dtype)
            tl.store(out + pair.to(tl.int64) * out_features + rows, y.to(dtype), mask=is_row)


@triton.jit
def _few_down_kernel(
    out,
    activation,
    experts,
    weights,
    weight,
    bias,
    shared,
    num_valid,
    out_features,
    in_features,
    NUM_PER_TOKEN: tl.constexpr,
    IS_LOOP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT features of one token."""
    begin(PDL)
    token = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row = rows < out_features
    total = tl.zeros([BLOCK_OUT], tl.float32)
    is_valid = True
    if num_valid is not None:
        is_valid = token < tl.load(num_valid)
    if is_valid:
        sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        if IS_LOOP:
            for first in tl.range(0, in_features, BLOCK_IN, num_stages=2):
                sums = _add_experts(
                    sums, activation, experts, weights, weight, token, rows, is_row, first, out_features, in_features,
                    NUM_PER_TOKEN, BLOCK_IN,
                )  # fmt: skip
        else:
            sums = _add_experts(
                sums, activation, experts, weights, weight, token, rows, is_row, 0, out_features, in_features,
                NUM_PER_TOKEN, BLOCK_IN,
            )  # fmt: skip
        total = tl.sum(sums, 1)
        if bias is not None:
            for i in tl.static_range(NUM_PER_TOKEN):
                pair = token * NUM_PER_TOKEN + i
                its_bias = bias + tl.load(experts + pair).to(tl.int64) * out_features + rows
                total += tl.load(weights + pair) * tl.load(its_bias, mask=is_row, other=0.0).to(tl.float32)
        if shared is not None:
            total += tl.load(shared + token.to(tl.int64) * out_features + rows, mask=is_row, other=0.0)
    target = out + token.to(tl.int64) * out_features + rows
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _add_experts(
    sums,
    activation,
    experts,
    weights,
    weight,
    token,
    rows,
    is_row,
    first,
    out_features,
    in_features,
    NUM_PER_TOKEN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """sums + the products of BLOCK_IN features for each expert of the token. No product waits for another's sum."""
    columns = first + tl.arange(0, BLOCK_IN)
    is_column = columns < in_features
    mask = is_row[:, None] & is_column[None, :]
    for i in tl.static_range(NUM_PER_TOKEN):
        pair = token * NUM_PER_TOKEN + i
        first_row = tl.load(experts + pair).to(tl.int64) * out_features
        w = tl.load(weight + (first_row + rows)[:, None] * in_features + columns[None, :], mask=mask, other=0.0)
        its_input = activation + pair.to(tl.int64) * in_features + columns
        values = tl.load(its_input, mask=is_column, other=0.0).to(tl.float32) * tl.load(weights + pair)
        sums += w.to(tl.float32) * values[None, :]
    return sums
