"""Reads what attention has of a checkpoint, `Learned`: the attention worker computes with it, and gets it from here.

Most models have nothing of it. Of recurrent layers these are the weights that act within the recurrence.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import structlog
import torch

from services.common.attention.learned import Learned, RecurrenceWeights
from services.common.config import Config
from services.common.errors import ModelError
from services.common.families.names import (
    CheckpointNames,
    GatedDeltaNames,
    SelectiveScanNames,
    ShortConvolutionNames,
    StateSpaceNames,
    mixer_name,
    names_of,
)
from services.common.families.shape import GatedDelta, Recurrence, SelectiveScan, ShortConvolution, StateSpace
from services.common.kv_cache.format import KVCacheFormat
from services.common.kv_cache.scales import KVScales
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from services.dense_worker.model.checkpoint import Checkpoint, open_checkpoint

log = structlog.get_logger()

Rows = tuple[tuple[float, ...], ...]  # sinks [num_layers][num_heads], a relative bias [num_buckets][num_heads]

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    # compressed-tensors writes the first form, in earlier versions the third; ModelOpt writes the second.
    r"(?:(?:attn\.)?(?P<a>[kv])_scale|(?P<b>[kv])_proj\.(?P=b)_scale|(?P<c>[kv])_proj\.output_scale)"
)
_DTYPES = ("F32", "F16", "BF16")
_SHAPES = ((), (1,), (1, 1))

WeightsByLayer = dict[int, RecurrenceWeights]  # by layer, in order

_CONV_STD = 0.3  # of random weights of the convolution
_MAX_DECAY_RATE = 16.0  # random rates are spread evenly from 1 to this


def load_learned(config: Config, model: ResolvedModel, kv_cache_dtype: KVCacheFormat) -> Learned:
    """What the model's attention has. Raises ModelError for what is missing or damaged."""
    if config.model.load_format == "dummy":
        return random_learned(model.config, config.model.dummy_seed)
    is_asked = config.attention.kv_cache_dtype == "auto"  # by the checkpoint, not by the config
    scales = _load_kv_scales(config.model.path, model.config, is_asked) if kv_cache_dtype == "fp8" else None
    return read_learned(config.model.path, model.config, scales)


def read_learned(path: Path, config: ModelConfig, scales: KVScales | None = None) -> Learned:
    """What the Hugging Face directory `path` has, with these scales. Raises ModelError."""
    return Learned(scales, load_sinks(path, config), load_recurrence_weights(path, config), _load_bias(path, config))


def random_learned(config: ModelConfig, seed: int) -> Learned:
    """The same for random weights."""
    bias = config.attention.relative_bias
    return Learned(
        sinks=random_sinks(config, seed),
        recurrences=random_recurrence_weights(config, seed),
        relative_bias=() if bias is None else _random_rows(bias.num_buckets, config.num_heads, seed),
    )


def learned_names(config: ModelConfig) -> list[str]:
    """The tensors of a checkpoint that hold it, without scales."""
    return [*_sink_names(config), *recurrence_names(config), *_bias_names(config)]


def load_sinks(path: Path, config: ModelConfig) -> Rows:
    """The sinks in the Hugging Face directory `path`; empty for a model without sinks. Raises ModelError."""
    if not config.attention.has_sinks:
        return ()
    with open_checkpoint(path, names_of(config).canonical) as checkpoint:
        return read_sinks(checkpoint, config)


def read_sinks(checkpoint: Checkpoint, config: ModelConfig) -> Rows:
    """The sinks of all layers. Raises ModelError, which names tensor and value, if one is missing or not finite."""
    sinks = [checkpoint.read_numbers(name, (config.num_heads,)) for name in _sink_names(config)]
    return tuple(tuple(each.tolist()) for each in sinks)


def random_sinks(config: ModelConfig, seed: int) -> Rows:
    """Sinks for random weights; empty for a model without sinks."""
    return _random_rows(config.num_layers, config.num_heads, seed) if config.attention.has_sinks else ()


def _sink_names(config: ModelConfig) -> list[str]:
    if not config.attention.has_sinks:
        return []
    names = names_of(config)
    return [f"{names.layers}.{layer}.{names.sinks}" for layer in range(config.num_layers)]


def _load_bias(path: Path, config: ModelConfig) -> Rows:
    """The relative bias; empty for a model without one."""
    bias = config.attention.relative_bias
    if bias is None:
        return ()
    [name] = _bias_names(config)
    with open_checkpoint(path, names_of(config).canonical) as checkpoint:
        rows = checkpoint.read_numbers(name, (bias.num_buckets, config.num_heads))
    return tuple(tuple(row) for row in rows.tolist())


def _bias_names(config: ModelConfig) -> list[str]:
    return [] if config.attention.relative_bias is None else [names_of(config).of_encoder.decoder_relative_bias]


def _random_rows(num_rows: int, num_heads: int, seed: int) -> Rows:
    """Normally distributed: as large as the scores that they compete with, or are added to."""
    rows = torch.randn(num_rows, num_heads, generator=torch.Generator().manual_seed(seed))
    return tuple(tuple(row) for row in rows.tolist())


def _load_kv_scales(path: Path, config: ModelConfig, is_asked: bool) -> KVScales | None:
    """The checkpoint's scales. If it asks for them and has none, only an explicit "fp8" makes them all 1."""
    with open_checkpoint(path, names_of(config).canonical) as checkpoint:
        scales = read_kv_scales(checkpoint, config.num_layers)
    if scales is None and is_asked:
        raise ModelError(
            f"{path} asks for an FP8 KV cache and lacks all its scales, such as"
            " model.layers.0.self_attn.k_proj.k_scale; with attention.kv_cache_dtype 'fp8' they are 1"
        )
    log.info("scales of the KV cache", source="the checkpoint" if scales else "none in the checkpoint: all are 1")
    return scales


def read_kv_scales(checkpoint: Checkpoint, num_layers: int) -> KVScales | None:
    """The scales in a checkpoint, of the first `num_layers` layers; None if there are none.

    Raises ModelError, which names tensor and value, if one is missing beside others, there twice, no single number, not
    finite, or not above 0.
    """
    names: dict[tuple[str, int], str] = {}  # by k or v, and layer
    for name in checkpoint.names:
        match = _NAME.fullmatch(name)
        if match is None or int(match["layer"]) >= num_layers:
            continue
        key = (match["a"] or match["b"] or match["c"], int(match["layer"]))
        if key in names:
            raise ModelError(f"{checkpoint.file_of(name)} holds {name}, and there is {names[key]} for the same scale")
        names[key] = name
    if not names:
        return None
    missing = [(kind, layer) for kind in "kv" for layer in range(num_layers) if (kind, layer) not in names]
    if missing:
        kind, layer = missing[0]
        name = next(iter(names.values()))
        folder = checkpoint.file_of(name).parent
        raise ModelError(f"{folder} lacks the {kind}_scale of layer {layer}'s KV cache, though it has {name}")
    keys, values = (tuple(_read_scale(checkpoint, names[kind, layer]) for layer in range(num_layers)) for kind in "kv")
    return KVScales(keys, values)


def _read_scale(checkpoint: Checkpoint, name: str) -> float:
    scale = checkpoint.read(name, _DTYPES, _SHAPES).float().item()
    if not (math.isfinite(scale) and scale > 0):
        raise ModelError(f"{name} in {checkpoint.file_of(name)} is {scale}, expected a finite number above 0")
    return scale


def recurrence_names(config: ModelConfig) -> list[str]:
    """The tensors of a checkpoint that hold these weights; empty for a model without recurrent layers."""
    page = names_of(config)
    return [
        f"{mixer_name(config, page, layer)}.{name}"
        for layer, sizes in config.recurrent_layers.items()
        for name in _tensor_names(page, sizes).values()
    ]


def load_recurrence_weights(path: Path, config: ModelConfig) -> WeightsByLayer:
    """The weights in the Hugging Face directory `path`; empty for a model without recurrent layers.

    Raises ModelError, which names tensor and value, if one is missing or not finite.
    """
    if not config.recurrent_layers:
        return {}
    page, found = names_of(config), WeightsByLayer()
    with open_checkpoint(path, page.canonical) as checkpoint:
        for layer, sizes in config.recurrent_layers.items():
            read = {}
            for field, name in _tensor_names(page, sizes).items():
                number, full_name = sizes.num_weights[field], f"{mixer_name(config, page, layer)}.{name}"
                shapes = {"conv": (sizes.conv_dim, 1, sizes.conv_size), "a_logs": sizes.state_shape}
                read[field] = checkpoint.read_numbers(full_name, shapes.get(field, (number,)))
            found[layer] = _as_values(**read)
    return found


def _tensor_names(page: CheckpointNames, sizes: Recurrence) -> dict[str, str]:
    """The tensors of a layer, relative to it, by the fields of `RecurrenceWeights`."""
    match sizes:
        case GatedDelta():
            names: GatedDeltaNames | StateSpaceNames | SelectiveScanNames | ShortConvolutionNames = page.of_gated_delta
        case StateSpace():
            names = page.of_state_space
        case ShortConvolution():
            names = page.of_short_convolution
        case SelectiveScan():
            names = page.of_selective_scan
    return {field: getattr(names, field) for field, number in sizes.num_weights.items() if number}


def random_recurrence_weights(config: ModelConfig, seed: int) -> WeightsByLayer:
    """Weights for random models, with which states neither vanish nor grow at once."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for layer, sizes in config.recurrent_layers.items():
        if isinstance(sizes, SelectiveScan):
            rates = torch.arange(1.0, sizes.state_size + 1).expand(sizes.state_shape)
            found[layer] = _as_values(a_logs=rates.log(), d=torch.ones(sizes.num_channels))
            continue
        weights = {"conv": _CONV_STD * torch.randn(sizes.conv_dim, sizes.conv_size, generator=generator)}
        if "a_log" in sizes.num_weights:
            num_heads = sizes.num_weights["a_log"]
            weights["a_log"] = (1 + (_MAX_DECAY_RATE - 1) * torch.rand(num_heads, generator=generator)).log()
            # With an input of 0 a token then decays a state by exp(-rate * log(2) / 16), which is 0.96 to 0.5.
            weights["dt_bias"] = torch.full((num_heads,), math.log(2 ** (1 / _MAX_DECAY_RATE) - 1))
        for field in ("conv_bias", "d"):
            if sizes.num_weights.get(field):
                weights[field] = torch.zeros(sizes.num_weights[field])
        found[layer] = _as_values(**weights)
    return found


def _as_values(**weights: torch.Tensor) -> RecurrenceWeights:
    """Matrices as bytes, the numbers of heads as tuples."""
    in_bytes = {"conv", "conv_bias", "a_logs"}
    values: dict[str, Any] = {field: tuple(each.tolist()) for field, each in weights.items() if field not in in_bytes}
    for field in weights.keys() & in_bytes:
        values[field] = weights[field].contiguous().numpy().astype("<f4", copy=False).tobytes()
    return RecurrenceWeights(**values)
