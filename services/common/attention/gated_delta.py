"""`GatedDeltaWeights`: the weights of a gated delta layer that the attention worker computes with. Plain values.

The dense worker reads them from the checkpoint and sends them when it attaches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """Of one layer; see `services.common.families.shape.GatedDelta` for the sizes."""

    conv: bytes  # float32, little-endian, [conv_dim, conv_size]; the last column is that of the own token
    a_log: tuple[float, ...]  # [num_value_heads]; the decay of a token is exp(-exp(a_log) * softplus(a + dt_bias))
    dt_bias: tuple[float, ...]  # [num_value_heads]
