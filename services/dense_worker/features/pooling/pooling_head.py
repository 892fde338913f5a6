"""`PoolingHead`: the layers between a pooled hidden state and the vector of an input, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from services.common.errors import ModelError
from services.common.pooling.pooling_config import ClassifierHead, DenseStage, PooledActivation, PoolingConfig
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import open_checkpoint

_ACTIVATIONS = {
    PooledActivation.NONE: lambda values: values,
    PooledActivation.TANH: torch.tanh,
    PooledActivation.RELU: F.relu,
    PooledActivation.GELU: F.gelu,
}


@dataclass(frozen=True, slots=True)
class PooledLayer:
    """activation(weight · x + bias)"""

    weight: torch.Tensor  # float32 [out, in]
    bias: torch.Tensor | None  # float32 [out]
    activation: PooledActivation = PooledActivation.NONE

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [n, in] -> [n, out]"""
        return _ACTIVATIONS[self.activation](F.linear(values, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """Mostly it has no layers: then the vector is the hidden state."""

    layers: tuple[PooledLayer, ...] = ()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [n, hidden] -> [n, size]"""
        for layer in self.layers:
            values = layer.forward(values)
        return values


def load_pooling_head(
    pooling: PoolingConfig, path: Path, hidden_size: int, device: torch.device, language_head: torch.Tensor | None
) -> PoolingHead:
    """The layers that a decoder's checkpoint in `path` has after pooling.

    language_head: [vocab, hidden], for classifiers by tokens. Raises ModelError for a file or tensor that is missing
    or of another shape.
    """
    layers = [_load_stage(stage, device) for stage in pooling.stages]
    if pooling.head is ClassifierHead.SCORE:
        weight = _read(path, "score.weight", (len(pooling.labels), hidden_size))
        layers.append(PooledLayer(weight.to(device), None))
    elif pooling.head is ClassifierHead.EACH_TOKEN:
        num_labels = len(pooling.labels)
        weight, bias = _read(path, "score.weight", (num_labels, hidden_size)), _read(path, "score.bias", (num_labels,))
        layers.append(PooledLayer(weight.to(device), bias.to(device)))
    elif pooling.head is ClassifierHead.TOKENS:
        if language_head is None:
            raise ModelError(f"{path}: model.classifier_from_token needs an lm_head that is not quantized")
        rows = [language_head[_token_id(path, token)].float() for token in pooling.tokens]
        layers.append(PooledLayer((rows[1] - rows[0] if len(rows) == 2 else rows[0])[None], None))
    size = hidden_size
    for layer in layers:
        num_read = layer.weight.shape[1]
        if num_read != size:
            raise ModelError(f"{path}: a dense layer after pooling reads {num_read} values, there are {size}")
        size = layer.weight.shape[0]
    return PoolingHead(tuple(layers))


def random_pooling_head(
    pooling: PoolingConfig, hidden_size: int, device: torch.device, seed: int
) -> PoolingHead:
    """Layers of the same shapes with random weights."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = [(stage.out_features, stage.activation) for stage in pooling.stages]
    if pooling.head is not None:
        sizes.append((len(pooling.labels), PooledActivation.NONE))
    layers, size = list[PooledLayer](), hidden_size
    for num_rows, activation in sizes:
        weight = torch.randn(num_rows, size, device=device, generator=generator) * size**-0.5
        layers.append(PooledLayer(weight, None, activation))
        size = num_rows
    return PoolingHead(tuple(layers))


def _load_stage(stage: DenseStage, device: torch.device) -> PooledLayer:
    weight = _read(stage.path, "linear.weight", (stage.out_features, stage.in_features)).to(device)
    bias = _read(stage.path, "linear.bias", (stage.out_features,)).to(device) if stage.has_bias else None
    return PooledLayer(weight, bias, stage.activation)


def _read(path: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    with open_checkpoint(path, lambda stored: stored) as checkpoint:
        if name not in checkpoint:
            raise ModelError(f"{path} has no tensor {name}, which its config calls for")
        return checkpoint.read(name, FLOATS, (shape,)).float()


def _token_id(path: Path, token: str) -> int:
    from services.grammar.hf_tokenizer import load_hf_tokenizer  # imports transformers, which other models do not need

    token_id = load_hf_tokenizer(path).backend_tokenizer.token_to_id(token)
    if token_id is None:
        raise ModelError(f"{path} has no token {token!r}, which model.classifier_from_token names")
    return token_id
