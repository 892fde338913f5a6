"""The activation of an MLP, alone or times up. Reference: `MlpActivation.apply` in `activation.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_BLOCK_SIZE = 1024


def activate(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, size], columns contiguous; if gated [n, 2 * size]: gate, then up
    out: torch.Tensor,  # [n, size], columns contiguous; may be the first columns of x
    activation: MlpActivation,
) -> None:
    """Writes activation(x), or activation(gate) * up, to `out`."""
    num_rows, size = out.shape
    launcher(
        _activate_kernel,
        (triton.cdiv(size, _BLOCK_SIZE), num_rows),
        out,
        x,
        size,
        out.stride(0),
        x.stride(0),
        ACTIVATION=activation.function.value,
        IS_GATED=activation.is_gated,
        BLOCK_SIZE=_BLOCK_SIZE,
        num_warps=4,
    )


@triton.jit
def activation_of(x, ACTIVATION: tl.constexpr):
    """The `Activation` of this name, in float32."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # arXiv:1606.08415, with 0.5 * (1 + tanh(x)) as the sigmoid of 2 x
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "quick_gelu":
        y = x / (1.0 + tl.exp(-1.702 * x))
    elif ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        y = tl.where(x < 0.0, 0.0, x * x)
    return y


@triton.jit
def activated(x, up, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, DTYPE: tl.constexpr):
    """activation(x), times `up` if IS_GATED, in float32; x itself if ACTIVATION is None.

    Inputs and activation are rounded to DTYPE, as separate operators would round them.
    """
    if ACTIVATION is not None:
        x = activation_of(x.to(DTYPE).to(tl.float32), ACTIVATION)
        if IS_GATED:
            x = x.to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _activate_kernel(
    out,
    x,
    size,
    out_stride,
    x_stride,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = columns < size
    begin(PDL)
    source = x + row * x_stride + columns
    values = tl.load(source, mask=mask, other=0.0)
    up = values
    if IS_GATED:
        up = tl.load(source + size, mask=mask, other=0.0)
    result = activated(values.to(tl.float32), up.to(tl.float32), ACTIVATION, IS_GATED, values.dtype)
    tl.store(out + row * out_stride + columns, result.to(values.dtype), mask=mask)
