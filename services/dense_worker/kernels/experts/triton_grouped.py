"""The products of all experts in one launch, on the tensor cores: each program has rows of one expert.

The weights are the tall operand, as in `triton_skinny`. The grid depends on the number of tokens alone; programs
beyond the blocks that the router has listed end at once. Neighbouring programs have the same block and other features,
so that they share its rows in the cache, and blocks of one expert follow each other, so that they share its weights.
Reference: `model.experts.routed_experts.RoutedExperts.mix`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.common.families.shape import Activation, ClampedSwiglu
from services.dense_worker.kernels.experts.triton_gates import activate, gate_name
from services.dense_worker.kernels.experts.triton_router import PairBlocks
from services.dense_worker.kernels.linear.triton_tiles import sum_products
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 16, 128
_MAX_STAGES = 4
_BLOCK_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """Sizes of the kernel's loop; `num_stages` - 1 tiles of weights and rows are in flight."""

    block_rows: int
    block_out: int
    block_in: int
    num_stages: int
    num_warps: int


def choose_block_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a block: room for a quarter more than an expert's mean, so that most experts need one block."""
    return min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, triton.next_power_of_2(5 * num_pairs // (4 * num_experts))))


def max_num_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that pairs can need, however they are spread: all but one expert may have one pair too many."""
    return min(num_pairs, num_pairs // block_rows + num_experts)


def choose_grouped_tiles(block_rows: int, is_gated: bool, element_size: int, shared_memory_bytes: int) -> GroupedTiles:
    """Tiles small enough that an SM has two programs of most sizes, and one loads while another ends.

    The best of some sixty on an H100, for 128 experts of 2,048 x 768 and 64 of 2,048 x 1,408.
    """
    is_small = element_size == 2
    is_wide = is_small and block_rows == MAX_BLOCK_ROWS
    block_out = 128 if is_wide or (is_small and not is_gated and 2 * block_rows == MAX_BLOCK_ROWS) else 64
    block_in = 128 if is_small and not is_wide else 64
    stage_bytes = ((1 + is_gated) * block_out + block_rows) * block_in * element_size
    most_stages = _MAX_STAGES - 1 if is_wide and not is_gated else _MAX_STAGES
    num_stages = min(most_stages, max(2, shared_memory_bytes // stage_bytes))
    return GroupedTiles(block_rows, block_out, block_in, num_stages, 8 if block_out == 128 else 4)


def grouped_linear(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [num_pairs / pairs_per_row, in_features], rows contiguous
    pairs_per_row: int,  # neighbouring pairs that read the same row
    weight: torch.Tensor,  # [num_experts * out_features, in_features], twice as many rows if is_gated
    bias: torch.Tensor | None,  # [weight's rows]
    out: torch.Tensor,  # [num_pairs, out_features], contiguous, x's dtype
    blocks: PairBlocks,
    block_rows: int,  # those that the blocks were made with
    *,
    is_gated: bool,
    activation: Activation = Activation.SILU,
    clamped: ClampedSwiglu | None = None,  # instead of `activation`
) -> None:
    """Writes W[e] x + b[e] of each pair to `out`; if is_gated, activation of the first half times the second half."""
    num_pairs, out_features = out.shape
    in_features, num_experts = x.shape[1], len(blocks.slots)
    tiles = choose_grouped_tiles(block_rows, is_gated, x.element_size(), launcher.shared_memory_bytes)
    launcher(
        _grouped_kernel,
        (triton.cdiv(out_features, tiles.block_out), max_num_blocks(num_pairs, num_experts, block_rows)),
        out,
        x,
        weight,
        bias,
        blocks.slots,
        blocks.counts,
        blocks.num_blocks,
        blocks.experts,
        blocks.first_slots,
        blocks.slots.stride(0),
        out_features,
        in_features,
        x.stride(0),
        0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit,
        GATE=gate_name(activation, clamped),
        PAIRS_PER_ROW=pairs_per_row,
        IS_GATED=is_gated,
        IS_PADDED=in_features % tiles.block_in != 0,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


def sum_pairs(
    launcher: KernelLauncher,
    pairs: torch.Tensor,  # [n * num_per_token, hidden], contiguous
    weights: torch.Tensor,  # float32 [n, num_per_token]
    shared: torch.Tensor | None,  # float32 [n, hidden], contiguous: added
    num_valid: torch.Tensor | None,  # int32 [1]: rows from here on become zero; None: no row does
    out: torch.Tensor,  # [n, hidden], contiguous
) -> None:
    """Writes the weighted sum of each token's pairs to `out`, added up in float32."""
    num_rows, hidden = out.shape
    launcher(
        _sum_kernel,
        (num_rows, triton.cdiv(hidden, _BLOCK_COLUMNS)),
        out,
        pairs,
        weights,
        shared,
        num_valid,
        hidden,
        NUM_PER_TOKEN=weights.shape[1],
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["capacity"])
def _grouped_kernel(
    out,
    x,
    weight,
    bias,
    slots,
    counts,
    num_blocks,
    block_experts,
    block_first_slots,
    capacity,
    out_features,
    in_features,
    x_stride,
    alpha,
    limit,
    GATE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT features of the rows of one block."""
    dtype: tl.constexpr = weight.dtype.element_ty
    begin(PDL)
    block = tl.program_id(1)
    if block < tl.load(num_blocks):
        expert, pairs, is_row = pairs_of_block(
            block, slots, counts, block_experts, block_first_slots, capacity, BLOCK_ROWS
        )
        features = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        first_row = expert * (out_features * (2 if IS_GATED else 1))
        # Features beyond the last read the first one's weights and are never stored, so weights need no mask.
        w_rows = weight + (first_row + tl.where(features < out_features, features, 0))[:, None] * in_features
        up_offset = out_features.to(tl.int64) * in_features
        x_rows = x + (pairs // PAIRS_PER_ROW)[:, None] * x_stride
        sums, up_sums = sum_products(
            w_rows, up_offset, x_rows, is_row, 0, in_features, in_features,
            IS_GATED, IS_PADDED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
        )  # fmt: skip
        write_pairs(
            out, sums, up_sums, bias, pairs, features, is_row, first_row, out_features, alpha, limit,
            GATE, IS_GATED, dtype,
        )  # fmt: skip


@triton.jit
def pairs_of_block(block, slots, counts, block_experts, block_first_slots, capacity, BLOCK_ROWS: tl.constexpr):
    """The expert of a block of `PairBlocks`, the numbers of its pairs [BLOCK_ROWS], and which of them there are."""
    expert = tl.load(block_experts + block).to(tl.int64)
    at = tl.load(block_first_slots + block) + tl.arange(0, BLOCK_ROWS)
    is_row = at < tl.load(counts + expert)
    pairs = tl.load(slots + expert * capacity + at, mask=is_row, other=0).to(tl.int64)
    return expert, pairs, is_row


@triton.jit
def write_pairs(
    out,
    y,  # float32 [BLOCK_OUT, BLOCK_ROWS]
    up,  # of that shape; read if IS_GATED
    bias,  # None: none
    pairs,
    features,
    is_row,
    first_row,  # of the expert's weights
    out_features,
    alpha,
    limit,
    GATE: tl.constexpr,
    IS_GATED: tl.constexpr,
    DTYPE: tl.constexpr,  # to which each operation rounds
):
    """Adds the expert's bias, computes the activation if IS_GATED, and stores the features of all pairs."""
    is_feature = features < out_features
    if bias is not None:
        y += tl.load(bias + first_row + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        if bias is not None:
            up_bias = tl.load(bias + first_row + out_features + features, mask=is_feature, other=0.0)
            up += up_bias.to(tl.float32)[:, None]
        y = activate(y, up, alpha, limit, GATE, DTYPE)
    target = out + pairs[None, :] * out_features + features[:, None]
    tl.store(target, y.to(DTYPE), mask=is_feature[:, None] & is_row[None, :])


@triton.jit
def _sum_kernel(
    out,
    pairs,
    weights,
    shared,
    num_valid,
    hidden,
    NUM_PER_TOKEN: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program adds up BLOCK_COLUMNS columns of one token."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = columns < hidden
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    is_valid = True
    if num_valid is not None:
        is_valid = row < tl.load(num_valid)
    if is_valid:
        for i in tl.static_range(NUM_PER_TOKEN):
            pair = row * NUM_PER_TOKEN + i
            values = tl.load(pairs + pair * hidden + columns, mask=mask, other=0.0).to(tl.float32)
            total += tl.load(weights + pair) * values
        if shared is not None:
            total += tl.load(shared + row * hidden + columns, mask=mask, other=0.0)
    tl.store(out + row * hidden + columns, total.to(out.dtype.element_ty), mask=mask)
