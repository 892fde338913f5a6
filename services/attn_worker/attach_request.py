"""Checks an `AttachRequest`: that both workers fit together, and what the dense worker read from its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from services.attn_worker.build import AttentionSetup
from services.attn_worker.cache.make_spec import StepLimits
from services.common.attention.learned import Learned, RecurrenceWeights
from services.common.config import MAX_LANES
from services.common.errors import ConfigError, InvalidRequest
from services.common.kv_cache.format import resolve_kv_cache_format
from services.common.kv_cache.scales import KVScales
from services.common.model_config import ModelConfig
from services.pb import attn_pb2


def num_lanes(request: attn_pb2.AttachRequest) -> int:
    """How many lanes the dense worker has; one that names none has one."""
    return request.num_lanes or 1


def check_model(request: attn_pb2.AttachRequest, setup: AttentionSetup) -> None:
    """Raises `ConfigError` if the dense worker has another model, or keys and values that are to be kept otherwise."""
    own = {
        "dtype": str(setup.model.dtype).removeprefix("torch."),
        "model_fingerprint": setup.model.config.fingerprint,
        "kv_cache_dtype": resolve_kv_cache_format(setup.section, setup.model),
        "deterministic": setup.is_deterministic,
        "split_context": setup.section.split_context,
    }
    for field, value in own.items():
        if getattr(request, field) != value:
            raise ConfigError(
                f"the dense worker's {field} is {getattr(request, field)}, the attention worker's is {value}: "
                "both must be started with the same sections model and attention, and the same dense.deterministic"
            )


def check_limits(request: attn_pb2.AttachRequest, limits: StepLimits | None) -> None:
    """Raises `ConfigError` if the dense worker may plan larger steps than the engine is built for. None: it is not."""
    if request.num_lanes > MAX_LANES:
        raise ConfigError(f"the dense worker's num_lanes is {request.num_lanes}, at most {MAX_LANES} are possible")
    if limits is None:
        return
    for field, limit in (("max_num_seqs", limits.max_num_seqs), ("max_num_batched_tokens", limits.max_num_tokens)):
        if getattr(request, field) > limit:
            raise ConfigError(
                f"the dense worker's {field} is {getattr(request, field)}, this attention worker was started for "
                f"{limit} by the first one: restart it, too"
            )
    if num_lanes(request) != limits.num_lanes:
        raise ConfigError(
            f"the dense worker's num_lanes is {num_lanes(request)}, this attention worker was started for"
            f" {limits.num_lanes} by the first one: restart it, too"
        )


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
    num_layers = config.num_layers if config.attention.has_sinks else 0
    return _read_rows(request.sinks, num_layers, config.num_heads, "sink", "sinks", "layer")


def read_relative_bias(request: attn_pb2.AttachRequest, config: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """The relative bias, [num_buckets][num_heads]; empty for a model without one.

    Raises InvalidRequest, which names the value, for a wrong number of values, and for one that is not finite.
    """
    bias = config.attention.relative_bias
    num_buckets = 0 if bias is None else bias.num_buckets
    return _read_rows(
        request.relative_bias, num_buckets, config.num_heads, "relative bias", "relative biases", "bucket"
    )


def _read_rows(
    given: Iterable[float], num_rows: int, num_heads: int, what: str, several: str, row_name: str
) -> tuple[tuple[float, ...], ...]:
    """Numbers by row and head, [num_rows][num_heads]. Raises InvalidRequest for a wrong count, and not finite ones.

    what, several, row_name: how messages name a number, all of them, and a row
    """
    values, expected = tuple(given), num_rows * num_heads
    if len(values) != expected:
        raise InvalidRequest(f"the dense worker has {len(values)} {several}, the model calls for {expected}")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            row, head = divmod(index, num_heads)
            raise InvalidRequest(
                f"the dense worker's {what} of {row_name} {row} and head {head} is {value}, expected a finite number"
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
