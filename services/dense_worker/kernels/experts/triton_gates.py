"""The activations of experts, within kernels. Reference: `model.experts.routed_experts.RoutedExperts.activate`."""

from __future__ import annotations

import triton
import triton.language as tl

from services.common.families.shape import Activation, ClampedSwiglu
from services.dense_worker.kernels.linear.triton_activation import activated


def gate_name(activation: Activation, clamped: ClampedSwiglu | None) -> str:
    """The GATE of `activate`; a clamped SwiGLU takes the place of `activation`."""
    assert activation in (Activation.SILU, Activation.GELU_TANH), "`select` refuses the others"
    return activation.value if clamped is None else "clamped"


@triton.jit
def activate(gate, up, alpha, limit, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """activation(gate) * up for the activation that GATE names, "clamped" is that of gpt-oss (`ClampedSwiglu`).

    In float32; inputs and activation are rounded to DTYPE, as separate operators would round them.
    """
    if GATE != "clamped":
        return activated(gate, up, GATE, True, DTYPE)
    else:
        # NaN stays NaN.
        gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
