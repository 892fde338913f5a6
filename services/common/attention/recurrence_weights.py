"""`RecurrenceWeights`: the weights of a recurrent layer that the attention worker computes with. Plain values.

The dense worker reads them from the checkpoint and sends them when it attaches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecurrenceWeights:
    """Of one layer; its `services.common.families.shape.Recurrence` says what there is, and how many numbers."""

    conv: bytes = b""  # float32, little-endian, [conv_dim, conv_size]; the last column is that of the own token
    a_log: tuple[float, ...] = ()  # by head; the decay of a token is exp(-exp(a_log) * softplus(a + dt_bias))
    dt_bias: tuple[float, ...] = ()  # by head
    conv_bias: bytes = b""  # float32, little-endian, [conv_dim]
    d: tuple[float, ...] = ()  # by head or channel: the input times this is added to the recurrence's output
    a_logs: bytes = b""  # float32, little-endian, [num_channels, state_size]: of a selective scan, in place of `a_log`
