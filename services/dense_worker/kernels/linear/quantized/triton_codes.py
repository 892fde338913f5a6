"""Codes of quantized weights as numbers: in float32 for the kernel of one row, in 16 bits for the tensor cores.

Exact, and in few instructions: with many of them the time is no longer that of reading the codes.
"""

from __future__ import annotations

import os
import re

import torch
import triton
import triton.language as tl

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Bits of a word, put into the mantissa of 2 ** 23, are a number in float32; so is what remains without 2 ** 23.
_UINT4_ASM = tl.constexpr("""{
    .reg .b32 w, v;
    and.b32 v, $8, 0x0000000f; or.b32 v, v, 0x4b000000; add.f32 $0, v, 0fCB000000;
    and.b32 v, $8, 0x000000f0; or.b32 v, v, 0x4b000000; fma.rn.f32 $4, v, 0f3D800000, 0fC9000000;
    and.b32 v, $8, 0x00000f00; or.b32 v, v, 0x4b000000; fma.rn.f32 $1, v, 0f3B800000, 0fC7000000;
    and.b32 v, $8, 0x0000f000; or.b32 v, v, 0x4b000000; fma.rn.f32 $5, v, 0f39800000, 0fC5000000;
    shr.b32 w, $8, 16;
    and.b32 v, w, 0x0000000f; or.b32 v, v, 0x4b000000; add.f32 $2, v, 0fCB000000;
    and.b32 v, w, 0x000000f0; or.b32 v, v, 0x4b000000; fma.rn.f32 $6, v, 0f3D800000, 0fC9000000;
    and.b32 v, w, 0x00000f00; or.b32 v, v, 0x4b000000; fma.rn.f32 $3, v, 0f3B800000, 0fC7000000;
    and.b32 v, w, 0x0000f000; or.b32 v, v, 0x4b000000; fma.rn.f32 $7, v, 0f39800000, 0fC5000000;
}""")
_INT8_ASM = tl.constexpr("""{
    .reg .b32 w, v;
    xor.b32 w, $4, 0x80808080;
    prmt.b32 v, w, 0x4b000000, 0x7440; add.f32 $0, v, 0fCB000080;
    prmt.b32 v, w, 0x4b000000, 0x7441; add.f32 $1, v, 0fCB000080;
    prmt.b32 v, w, 0x4b000000, 0x7442; add.f32 $2, v, 0fCB000080;
    prmt.b32 v, w, 0x4b000000, 0x7443; add.f32 $3, v, 0fCB000080;
}""")
_UINT8_ASM = tl.constexpr("""{
    .reg .b32 v;
    prmt.b32 v, $4, 0x4b000000, 0x7440; add.f32 $0, v, 0fCB000000;
    prmt.b32 v, $4, 0x4b000000, 0x7441; add.f32 $1, v, 0fCB000000;
    prmt.b32 v, $4, 0x4b000000, 0x7442; add.f32 $2, v, 0fCB000000;
    prmt.b32 v, $4, 0x4b000000, 0x7443; add.f32 $3, v, 0fCB000000;
}""")
_E4M3_ASM = tl.constexpr("""{
    .reg .b16 a, b;
    .reg .b32 v, w;
    .reg .f16 h<4>;
    mov.b32 {a, b}, $4;
    cvt.rn.f16x2.e4m3x2 v, a;
    cvt.rn.f16x2.e4m3x2 w, b;
    mov.b32 {h0, h1}, v;
    mov.b32 {h2, h3}, w;
    cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; cvt.f32.f16 $2, h2; cvt.f32.f16 $3, h3;
}""")
# Four bytes -> the low codes as two pairs in 16 bits, and the high ones, each less a number. The upper byte of each
# number is such that the code is in the last bits of its mantissa.
_UINT4_PAIRS = """{
    .reg .b32 low, high, one, less;
    mov.b32 one, ONE;
    mov.b32 less, LESS;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, UPPER, 0x4140; fma.rn.TYPE $0, $0, one, less;
    prmt.b32 $1, low, UPPER, 0x4342; fma.rn.TYPE $1, $1, one, less;
    prmt.b32 $2, high, UPPER, 0x4140; fma.rn.TYPE $2, $2, one, less;
    prmt.b32 $3, high, UPPER, 0x4342; fma.rn.TYPE $3, $3, one, less;
}"""

# E2M1 in the place of the last bits of the exponent and the first of the mantissa is its number * 2^-126 (bfloat16) or
# 2^-14 (float16), also where it is denormal.
_E2M1_PAIRS = """{
    .reg .b32 low, high, v, w, m, s, scale;
    mov.b32 scale, SCALE;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    shl.b32 m, low, LOW; and.b32 m, m, MASK; shl.b32 s, low, 12; and.b32 s, s, 0x80008000; or.b32 v, m, s;
    mul.rn.TYPE $0, v, scale;
    shl.b32 m, high, LOW; and.b32 m, m, MASK; shl.b32 s, high, 12; and.b32 s, s, 0x80008000; or.b32 v, m, s;
    mul.rn.TYPE $1, v, scale;
    shl.b32 m, low, UPPER; and.b32 m, m, MASK; shl.b32 s, low, 8; and.b32 s, s, 0x80008000; or.b32 v, m, s;
    mul.rn.TYPE $2, v, scale;
    shl.b32 m, high, UPPER; and.b32 m, m, MASK; shl.b32 s, high, 8; and.b32 s, s, 0x80008000; or.b32 v, m, s;
    mul.rn.TYPE $3, v, scale;
}"""


def _replaced(text: str, parts: dict[str, str]) -> tl.constexpr:
    """The instructions with these words replaced."""
    return tl.constexpr(re.sub("|".join(parts), lambda found: parts[found[0]], text))


def _uint4_pairs(type_: str, upper: str, one: str, less: str) -> tl.constexpr:
    """The instructions for pairs of a type; numbers as the bits of two equal halves."""
    return _replaced(_UINT4_PAIRS, {"TYPE": type_, "UPPER": upper, "ONE": one, "LESS": less})


_UINT4_FLOAT16 = _uint4_pairs("f16x2", "0x64646464", "0x3c003c00", "0xe400e400")  # 1024 + code - 1024
_UINT4_FLOAT16_LESS_8 = _uint4_pairs("f16x2", "0x64646464", "0x3c003c00", "0xe408e408")  # - 1032
_UINT4_BFLOAT16 = _uint4_pairs("bf16x2", "0x43434343", "0x3f803f80", "0xc300c300")  # 128 + code - 128
_UINT4_BFLOAT16_LESS_8 = _uint4_pairs("bf16x2", "0x43434343", "0x3f803f80", "0xc308c308")  # - 136
_E2M1_FLOAT16 = _replaced(
    _E2M1_PAIRS, {"TYPE": "f16x2", "MASK": "0x0e000e00", "LOW": "9", "UPPER": "5", "SCALE": "0x74007400"}
)
_E2M1_BFLOAT16 = _replaced(
    _E2M1_PAIRS, {"TYPE": "bf16x2", "MASK": "0x01c001c0", "LOW": "6", "UPPER": "2", "SCALE": "0x7e807e80"}
)
# The interpreter runs no assembler.
USES_ASSEMBLER = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def codes_in_float32(octets, CODES: tl.constexpr):
    """The numbers of a tile of bytes: those of the low bits, and those of the high ones if a byte has two.

    Zero points are not subtracted.
    """
    if CODES == 4:
        return _e2m1(octets & 15).to(tl.float32), _e2m1(octets >> 4).to(tl.float32)
    elif CODES == 3:
        if USES_ASSEMBLER:
            return tl.inline_asm_elementwise(
                _UINT4_ASM, "=f,=f,=f,=f,=f,=f,=f,=f,r", [octets], (tl.float32, tl.float32), is_pure=True, pack=4
            )
        else:
            return (octets & 15).to(tl.float32), (octets >> 4).to(tl.float32)
    elif USES_ASSEMBLER:
        asm: tl.constexpr = _E4M3_ASM if CODES == 0 else _INT8_ASM if CODES == 1 else _UINT8_ASM
        low = tl.inline_asm_elementwise(asm, "=f,=f,=f,=f,r", [octets], tl.float32, is_pure=True, pack=4)
        return low, low
    else:
        if CODES == 0:
            octets = octets.to(tl.float8e4nv, bitcast=True)
        low = octets.to(tl.float32)
        return low, low


@triton.jit
def uint4_in_16_bits(octets, DTYPE: tl.constexpr, LESS_8: tl.constexpr):
    """The low and the high codes of bytes as DTYPE, less 8 if LESS_8."""
    if USES_ASSEMBLER:
        if tl.float16 == DTYPE:
            half: tl.constexpr = _UINT4_FLOAT16_LESS_8 if LESS_8 else _UINT4_FLOAT16
            types: tl.constexpr = (tl.float16, tl.float16)
            return tl.inline_asm_elementwise(half, "=r,=r,=r,=r,r", [octets], types, is_pure=True, pack=4)
        else:
            brain: tl.constexpr = _UINT4_BFLOAT16_LESS_8 if LESS_8 else _UINT4_BFLOAT16
            types: tl.constexpr = (tl.bfloat16, tl.bfloat16)
            return tl.inline_asm_elementwise(brain, "=r,=r,=r,=r,r", [octets], types, is_pure=True, pack=4)
    else:
        LESS: tl.constexpr = 8.0 if LESS_8 else 0.0
        return (octets & 15).to(DTYPE) - LESS, (octets >> 4).to(DTYPE) - LESS


@triton.jit
def e2m1_in_16_bits(octets, DTYPE: tl.constexpr):
    """The low and the high codes of bytes as DTYPE."""
    if USES_ASSEMBLER:
        if tl.float16 == DTYPE:
            types: tl.constexpr = (tl.float16, tl.float16)
            return tl.inline_asm_elementwise(_E2M1_FLOAT16, "=r,=r,=r,=r,r", [octets], types, is_pure=True, pack=4)
        else:
            types: tl.constexpr = (tl.bfloat16, tl.bfloat16)
            return tl.inline_asm_elementwise(_E2M1_BFLOAT16, "=r,=r,=r,=r,r", [octets], types, is_pure=True, pack=4)
    else:
        return _e2m1(octets & 15).to(DTYPE), _e2m1(octets >> 4).to(DTYPE)


@triton.jit
def _e2m1(codes):
    """E2M1 as float16 has the same bits of exponent and mantissa, with an exponent that is 14 less."""
    bits = codes.to(tl.int16)
    return (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def scales_in_float32(scales, CODES: tl.constexpr):
    """Stored scales as numbers. Those of E2M1 are exponents: 2 ** (e - 127), in float32 the bits of e and 23 zeros."""
    if CODES == 4:
        bits = scales.to(tl.int32)
        return tl.where(bits > 0, bits << 23, 0x400000).to(tl.float32, bitcast=True)
    else:
        return scales.to(tl.float32)


@triton.jit
def exponents_in_bfloat16(exponents):
    """2 ** (e - 127), in bfloat16 the bits of e and 7 zeros. Times a number of E2M1 it is exact."""
    bits = exponents.to(tl.int16)
    return tl.where(bits > 0, bits << 7, 0x40).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def awaited(sums):
    """Sums that a loop goes on to add to, once the tensor cores have added.

    They read codes that have become numbers from registers, which the next round overwrites. Triton 3.6 would begin it
    while they still read; something that uses the sums makes it wait.
    """
    if USES_ASSEMBLER:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], tl.float32, is_pure=True, pack=1)
    else:
        return sums
