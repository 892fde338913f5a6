"""Checks the parts of an `AttachRequest` that a dense worker read from its checkpoint."""

from __future__ import annotations

import math

import numpy as np

from services.common.attention.learned import Learned
from services.common.attention.recurrence_weights import RecurrenceWeights
from services.common.errors import InvalidRequest
from services.common.kv_cache.scales import KVScales
from services.common.model_config import ModelConfig
from services.pb import attn_pb2


def read_learned(request: attn_pb2.AttachRequest, config: ModelConfig) -> Learned:
    """All of it, with scales. Raises InvalidRequest as the functions below do."""
    return Learned(
        read_scales(request, config.num_layers),
        read_sinks(request, config),
        read_recurrences(request, config),
        read_relative_bias(request, config),
    )


def read_scales(request: attn_pb2.AttachRequest, num_layers: int) -> KVScales:
    """The scales of an FP8 KV cache; 1 in each layer if the request has none.

    Raises InvalidRequest, which names the value, for a wrong number of scales, and for one that is not finite or not
    above 0.
    """
    by_field = {"key_scales": tuple(request.key_scales), "value_scales": tuple(request.value_scales)}
    if not any(by_field.values()):
        return KVScales.ones(num_layers)
    for field, scales in by_field.items():
        if len(scales) != num_layers:
            raise InvalidRequest(f"the dense worker has {len(scales)} {field}, the model has {num_layers} layers")
        for layer, scale in enumerate(scales):
            if not (math.isfinite(scale) and scale > 0):
                raise InvalidRequest(
                    f"the dense worker's {field} of layer {layer} is {scale}, expected a finite number above 0"
                )
    return KVScales(by_field["key_scales"], by_field["value_scales"])


def read_sinks(request: attn_pb2.AttachRequest, config: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """The learned sinks, [num_layers][num_heads]; empty for a model without them.

    Raises InvalidRequest, which names the value, for a wrong number of sinks, and for one that is not finite.
    """
    sinks, num_heads = tuple(request.sinks), config.num_heads
    expected = config.num_layers * num_heads if config.attention.has_sinks else 0
    if len(sinks) != expected:
        raise InvalidRequest(f"the dense worker has {len(sinks)} sinks, the model calls for {expected}")
    for index, sink in enumerate(sinks):
        if not math.isfinite(sink):
            layer, head = divmod(index, num_heads)
            raise InvalidRequest(
                f"the dense worker's sink of layer {layer} and head {head} is {sink}, expected a finite number"
            )
    return tuple(sinks[start : start + num_heads] for start in range(0, expected, num_heads))


def read_relative_bias(request: attn_pb2.AttachRequest, config: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """The relative bias, [num_buckets][num_heads]; empty for a model without one.

    Raises InvalidRequest, which names the value, for a wrong number of values, and for one that is not finite.
    """
    values, bias, num_heads = tuple(request.relative_bias), config.attention.relative_bias, config.num_heads
    expected = 0 if bias is None else bias.num_buckets * num_heads
    if len(values) != expected:
        raise InvalidRequest(f"the dense worker has {len(values)} relative biases, the model calls for {expected}")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            bucket, head = divmod(index, num_heads)
            raise InvalidRequest(
                f"the dense worker's relative bias of bucket {bucket} and head {head} is {value}, expected a finite"
                " number"
            )
    return tuple(values[start : start + num_heads] for start in range(0, expected, num_heads))


def read_recurrences(request: attn_pb2.AttachRequest, config: ModelConfig) -> dict[int, RecurrenceWeights]:
    """The weights of the recurrent layers, by layer; empty for a model without them.

    Raises InvalidRequest, which names the value, for other layers than the model's, for a wrong number of weights, and
    for a weight that is not finite.
    """
    expected = config.recurrent_layers
    layers = [weights.layer for weights in request.recurrences]
    if layers != list(expected):
        raise InvalidRequest(
            f"the dense worker has recurrence weights of layers {layers}, the model calls for {list(expected)}"
        )
    read = {}
    for weights in request.recurrences:
        sizes, layer = expected[weights.layer], weights.layer
        for field in ("conv", "conv_bias", "a_logs"):
            whole, rest = divmod(len(getattr(weights, field)), 4)
            if rest:
                raise InvalidRequest(f"the dense worker has {whole} weights and {rest} bytes {field} of layer {layer}")
        for field in ("conv", "conv_bias", "a_log", "dt_bias", "d", "a_logs"):
            given, number = getattr(weights, field), sizes.num_weights.get(field, 0)
            values = np.frombuffer(given, "<f4") if isinstance(given, bytes) else np.array(given)
            if len(values) != number:
                raise InvalidRequest(
                    f"the dense worker has {len(values)} weights {field} of layer {layer}, the model calls for {number}"
                )
            if not np.isfinite(values).all():
                value = values[~np.isfinite(values)][0]
                raise InvalidRequest(
                    f"the dense worker's {field} of layer {layer} has {value}, expected finite numbers"
                )
        read[layer] = RecurrenceWeights(
            weights.conv,
            tuple(weights.a_log),
            tuple(weights.dt_bias),
            weights.conv_bias,
            tuple(weights.d),
            weights.a_logs,
        )
    return read
