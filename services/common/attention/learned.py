"""`Learned`: what attention has of a checkpoint. The dense worker reads it, and sends it when it attaches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from services.common.kv_cache.scales import KVScales
from services.pb import attn_pb2


@dataclass(frozen=True, slots=True)
class RecurrenceWeights:
    """The weights of a recurrent layer that the attention worker computes with.

    The layer's `services.common.families.shape.Recurrence` says what there is, and how many numbers.
    """

    conv: bytes = b""  # float32, little-endian, [conv_dim, conv_size]; the last column is that of the own token
    a_log: tuple[float, ...] = ()  # by head; the decay of a token is exp(-exp(a_log) * softplus(a + dt_bias))
    dt_bias: tuple[float, ...] = ()  # by head
    conv_bias: bytes = b""  # float32, little-endian, [conv_dim]
    d: tuple[float, ...] = ()  # by head or channel: the input times this is added to the recurrence's output
    a_logs: bytes = b""  # float32, little-endian, [num_channels, state_size]: of a selective scan, in place of `a_log`


@dataclass(frozen=True, slots=True)
class Learned:
    """Most models have nothing of it."""

    scales: KVScales | None = None  # of an FP8 KV cache; None: the checkpoint has none, and all are 1
    sinks: Sequence[Sequence[float]] = ()  # [num_layers][num_heads]
    recurrences: Mapping[int, RecurrenceWeights] = field(default_factory=dict)  # by layer, in order
    relative_bias: Sequence[Sequence[float]] = ()  # [num_buckets][num_heads]

    def of_layers(self, layers: Sequence[int]) -> Learned:
        """That of some layers, which count from 0 there."""
        return Learned(
            self.scales and self.scales.of_layers(layers),
            [self.sinks[layer] for layer in layers] if self.sinks else (),
            {place: self.recurrences[layer] for place, layer in enumerate(layers) if layer in self.recurrences},
            self.relative_bias,
        )

    def of_part(self, layers: range, heads: range) -> Learned:
        """That of some layers and heads."""
        part = self.of_layers(layers)
        return replace(part, sinks=[each[heads.start : heads.stop] for each in part.sinks])


def encode_learned(learned: Learned) -> attn_pb2.AttachRequest:
    """The fields of the request that have it."""
    scales = learned.scales
    return attn_pb2.AttachRequest(
        key_scales=scales.keys if scales else (),
        value_scales=scales.values if scales else (),
        sinks=itertools.chain.from_iterable(learned.sinks),
        recurrences=[
            attn_pb2.RecurrenceWeights(layer=layer, **asdict(each)) for layer, each in learned.recurrences.items()
        ],
        relative_bias=itertools.chain.from_iterable(learned.relative_bias),
    )
