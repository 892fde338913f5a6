"""Scales of rows and groups, and the codes of numbers, in kernels.

Reference: `activations.py`. Codes and scales are those of the reference to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def greater(a, b):
    """The greater of two numbers; NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of_greatest(greatest, max_activation, greatest_code):
    """The scale of each group with this greatest magnitude, float32 [groups]. With NaN in a group it is NaN."""
    greatest = tl.minimum(greater(greatest, 1e-12), max_activation, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(greatest, tl.zeros_like(greatest) + greatest_code)


@triton.jit
def to_codes(values, scale, dtype: tl.constexpr, IS_FP8: tl.constexpr, IS_BOUNDED: tl.constexpr = False):
    """values / scale rounded to the nearest code, ties to even, and cut off at the ends; as `dtype`.

    With IS_BOUNDED no value is greater than what `scale_of_greatest` got, which saves instructions, not a bit.
    """
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    # A quotient with one correction is that of a division (Markstein, 1990), and takes a third of its time.
    quotient = values * inverse
    corrected = tl.fma(tl.fma(-quotient, scale, values), inverse, quotient)
    scaled = corrected if IS_BOUNDED else tl.where(tl.abs(quotient) < 1024.0, corrected, quotient)  # may be infinite
    if IS_FP8:
        if not IS_BOUNDED:
            scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        return scaled.to(tl.float8e4nv).to(dtype)
    scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    return ((scaled + 12582912.0) - 12582912.0).to(dtype)  # 1.5 * 2^23: the sum has no bits after the point
