"""Learned sinks of attention: a logit per layer and head. They are weights that the attention worker computes with."""

from __future__ import annotations

from pathlib import Path

import torch

from services.common.errors import ModelError
from services.common.families.names import names_of
from services.common.model_config import ModelConfig
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import Checkpoint, open_checkpoint

Sinks = tuple[tuple[float, ...], ...]  # [num_layers][num_heads]


def sink_names(config: ModelConfig) -> list[str]:
    """The tensors of a checkpoint that hold the sinks, by layer; empty for a model without sinks."""
    if not config.attention.has_sinks:
        return []
    names = names_of(config)
    return [f"{names.layers}.{layer}.{names.sinks}" for layer in range(config.num_layers)]


def load_sinks(path: Path, config: ModelConfig) -> Sinks:
    """The sinks in the Hugging Face directory `path`; empty for a model without sinks. Raises ModelError."""
    if not config.attention.has_sinks:
        return ()
    with open_checkpoint(path, names_of(config).canonical) as checkpoint:
        return read_sinks(checkpoint, config)


def read_sinks(checkpoint: Checkpoint, config: ModelConfig) -> Sinks:
    """The sinks of all layers. Raises ModelError, which names tensor and value, if one is missing or not finite."""
    sinks = []
    for name in sink_names(config):
        if name not in checkpoint:
            raise ModelError(f"the checkpoint lacks {name}, which its config.json calls for")
        tensor = checkpoint.read(name, FLOATS, ((config.num_heads,),)).float()
        if not tensor.isfinite().all():
            value = tensor[~tensor.isfinite()][0].item()
            raise ModelError(f"{name} in {checkpoint.file_of(name)} has {value}, expected finite numbers")
        sinks.append(tuple(tensor.tolist()))
    return tuple(sinks)


def random_sinks(config: ModelConfig, seed: int) -> Sinks:
    """Sinks for random weights, normally distributed: as large as the scores that they compete with."""
    if not config.attention.has_sinks:
        return ()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(config.num_layers, config.num_heads, generator=generator)
    return tuple(tuple(row) for row in rows.tolist())
