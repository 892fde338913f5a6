"""How the Triton kernels store keys and values in 8 bits; `torch_attention.py` has the definition.

FORMAT is a constant of every kernel: "plain" (the cache has the model's dtype), "fp8" or "int8". Plain kernels contain
none of this. Stored numbers become float16 in registers, which holds all of them exactly: one instruction converts two
of FP8, and bfloat16 would take two slow ones more. Sums are in float32. The scales of FP8 are factors of all scores and
of the output; those of int8 belong to single keys and values, and are factors of scores and weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FORMATS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}

# Weights of attention are up to 2 ** this and not up to 1, so that float16 holds small ones and their products with
# the scales of int8. Sums grow by the same factor.
LOG_LARGEST_WEIGHT: tl.constexpr = tl.constexpr(8)


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


@triton.jit
def to_factor(numbers, dtype: tl.constexpr):
    """float32 -> the dtype in which queries and weights are multiplied by stored numbers: float32 or float16."""
    if dtype == tl.float32:  # `else` is needed: Triton compiles what follows a return
        return numbers
    else:
        return tl.minimum(tl.maximum(numbers, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def weigh_values(weights, value_scales, dtype: tl.constexpr):
    """Weights of attention times the scales of int8 values, broadcast, which must be finite in float16."""
    if dtype == tl.float16:
        value_scales = tl.minimum(value_scales, 255.0)  # of values up to 32,385
    return weights * value_scales


@triton.jit
def to_float16(stored, FORMAT: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Stored numbers -> float16, exactly. Triton's interpreter has no assembly."""
    if FORMAT == "fp8" or IS_INTERPRETED:
        return stored.to(tl.float16)
    # Conversions of integers are slow: put the byte of number + 128 into the last byte of 1024, and subtract 1152.
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 bytes, offset;
            xor.b32 bytes, $2, 0x80808080;
            mov.b32 offset, 0x64806480;
            prmt.b32 $0, bytes, 0x64646464, 0x4140;
            prmt.b32 $1, bytes, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, $0, offset;
            sub.rn.f16x2 $1, $1, offset;
        }""",
        "=&r,=&r,r", [stored], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def split_pairs(pairs, FORMAT: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """int16, each of two stored numbers -> float16 of the low bytes, and of the high ones.

    The GPU does this for two pairs at a time. Triton's interpreter has no assembly.
    """
    if IS_INTERPRETED:
        low, high = (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)
        stored: tl.constexpr = tl.float8e4nv if FORMAT == "fp8" else tl.int8
        return low.to(stored, bitcast=True).to(tl.float16), high.to(stored, bitcast=True).to(tl.float16)
    if FORMAT == "fp8":
        assembly: tl.constexpr = """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }"""
    else:  # as `to_float16`
        assembly: tl.constexpr = """{
            .reg .b32 bytes, low, high, offset;
            xor.b32 bytes, $2, 0x80808080;
            prmt.b32 low, bytes, 0x64646464, 0x4240;
            prmt.b32 high, bytes, 0x64646464, 0x4341;
            mov.b32 offset, 0x64806480;
            sub.rn.f16x2 $0, low, offset;
            sub.rn.f16x2 $1, high, offset;
        }"""
    return tl.inline_asm_elementwise(
        assembly, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )
