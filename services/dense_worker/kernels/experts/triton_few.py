"""The experts of a few tokens, in three kernels that stream weights: the router's, `gate_up` and `down`.

The time is that of reading these weights and of the kernels' beginnings. So the router's kernel normalises its tokens
first, and its program that ends last chooses; `down` reads weights while `gate_up` still runs. Nothing is sorted:
tokens that share an expert read it once each, later ones from the cache.
Reference: `model.experts.routed_experts.RoutedExperts.mix`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.common.families.shape import Activation, ClampedSwiglu
from services.dense_worker.kernels.experts.triton_gates import activate, gate_name
from services.dense_worker.kernels.experts.triton_router import Routing, choose_for_token
from services.dense_worker.kernels.linear.triton_gemv import choose_gemv_tiles
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.kernels.norm.triton_norm import normalize_as, operands_of
from services.dense_worker.kernels.triton_launch import KernelLauncher

_DOWN_COLUMNS = 1024  # features in a step of the loop of `down`
_DOWN_ROWS = 4  # of weights in a program of `down`
# Without a loop, if the experts of a token times the bytes of a number are at most so many: registers hold more rows,
# and the weights of some experts, which are read before the inputs are there.
_HELD_BYTES, _HELD_ROWS, _HELD_AHEAD = 16, 8, 2
_MAX_AT_ONCE = 128  # experts of which each is compared with all others


def few_router(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, hidden], rows contiguous
    norm: Norm | None,  # of x, before the product
    normed: torch.Tensor | None,  # [n, hidden], rows contiguous: norm(x), if there is a norm
    weight: torch.Tensor,  # [num_experts, hidden], x's dtype
    bias: torch.Tensor | None,  # [num_experts], of the product
    logits: torch.Tensor,  # float32 [n, num_experts]: a workspace
    num_done: torch.Tensor,  # int32 [n], zero between launches
    score_bias: torch.Tensor | None,  # this and the others: see `choose_experts`
    routing: Routing,
    num_valid: torch.Tensor | None,
    experts: torch.Tensor,
    weights: torch.Tensor,
    loads: torch.Tensor | None,
    factors: torch.Tensor | None,
    *,
    is_rounded: bool,  # logits are, to x's dtype
) -> None:
    """Chooses the experts of each token by norm(x) W^T + bias."""
    num_experts, in_features = weight.shape
    of_norm = operands_of(norm)
    block_in = triton.next_power_of_2(in_features)
    launcher(
        _few_router_kernel,
        (num_experts, len(x)),
        experts,
        weights,
        loads,
        x,
        normed,
        weight,
        of_norm.weight,
        of_norm.bias,
        bias,
        logits,
        num_done,
        score_bias,
        factors,
        num_valid,
        routing.multiplier,
        routing.mixer_jitter or 0.0,
        in_features,
        x.stride(0),
        0 if normed is None else normed.stride(0),
        of_norm.eps,
        NORM=of_norm.kind,
        IS_ROUNDED=is_rounded,
        IS_AT_ONCE=num_experts <= _MAX_AT_ONCE,
        BLOCK_IN=block_in,
        **routing.constants(num_experts),
        num_warps=4,
    )


def few_shared_bytes(in_features: int, dtype: torch.dtype) -> int:
    """What a program of `few_gate_up` takes of an SM: tiles of gate and up in flight."""
    tiles = choose_gemv_tiles(in_features, is_gated=True)
    return (tiles.num_stages - 1) * 2 * tiles.block_out * tiles.block_in * dtype.itemsize


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
    residual: torch.Tensor | None,  # [n, hidden], contiguous: added to the rounded sum; may be `out`
    num_valid: torch.Tensor | None,  # int32 [1]: rows from here on have a sum of zero; None: no row does
    out: torch.Tensor,  # [n, hidden], contiguous
) -> None:
    """Writes the weighted sum of the products of each token's experts to `out`. It must not begin before `few_gate_up`.
    """
    num_rows, out_features = out.shape
    in_features = activation.shape[1]
    block_in = min(triton.next_power_of_2(in_features), _DOWN_COLUMNS)
    is_loop, num_per_token = in_features > block_in, experts.shape[1]
    is_held = not is_loop and num_per_token * weight.element_size() <= _HELD_BYTES
    block_out = _HELD_ROWS if is_held else _DOWN_ROWS
    launcher(
        _few_down_kernel,
        (triton.cdiv(out_features, block_out), num_rows),
        out,
        activation,
        experts,
        weights,
        weight,
        bias,
        shared,
        residual,
        num_valid,
        out_features,
        in_features,
        NUM_PER_TOKEN=num_per_token,
        NUM_AHEAD=min(_HELD_AHEAD, num_per_token) if is_held else 0,
        IS_LOOP=is_loop,
        BLOCK_IN=block_in,
        BLOCK_OUT=block_out,
        num_warps=4,
    )


@triton.jit
def _few_router_kernel(
    experts,
    weights,
    loads,
    x,
    normed,
    weight,
    norm_weight,
    norm_bias,
    bias,
    logits,
    num_done,
    score_bias,
    factors,
    num_valid,
    multiplier,
    mixer_jitter,
    in_features,
    x_stride,
    normed_stride,
    eps,
    NORM: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_AT_ONCE: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_PER_TOKEN: tl.constexpr,
    NUM_PER_TOKEN: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    IS_MIXER: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes one logit of one token. The one that ends last chooses, the first one writes the norm."""
    if PDL:
        gdc_launch_dependents()
    expert, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK_IN)
    is_column = columns < in_features
    w = tl.load(weight + expert.to(tl.int64) * in_features + columns, mask=is_column, other=0.0).to(tl.float32)
    if norm_weight is not None:
        gain, shift = tl.load(norm_weight + columns, mask=is_column, other=0.0), None
        if norm_bias is not None:
            shift = tl.load(norm_bias + columns, mask=is_column, other=0.0)
    if PDL:
        gdc_wait()
    x_row = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if norm_weight is not None:
        its_norm = normalize_as(x_row, is_column, gain, shift, in_features, eps, 0, NORM)
        if expert == 0:
            tl.store(normed + row * normed_stride + columns, its_norm, mask=is_column)
        x_row = its_norm.to(tl.float32)
    logit = tl.sum(w * x_row, 0)
    if bias is not None:
        logit += tl.load(bias + expert).to(tl.float32)
    if IS_ROUNDED:
        logit = logit.to(x.dtype.element_ty).to(tl.float32)
    tl.store(logits + row * NUM_EXPERTS + expert, logit)
    tl.debug_barrier()  # the logit is written before the program counts
    if tl.atomic_add(num_done + row, 1, sem="acq_rel") == NUM_EXPERTS - 1:
        tl.store(num_done + row, 0)
        is_valid = True
        if num_valid is not None:
            is_valid = row < tl.load(num_valid)
        if is_valid:
            chosen, its_weights = choose_for_token(
                logits, score_bias, factors, row, multiplier, mixer_jitter, NUM_EXPERTS, NUM_GROUPS,
                NUM_GROUPS_PER_TOKEN, NUM_PER_TOKEN, IS_SIGMOID, HAS_MULTIPLIER, IS_MIXER, RENORMALIZES,
                IS_AT_ONCE, BLOCK_GROUPS, BLOCK_MEMBERS, BLOCK_CHOICES,
            )  # fmt: skip
            choices = tl.arange(0, BLOCK_CHOICES)
            is_choice = choices < NUM_PER_TOKEN
            tl.store(experts + row * NUM_PER_TOKEN + choices, chosen, mask=is_choice)
            tl.store(weights + row * NUM_PER_TOKEN + choices, its_weights, mask=is_choice)
            if loads is not None:
                tl.atomic_add(loads + chosen, tl.full([BLOCK_CHOICES], 1, tl.int64), mask=is_choice)


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
    if PDL:
        gdc_wait()
        # Not before: `down` reads the choices while this kernel runs, so they must be there when it starts.
        gdc_launch_dependents()
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
    residual,
    num_valid,
    out_features,
    in_features,
    NUM_PER_TOKEN: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
    IS_LOOP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT features of one token."""
    if PDL:
        gdc_launch_dependents()
        if NUM_AHEAD == 0:
            gdc_wait()
    token = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row = rows < out_features
    at = token.to(tl.int64) * out_features + rows
    is_valid = True
    if num_valid is not None:
        is_valid = token < tl.load(num_valid, cache_modifier=".cg")
    total = tl.zeros([BLOCK_OUT], tl.float32)
    if is_valid:
        sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        if IS_LOOP:
            for first in tl.range(0, in_features, BLOCK_IN, num_stages=2):
                sums = _add_experts(
                    sums, activation, experts, weights, weight, token, rows, is_row, first, out_features, in_features,
                    NUM_PER_TOKEN, 0, BLOCK_IN, False,
                )  # fmt: skip
        else:
            sums = _add_experts(
                sums, activation, experts, weights, weight, token, rows, is_row, 0, out_features, in_features,
                NUM_PER_TOKEN, NUM_AHEAD, BLOCK_IN, PDL,
            )  # fmt: skip
        total = tl.sum(sums, 1)
        if bias is not None:
            for i in tl.static_range(NUM_PER_TOKEN):
                pair = token * NUM_PER_TOKEN + i
                its_bias = bias + tl.load(experts + pair).to(tl.int64) * out_features + rows
                total += tl.load(weights + pair) * tl.load(its_bias, mask=is_row, other=0.0).to(tl.float32)
        if shared is not None:
            total += tl.load(shared + at, mask=is_row, other=0.0)
    elif PDL and NUM_AHEAD > 0:
        gdc_wait()
    total = total.to(out.dtype.element_ty)
    if residual is not None:
        before = tl.load(residual + at, mask=is_row, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + before).to(out.dtype.element_ty)
    tl.store(out + at, total, mask=is_row)


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
    NUM_AHEAD: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums + the products of BLOCK_IN features for each expert of the token. No product waits for another's sum.

    If NUM_AHEAD is not 0, the weights of so many experts are read before the wait for the kernel before.
    """
    columns = first + tl.arange(0, BLOCK_IN)
    is_column = columns < in_features
    mask = is_row[:, None] & is_column[None, :]
    at = rows[:, None] * in_features + columns[None, :]
    read_ahead = ()
    for i in tl.static_range(NUM_AHEAD):
        # From the second-level cache: the first one may still have what an earlier layer has chosen.
        expert = tl.load(experts + token * NUM_PER_TOKEN + i, cache_modifier=".cg").to(tl.int64)
        its_weight = weight + expert * out_features * in_features
        read_ahead = read_ahead + (tl.load(its_weight + at, mask=mask, other=0.0),)  # noqa: RUF005 - Triton's syntax
    if PDL and NUM_AHEAD > 0:
        gdc_wait()
    for i in tl.static_range(NUM_PER_TOKEN):
        pair = token * NUM_PER_TOKEN + i
        if i < NUM_AHEAD:
            w = read_ahead[i]
        else:
            its_weight = weight + tl.load(experts + pair).to(tl.int64) * out_features * in_features
            w = tl.load(its_weight + at, mask=mask, other=0.0)
        its_input = activation + pair.to(tl.int64) * in_features + columns
        values = tl.load(its_input, mask=is_column, other=0.0).to(tl.float32) * tl.load(weights + pair)
        sums += w.to(tl.float32) * values[None, :]
    return sums
