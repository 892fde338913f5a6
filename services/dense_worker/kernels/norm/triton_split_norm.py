"""The two halves of `SplitNorm`, inlined into the kernels of products: one after the sum, one before and after it.

Rows are columns of [features, rows], as in `triton_tiles.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.norm.norm import SplitNorm


def operands_of_halves(
    before: SplitNorm | None, after: SplitNorm | None
) -> tuple[torch.Tensor | float | None, ...]:
    """The squares and eps of the norm before a product; weight, rows and squares of the one after it."""
    of_before = (None, 0.0) if before is None else (before.squares, before.eps)
    of_after = (None, None, None) if after is None else (after.weight, after.rows, after.squares)
    return *of_before, *of_after


@triton.jit
def write_for_norm(
    y,  # [BLOCK_OUT, BLOCK_ROWS], what `write_features` stored
    weight,  # of an RMSNorm
    weighted,  # [n, out_features], of y's dtype
    squares,  # float32 [n, num_squares(out_features)]
    tile,
    features,
    rows,
    is_row,
    out_features,
    BLOCK_OUT: tl.constexpr,
):
    """Stores the features times the norm's weight, and of each row the sum of their squares. See `SplitNorm`."""
    is_feature = features < out_features
    wide = y.to(tl.float32)
    gain = tl.load(weight + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    target = rows.to(tl.int64)[None, :] * out_features + features[:, None]
    tl.store(weighted + target, (wide * gain).to(y.dtype), mask=is_feature[:, None] & is_row[None, :])
    sums = tl.sum(tl.where(is_feature[:, None], wide * wide, 0.0), 0)
    tl.store(squares + rows * _num_squares(out_features, BLOCK_OUT) + tile, sums)


@triton.jit
def read_squares(squares, places, rows, in_features, BLOCK_OUT: tl.constexpr):
    """What `write_for_norm` stored for in_features, [BLOCK_OUT, BLOCK_ROWS], whose sum is that of a row's squares.

    places: 0 to BLOCK_OUT. The order of additions does not depend on the number of rows.
    """
    num_squares = _num_squares(in_features, BLOCK_OUT)
    at = squares + rows[None, :] * num_squares + places[:, None]
    sums = tl.load(at)
    for first in range(BLOCK_OUT, num_squares, BLOCK_OUT):
        sums += tl.load(at + first)
    return sums


@triton.jit
def norm_factors(squares, in_features, eps):
    """Of each row, [1, BLOCK_ROWS], what `read_squares` found -> the factor of its RMSNorm."""
    return tl.rsqrt(tl.sum(squares, 0) / in_features + eps)[None, :]


@triton.jit
def _num_squares(size, BLOCK_OUT: tl.constexpr):
    """As `num_squares`."""
    return tl.cdiv(size, BLOCK_OUT * BLOCK_OUT) * BLOCK_OUT
