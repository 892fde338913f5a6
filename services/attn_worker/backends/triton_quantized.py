"""How the Triton kernels store keys and values in 8 bits; `torch_layer_cache.py` is the definition.

FORMAT is a constant of every kernel: "plain" (the cache has the model's dtype), "fp8" or "int8". Plain kernels contain
none of this. Stored numbers become the model's dtype in registers, which holds all of them exactly, and sums are in
float32. The scales of FP8 are factors of all scores and of the output; those of int8 belong to single keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FORMATS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


def kv_format(cache: torch.Tensor) -> str:
    """FORMAT of a layer's cache."""
    return _FORMATS.get(cache.dtype, "plain")


@triton.jit
def to_fp8(numbers, scale):
    """float32 -> e4m3; what is beyond its largest number, 448, becomes that number, and never NaN."""
    return tl.minimum(tl.maximum(numbers / scale, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def int8_scale(first_half, second_half, axis: tl.constexpr):
    """The scale of heads that are given as halves in float32: their largest magnitude becomes 127."""
    return tl.maximum(tl.max(tl.abs(first_half), axis=axis), tl.max(tl.abs(second_half), axis=axis)) / 127.0


@triton.jit
def to_int8(numbers, scale):
    """float32 -> int8, rounded to the nearest. A head of zeros has a scale of zero."""
    return tl.floor(numbers / tl.maximum(scale, 1.1754944e-38) + 0.5).to(tl.int8)
