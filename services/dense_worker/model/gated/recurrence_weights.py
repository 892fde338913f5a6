"""The weights of gated delta layers that act within the recurrence, which the attention worker computes."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from services.common.attention.gated_delta import GatedDeltaWeights
from services.common.errors import ModelError
from services.common.families.names import names_of
from services.common.model_config import ModelConfig
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import Checkpoint, open_checkpoint

RecurrenceWeights = dict[int, GatedDeltaWeights]  # by layer, in order

_CONV_STD = 0.3  # of random weights of the convolution
_MAX_DECAY_RATE = 16.0  # random rates are spread evenly from 1 to this


def recurrence_names(config: ModelConfig) -> list[str]:
    """The tensors of a checkpoint that hold these weights; empty for a model without gated delta layers."""
    page = names_of(config)
    names = page.of_gated_delta
    tensors = (names.conv, names.a_log, names.dt_bias)
    return [f"{page.layers}.{layer}.{name}" for layer in config.gated_delta_layers for name in tensors]


def load_recurrence_weights(path: Path, config: ModelConfig) -> RecurrenceWeights:
    """The weights in the Hugging Face directory `path`; empty for a model without gated delta layers.

    Raises ModelError, which names tensor and value, if one is missing or not finite.
    """
    if not config.gated_delta_layers:
        return {}
    page = names_of(config)
    names, found = page.of_gated_delta, {}
    with open_checkpoint(path, page.canonical) as checkpoint:
        for layer, sizes in config.gated_delta_layers.items():
            prefix, num_heads = f"{page.layers}.{layer}", (sizes.num_value_heads,)
            conv = _read(checkpoint, f"{prefix}.{names.conv}", (sizes.conv_dim, 1, sizes.conv_size))
            a_log = _read(checkpoint, f"{prefix}.{names.a_log}", num_heads)
            dt_bias = _read(checkpoint, f"{prefix}.{names.dt_bias}", num_heads)
            found[layer] = _as_values(conv, a_log, dt_bias)
    return found


def random_recurrence_weights(config: ModelConfig, seed: int) -> RecurrenceWeights:
    """Weights for random models, with which states neither vanish nor grow at once."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for layer, sizes in config.gated_delta_layers.items():
        conv = _CONV_STD * torch.randn(sizes.conv_dim, sizes.conv_size, generator=generator)
        rates = 1 + (_MAX_DECAY_RATE - 1) * torch.rand(sizes.num_value_heads, generator=generator)
        # With a = 0 a token then decays a state by exp(-rate * log(2) / 16), which is 0.96 to 0.5.
        dt_bias = torch.full((sizes.num_value_heads,), math.log(2 ** (1 / _MAX_DECAY_RATE) - 1))
        found[layer] = _as_values(conv, rates.log(), dt_bias)
    return found


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name not in checkpoint:
        raise ModelError(f"the checkpoint lacks {name}, which its config.json calls for")
    tensor = checkpoint.read(name, FLOATS, (shape,)).float()
    if not tensor.isfinite().all():
        value = tensor[~tensor.isfinite()][0].item()
        raise ModelError(f"{name} in {checkpoint.file_of(name)} has {value}, expected finite numbers")
    return tensor


def _as_values(conv: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> GatedDeltaWeights:
    in_rows = conv.contiguous().numpy().astype("<f4", copy=False)
    return GatedDeltaWeights(in_rows.tobytes(), tuple(a_log.tolist()), tuple(dt_bias.tolist()))
