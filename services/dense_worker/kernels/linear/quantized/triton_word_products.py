"""Words of quantized weights times the features of one row, in pairs of float16: for the product of one row.

A word has four codes, or eight of half a byte. Pairs of float16 take a third of the instructions of float32, which the
time of the product would else be. At most two products of each half of a pair are summed in float16, of eight codes
four; all other sums are float32.

Codes of half a byte are not converted: with zeros before them they are denormal numbers, code * 2^-24, and E2M1 with
its bits in their places is its number * 2^-14 (IEEE 754, binary16). The row's features are scaled by a power of two,
which keeps products in the range of float16 and costs no bits (`pairs_of_row`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.dense_worker.kernels.linear.quantized.triton_codes import USES_ASSEMBLER
from services.dense_worker.kernels.linear.quantized.triton_scales import greater, scale_of_greatest

_SUM = """
    mov.b32 {h0, h1}, a;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1;
    add.rn.f32 $0, f0, f1;
}"""
_REGISTERS = "{ .reg .b16 h0, h1, b0, b1; .reg .b32 a, v, w, s; .reg .f32 f0, f1;"
# $1 and $2: features. The upper half of a pair comes first.
_PAIR_ASM = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_FP8_PAIR_ASM = tl.constexpr("""{ .reg .b16 codes; .reg .b32 v, sixteenth;
    mov.b32 sixteenth, 0x2c002c00;
    cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1; cvt.rn.f16x2.e4m3x2 v, codes; mul.rn.f16x2 $0, v, sixteenth;
}""")
# $1: the word, $2 to $5: pairs of features.
_E4M3_ASM = tl.constexpr(f"""{_REGISTERS}
    mov.b32 {{b0, b1}}, $1;
    cvt.rn.f16x2.e4m3x2 v, b0; mul.rn.f16x2 a, v, $2;
    cvt.rn.f16x2.e4m3x2 v, b1; fma.rn.f16x2 a, v, $3, a;
{_SUM}""")
_BYTES_ASM = """
    mov.b32 s, LESS;
    prmt.b32 v, w, 0x64646464, 0x4140; add.rn.f16x2 v, v, s; mul.rn.f16x2 a, v, $2;
    prmt.b32 v, w, 0x64646464, 0x4342; add.rn.f16x2 v, v, s; fma.rn.f16x2 a, v, $3, a;
"""
# A byte below 0x64 is 1024 + byte.
_INT8_ASM = tl.constexpr(f"{_REGISTERS} xor.b32 w, $1, 0x80808080; {_BYTES_ASM.replace('LESS', '0xe480e480')} {_SUM}")
_UINT8_ASM = tl.constexpr(f"{_REGISTERS} mov.b32 w, $1; {_BYTES_ASM.replace('LESS', '0xe400e400')} {_SUM}")
_UINT4_ASM = tl.constexpr(f"""{_REGISTERS}
    shr.u32 w, $1, 8;
    and.b32 v, $1, 0x000f000f; mul.rn.f16x2 a, v, $2;
    and.b32 v, $1, 0x00f000f0; fma.rn.f16x2 a, v, $3, a;
    and.b32 v, w, 0x000f000f; fma.rn.f16x2 a, v, $4, a;
    and.b32 v, w, 0x00f000f0; fma.rn.f16x2 a, v, $5, a;
{_SUM}""")
_E2M1_ASM = tl.constexpr(f"""{_REGISTERS}
    shl.b32 v, $1, 9; and.b32 v, v, 0x0e000e00; shl.b32 s, $1, 12; and.b32 s, s, 0x80008000; or.b32 v, v, s;
    mul.rn.f16x2 a, v, $2;
    shl.b32 v, $1, 5; and.b32 v, v, 0x0e000e00; shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; or.b32 v, v, s;
    fma.rn.f16x2 a, v, $3, a;
    shl.b32 v, $1, 1; and.b32 v, v, 0x0e000e00; shl.b32 s, $1, 4; and.b32 s, s, 0x80008000; or.b32 v, v, s;
    fma.rn.f16x2 a, v, $4, a;
    shr.u32 v, $1, 3; and.b32 v, v, 0x0e000e00; and.b32 s, $1, 0x80008000; or.b32 v, v, s;
    fma.rn.f16x2 a, v, $5, a;
{_SUM}""")


@triton.jit
def word_products(words, pairs, CODES: tl.constexpr):
    """int32 [rows, words] times `pairs` of `pairs_of_row` -> float32 [rows, words]: a sum for each word."""
    x0, x1, x2, x3 = pairs[0][None, :], pairs[1][None, :], pairs[2][None, :], pairs[3][None, :]
    if USES_ASSEMBLER:
        E4M3: tl.constexpr = _E4M3_ASM
        BYTES: tl.constexpr = _INT8_ASM if CODES == 1 else _UINT8_ASM
        HALVES: tl.constexpr = _UINT4_ASM if CODES == 3 else _E2M1_ASM
        asm: tl.constexpr = E4M3 if CODES == 0 else BYTES if CODES < 3 else HALVES
        return tl.inline_asm_elementwise(asm, "=f,r,r,r,r,r", [words, x0, x1, x2, x3], tl.float32, is_pure=True, pack=1)
    elif CODES >= 3:
        first = _number(words, 0, CODES) * _half(x0, 0) + _number(words, 4, CODES) * _half(x0, 1)
        second = _number(words, 1, CODES) * _half(x1, 0) + _number(words, 5, CODES) * _half(x1, 1)
        third = _number(words, 2, CODES) * _half(x2, 0) + _number(words, 6, CODES) * _half(x2, 1)
        fourth = _number(words, 3, CODES) * _half(x3, 0) + _number(words, 7, CODES) * _half(x3, 1)
        return first + second + third + fourth
    else:
        first = _number(words, 0, CODES) * _half(x0, 0) + _number(words, 1, CODES) * _half(x0, 1)
        return first + _number(words, 2, CODES) * _half(x1, 0) + _number(words, 3, CODES) * _half(x1, 1)


@triton.jit
def pairs_of_row(
    features,  # float32 [words] for each feature of a word
    greatest,  # float32 [groups]: the greatest magnitude in each group of words; one group if they have one scale
    input_scale,  # None: a scale for each group
    max_activation,
    CODES: tl.constexpr,
    ELEMENT: tl.constexpr,  # quantize to 1: FP8, 2: INT8, or 0: do not
):
    """Four words of pairs, int32 [words] each, of which bytes need two; sums and scales of the groups, float32.

    A product of words and pairs times the group's scale is that of the weights' codes and the features, of which the
    sums are. Codes of features are those of the reference, except where a quotient lies in the middle of two.
    """
    NUM_GROUPS: tl.constexpr = greatest.shape[0]
    if CODES == 2 or CODES == 3:
        total = features[0]
        for k in tl.static_range(1, len(features)):
            total += features[k]
        sums = tl.sum(tl.reshape(total, [NUM_GROUPS, total.shape[0] // NUM_GROUPS]), 1)
    else:
        sums = greatest  # nobody reads them
    if ELEMENT > 0:
        if input_scale is not None:
            scales = tl.zeros([NUM_GROUPS], tl.float32) + tl.load(input_scale)
        else:
            scales = scale_of_greatest(greatest, max_activation, 448.0 if ELEMENT == 1 else 127.5)
        factors = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    else:
        # |x| < 2^LIMIT. The greatest weights are 448, 128, 255, 15 * 2^-24 and 6 * 2^-14.
        LIMIT: tl.constexpr = 5 if CODES == 0 else 7 if CODES == 1 else 6 if CODES == 2 else 15
        CODE: tl.constexpr = 24 if CODES == 3 else 14 if CODES == 4 else 0
        exponent = ((greatest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        shift = LIMIT - 1 - tl.minimum(tl.maximum(exponent, -60), 100)
        factors, scales = _power_of_2(shift), _power_of_2(CODE - shift)
    factors = _for_words(factors, features[0].shape[0])
    if CODES >= 3:
        # The upper code of a byte is read as 16 times its number.
        upper = factors * 0.0625 if CODES == 3 else factors
        x0 = _pair(features[0], features[4], factors, 0)
        x1 = _pair(features[1], features[5], upper, 0)
        x2 = _pair(features[2], features[6], factors, 0)
        x3 = _pair(features[3], features[7], upper, 0)
    else:
        x0, x1 = _pair(features[0], features[1], factors, ELEMENT), _pair(features[2], features[3], factors, ELEMENT)
        x2, x3 = x0, x1
    # `_pair` divides codes of FP8, of at most 448, by 16.
    return (x0, x1, x2, x3), sums, scales * 16.0 if ELEMENT == 1 else scales


@triton.jit
def greatest_of(features, NUM_GROUPS: tl.constexpr):
    """The greatest magnitude of each group of words, float32 [groups]; NaN if there is one."""
    greatest = tl.abs(features[0])
    for k in tl.static_range(1, len(features)):
        greatest = greater(greatest, tl.abs(features[k]))
    return tl.reduce(tl.reshape(greatest, [NUM_GROUPS, greatest.shape[0] // NUM_GROUPS]), 1, greater)


@triton.jit
def _for_words(factors, NUM_WORDS: tl.constexpr):
    """[groups] -> [words]"""
    NUM_GROUPS: tl.constexpr = factors.shape[0]
    return tl.reshape(tl.broadcast_to(factors[:, None], [NUM_GROUPS, NUM_WORDS // NUM_GROUPS]), [NUM_WORDS])


@triton.jit
def _pair(low, high, factors, ELEMENT: tl.constexpr):
    """Two features times their factors, as codes if ELEMENT is set, in the halves of a word."""
    low, high = low * factors, high * factors
    if ELEMENT == 2:
        low, high = _in_int8(low), _in_int8(high)
    if USES_ASSEMBLER:
        asm: tl.constexpr = _FP8_PAIR_ASM if ELEMENT == 1 else _PAIR_ASM
        return tl.inline_asm_elementwise(asm, "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1)
    else:
        if ELEMENT == 1:
            low, high = _in_fp8(low), _in_fp8(high)
        return _half_of(low) | (_half_of(high) << 16)


@triton.jit
def _in_int8(value):
    value = tl.minimum(tl.maximum(value, -128.0), 127.0)
    return (value + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no bits after the point


@triton.jit
def _in_fp8(value):
    return tl.clamp(value, -448.0, 448.0).to(tl.float8e4nv).to(tl.float32) * 0.0625


@triton.jit
def _half_of(value):
    return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _power_of_2(exponent):
    """float32, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half(pair, INDEX: tl.constexpr):
    return ((pair >> (16 * INDEX)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _number(words, INDEX: tl.constexpr, CODES: tl.constexpr):
    """A code of each word as the number by which features are multiplied; for Triton's interpreter."""
    if CODES >= 3:
        code = (words >> (4 * INDEX)) & 15
        if CODES == 3:
            return code.to(tl.float32) * (2.0**-20 if INDEX % 2 == 1 else 2.0**-24)
        else:
            bits = ((code & 7) << 9) | ((code & 8) << 12)
            return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        code = (words >> (8 * INDEX)) & 255
        if CODES == 0:
            return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif CODES == 1:
            return code.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
        else:
            return code.to(tl.float32)
