"""The activations of experts, within kernels. Reference: `model.experts.routed_experts.RoutedExperts.activate`."""

from __future__ import annotations

import triton
import triton.language as tl

from services.dense_worker.backends.triton_activation import swiglu


@triton.jit
def activate(gate, up, alpha, limit, IS_CLAMPED: tl.constexpr, DTYPE: tl.constexpr):
    """SiLU(gate) * up, or if IS_CLAMPED the activation of gpt-oss: see `ClampedSwiglu`. In float32."""
    if not IS_CLAMPED:
        return swiglu(gate, up, DTYPE)
    else:
        # Inputs are rounded to DTYPE, as separate operators would round them. NaN stays NaN.
        gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
