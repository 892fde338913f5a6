"""The product of a gated MLP with its activation, for many rows of 16 bits, by tiles that the GPU's copy engine loads.

The product's halves, gate and up, never reach memory: half as many numbers are written as by cuBLAS, and none is read
again for the activation. Reference: `MlpActivation.apply` of the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.triton_activation import activated
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

# Of the output; a program has sums for twice as many features in its registers. Two programs share an SM, so that one
# computes the activation while the other multiplies.
_BLOCK_ROWS, _BLOCK_OUT = 128, 64
_BLOCK_IN = 64
_GROUP = 8  # blocks of rows whose programs follow each other, so that they read the same weights from the L2 cache
_NUM_STAGES = 3


def multiply_gated(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], 16 bits
    gate_up: torch.Tensor,  # x's dtype [2 * out_features, in_features]: gate, then up
    out: torch.Tensor,  # x's dtype [n, out_features], columns contiguous
    activation: MlpActivation,  # gated
) -> None:
    """Writes activation(gate) * up to `out`. Rows of all begin at multiples of 16 bytes."""
    num_rows, out_features = out.shape
    launcher(
        _gated_kernel,
        (triton.cdiv(num_rows, _BLOCK_ROWS) * triton.cdiv(out_features, _BLOCK_OUT),),
        TensorDescriptor.from_tensor(x, [_BLOCK_ROWS, _BLOCK_IN]),
        TensorDescriptor.from_tensor(gate_up.unflatten(0, (2, out_features)), [2, _BLOCK_OUT, _BLOCK_IN]),
        TensorDescriptor.from_tensor(out, [_BLOCK_ROWS, _BLOCK_OUT]),
        num_rows,
        out_features,
        x.shape[1],
        ACTIVATION=activation.function.value,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=_BLOCK_IN,
        GROUP=_GROUP,
        NUM_STAGES=_NUM_STAGES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    x,
    gate_up,
    out,
    num_rows,
    out_features,
    in_features,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes a tile. Beyond the last row, feature or column, tiles are zeros."""
    begin(PDL)
    num_row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    num_out_blocks = tl.cdiv(out_features, BLOCK_OUT)
    group = tl.program_id(0) // (GROUP * num_out_blocks)
    in_group = tl.program_id(0) % (GROUP * num_out_blocks)
    group_size = min(num_row_blocks - group * GROUP, GROUP)
    row = (group * GROUP + in_group % group_size) * BLOCK_ROWS
    feature = in_group // group_size * BLOCK_OUT
    sums = tl.zeros([BLOCK_ROWS, 2 * BLOCK_OUT], tl.float32)
    for block in tl.range(tl.cdiv(in_features, BLOCK_IN), num_stages=NUM_STAGES):
        x_tile = x.load([row, block * BLOCK_IN])
        weights = gate_up.load([0, feature, block * BLOCK_IN])  # both halves, so that one product has all columns
        sums = tl.dot(x_tile, tl.reshape(weights, (2 * BLOCK_OUT, BLOCK_IN)).T, sums)
    gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_ROWS, 2, BLOCK_OUT)), (0, 2, 1)))
    out.store([row, feature], activated(gate, up, ACTIVATION, True, out.dtype).to(out.dtype))
