"""The decoder's relative bias: a number for each bucket of distances and head, for the attention worker."""

from __future__ import annotations

from pathlib import Path

import torch

from services.common.errors import ModelError
from services.common.families.names import names_of
from services.common.model_config import ModelConfig
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import open_checkpoint

BiasTable = tuple[tuple[float, ...], ...]  # [num_buckets][num_heads]


def relative_bias_names(config: ModelConfig) -> list[str]:
    """The tensors of a checkpoint that hold the bias; empty for a model without one."""
    return [] if config.attention.relative_bias is None else [names_of(config).of_encoder.decoder_relative_bias]


def load_relative_bias(path: Path, config: ModelConfig) -> BiasTable:
    """The bias in the Hugging Face directory `path`; empty for a model without one.

    Raises ModelError, which names tensor and value, if it is missing or not finite.
    """
    bias = config.attention.relative_bias
    if bias is None:
        return ()
    [name] = relative_bias_names(config)
    with open_checkpoint(path, names_of(config).canonical) as checkpoint:
        if name not in checkpoint:
            raise ModelError(f"the checkpoint lacks {name}, which its config.json calls for")
        tensor = checkpoint.read(name, FLOATS, ((bias.num_buckets, config.num_heads),)).float()
        if not tensor.isfinite().all():
            value = tensor[~tensor.isfinite()][0].item()
            raise ModelError(f"{name} in {checkpoint.file_of(name)} has {value}, expected finite numbers")
    return tuple(tuple(row) for row in tensor.tolist())


def random_relative_bias(config: ModelConfig, seed: int) -> BiasTable:
    """A bias for random weights, normally distributed: as large as the scores that it is added to."""
    bias = config.attention.relative_bias
    if bias is None:
        return ()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(bias.num_buckets, config.num_heads, generator=generator)
    return tuple(tuple(row) for row in rows.tolist())
