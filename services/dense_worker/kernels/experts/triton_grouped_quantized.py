"""The products of all quantized experts in one launch: `triton_grouped` with codes that become numbers in registers.

Codes, scales and prepared inputs are those of `quantized.triton_skinny_quantized`: nothing is rounded before the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.common.families.shape import Activation, ClampedSwiglu
from services.dense_worker.kernels.experts.triton_gates import gate_name
from services.dense_worker.kernels.experts.triton_grouped import max_num_blocks, pairs_of_block, write_pairs
from services.dense_worker.kernels.experts.triton_router import PairBlocks
from services.dense_worker.kernels.linear.quantized.operands import BLOCK_IN, BLOCK_OUT, PreparedInput, QuantizedMatrix
from services.dense_worker.kernels.linear.quantized.triton_codes import TRITON_TYPES
from services.dense_worker.kernels.linear.quantized.triton_skinny_quantized import sum_codes
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

MAX_BLOCK_ROWS = 64


def grouped_quantized(
    launcher: KernelLauncher,
    x: PreparedInput,  # one version of num_pairs / pairs_per_row rows
    pairs_per_row: int,  # neighbouring pairs that read the same row
    matrix: QuantizedMatrix,  # of all experts: [num_experts * out_features, ...], twice as many rows if is_gated
    bias: torch.Tensor | None,  # [matrix's rows]
    out: torch.Tensor,  # [num_pairs, out_features], contiguous, the model's dtype
    blocks: PairBlocks,
    block_rows: int,  # those that the blocks were made with, at most MAX_BLOCK_ROWS
    *,
    is_gated: bool,
    activation: Activation = Activation.SILU,
    clamped: ClampedSwiglu | None = None,  # instead of `activation`
) -> None:
    """Writes W[e] x + b[e] of each pair to `out`; if is_gated, activation of the first half times the second half."""
    num_pairs, out_features = out.shape
    _, _, in_features = x.values.shape
    launcher(
        _grouped_quantized_kernel,
        (triton.cdiv(out_features, BLOCK_OUT), max_num_blocks(num_pairs, len(blocks.slots), block_rows)),
        out,
        x.values,
        x.scale,
        matrix.matrix,
        matrix.scale,
        matrix.zero_point,
        bias,
        blocks.slots,
        blocks.counts,
        blocks.num_blocks,
        blocks.experts,
        blocks.first_slots,
        blocks.slots.stride(0),
        out_features,
        in_features,
        x.values.stride(1),
        0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit,
        DTYPE=TRITON_TYPES[out.dtype],
        GATE=gate_name(activation, clamped),
        PAIRS_PER_ROW=pairs_per_row,
        CODES=int(matrix.codes),
        GROUP_SIZE=matrix.group_size or 0,
        ROW_GROUP_SIZE=matrix.row_group_size,
        IS_GATED=is_gated,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=BLOCK_IN,
        DOT_SIZE=matrix.dot_size(x.values.dtype, BLOCK_IN),
        NUM_STAGES=4 if block_rows < MAX_BLOCK_ROWS else 3,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["capacity"])
def _grouped_quantized_kernel(
    out,
    x,
    x_scale,
    weight,
    scale,
    zero_point,
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
    DTYPE: tl.constexpr,
    GATE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    CODES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_GROUP_SIZE: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DOT_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT features of the rows of one block."""
    PER_BYTE: tl.constexpr = 2 if CODES >= 3 else 1
    begin(PDL)
    block = tl.program_id(1)
    if block < tl.load(num_blocks):
        expert, pairs, is_row = pairs_of_block(
            block, slots, counts, block_experts, block_first_slots, capacity, BLOCK_ROWS
        )
        features = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        first_row = expert * (out_features * (2 if IS_GATED else 1))
        # Features beyond the last read the first one's weights and are never stored, so weights need no mask of rows.
        w_features = first_row + tl.where(features < out_features, features, 0)
        x_rows = pairs // PAIRS_PER_ROW
        row_bytes = in_features // PER_BYTE
        w_row = weight + w_features[:, None] * row_bytes
        up_row = w_row + out_features.to(tl.int64) * row_bytes
        x_row = x + x_rows[:, None] * x_stride
        y, up = sum_codes(
            x_row, x_row, x_scale, x_rows, w_row, up_row, scale, zero_point, w_features, out_features, 0, in_features,
            is_row, in_features, CODES, GROUP_SIZE, ROW_GROUP_SIZE, IS_GATED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, DOT_SIZE,
            NUM_STAGES,
        )  # fmt: skip
        if GROUP_SIZE == 0:
            y *= tl.load(scale + w_features).to(tl.float32)[:, None]
            if IS_GATED:
                up *= tl.load(scale + out_features + w_features).to(tl.float32)[:, None]
            if x_scale is not None:
                row_scale = tl.load(x_scale + x_rows)[None, :]
                y *= row_scale
                up *= row_scale
        write_pairs(
            out, y, up, bias, pairs, features, is_row, first_row, out_features, alpha, limit, GATE, IS_GATED, DTYPE
        )  # fmt: skip
