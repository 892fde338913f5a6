"""The activations of experts, within kernels. Reference: `model.experts.routed_experts.RoutedExperts.activate`."""

from __future__ import annotations

import triton
import triton.language as tl

from services.common.families.shape import Activation, ClampedSwiglu
from services.dense_worker.backends.triton_activation import swiglu


def gate_name(activation: Activation, clamped: ClampedSwiglu | None) -> str:
    """The GATE of `activate`; a clamped SwiGLU takes the place of `activation`."""
    assert activation in (Activation.SILU, Activation.GELU_TANH), "`select` refuses the others"
    return activation.value if clamped is None else "clamped"


@triton.jit
def activate(gate, up, alpha, limit, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """activation(gate) * up for the activation that GATE names, "clamped" is that of gpt-oss (`ClampedSwiglu`).

    In float32; inputs and activation are rounded to DTYPE, as separate operators would round them.
    """
    if GATE == "silu":
        return swiglu(gate, up, DTYPE)
    elif GATE == "gelu_tanh":  # arXiv:1606.08415, with 0.5 * (1 + tanh(x)) as the sigmoid of 2 x
        gate = gate.to(DTYPE).to(tl.float32)
        gelu = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
        return gelu.to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)
    else:
        # NaN stays NaN.
        gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
