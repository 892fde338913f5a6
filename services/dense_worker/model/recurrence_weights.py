"""The weights of recurrent layers that act within the recurrence, which the attention worker computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from services.common.attention.learned import RecurrenceWeights
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
from services.common.model_config import ModelConfig
from services.dense_worker.model.checkpoint import open_checkpoint

WeightsByLayer = dict[int, RecurrenceWeights]  # by layer, in order

_CONV_STD = 0.3  # of random weights of the convolution
_MAX_DECAY_RATE = 16.0  # random rates are spread evenly from 1 to this


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
