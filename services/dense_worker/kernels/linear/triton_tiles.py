"""What kernels of products share: the parts of a split, the loop over tiles, sums of splits, and what follows a sum.

Device functions are inlined into the kernels. Sums are [features, rows]: the weights are the tall operand of the matrix
product, so that few rows waste no work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.linear.triton_activation import activated

MIN_ROWS = 16  # narrowest tile; fewer tokens leave some of its columns empty
BLOCK_OUT = 64  # features of a tile
MAX_ROWS = 64  # of the kernels whose time is that of reading the weights
SPLIT_AREA = 64 * MAX_ROWS  # sums of a program for which a `SplitWorkspace` has room


class SplitWorkspace:
    """Partial sums of split layers, in device memory. Counters are zero between launches.

    There is room for so many programs of `MAX_ROWS` rows, or accordingly more or fewer of others.
    """

    def __init__(self, device: torch.device, num_programs: int) -> None:
        self.partial_sums = torch.empty(num_programs * SPLIT_AREA, dtype=torch.float32, device=device)
        self.num_done = torch.zeros(num_programs * MAX_ROWS // MIN_ROWS, dtype=torch.int32, device=device)


@triton.jit
def part_of_split(split, in_features, BLOCK_IN: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """The first feature of one of NUM_SPLITS parts of in_features, and the one after its last."""
    part_size = tl.cdiv(tl.cdiv(in_features, BLOCK_IN), NUM_SPLITS) * BLOCK_IN
    start = split * part_size
    return start, tl.minimum(start + part_size, in_features)


@triton.jit
def sum_products(
    w_rows,  # [BLOCK_OUT, 1]: where rows of weights start
    up_offset,  # from there to the rows of the second half, if IS_GATED
    x_rows,  # [BLOCK_ROWS, 1]
    is_row,
    start,
    end,
    in_features,
    IS_GATED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Sums over the columns from start to end: float32 [BLOCK_OUT, BLOCK_ROWS], and those of the second half.

    Those of INT8 are int32.
    """
    sums_dtype: tl.constexpr = tl.int32 if tl.int8 == w_rows.dtype.element_ty else tl.float32
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], sums_dtype)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], sums_dtype)
    for first_column in tl.range(start, end, BLOCK_IN, num_stages=NUM_STAGES):
        columns = first_column + tl.arange(0, BLOCK_IN)
        is_column = columns < in_features if IS_PADDED else tl.full([BLOCK_IN], True, tl.int1)
        w = tl.load(w_rows + columns[None, :], mask=is_column[None, :], other=0.0)
        x_tile = tl.load(x_rows + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        sums = tl.dot(w, tl.trans(x_tile), sums, input_precision="ieee", out_dtype=sums_dtype)
        if IS_GATED:
            w_up = tl.load(w_rows + up_offset + columns[None, :], mask=is_column[None, :], other=0.0)
            up_sums = tl.dot(w_up, tl.trans(x_tile), up_sums, input_precision="ieee", out_dtype=sums_dtype)
    return sums, up_sums


@triton.jit
def add_splits(
    sums,  # [BLOCK_OUT, BLOCK_ROWS]
    partial_sums,
    num_done,
    tile,
    split,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Stores a program's sums; the tile's program that ends last gets the sums of all splits, and True."""
    part: tl.constexpr = BLOCK_ROWS * BLOCK_OUT
    at = tl.arange(0, BLOCK_ROWS)[None, :] * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    at += partial_sums + tile * (NUM_SPLITS * part)
    tl.store(at + split * part, sums)
    tl.debug_barrier()  # all threads store before one of them counts
    is_last = tl.atomic_add(num_done + tile, 1, sem="acq_rel") == NUM_SPLITS - 1
    if is_last:
        sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for i in tl.static_range(NUM_SPLITS):
            sums += tl.load(at + i * part)
        tl.store(num_done + tile, 0)
    return sums, is_last


@triton.jit
def write_features(
    out,
    y,  # float32 [BLOCK_OUT, BLOCK_ROWS]
    up,  # of that shape; read if IS_GATED
    bias,  # None: none
    residual,  # None: none
    features,
    rows,
    is_row,
    out_features,
    out_stride,
    ACTIVATION: tl.constexpr,  # None: none
    IS_GATED: tl.constexpr,
    DTYPE: tl.constexpr,  # to which each operation rounds
):
    """Adds the bias, computes the activation, adds the residual; stores and returns the features of all rows."""
    is_feature = features < out_features
    if bias is not None:
        y += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    if IS_GATED and bias is not None:
        up += tl.load(bias + out_features + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    y = activated(y, up, ACTIVATION, IS_GATED, DTYPE)
    target = rows.to(tl.int64)[None, :] * out_stride + features[:, None]
    mask = is_feature[:, None] & is_row[None, :]
    if residual is not None:
        y = y.to(DTYPE).to(tl.float32) + tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    y = y.to(DTYPE)
    tl.store(out + target, y.to(out.dtype.element_ty), mask=mask)
    return y
