"""Runs whole steps of a `DenseBackend`. A simple function replaces attention; each token attends only to itself."""

from __future__ import annotations

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.backends import DenseBackend
from services.dense_worker.model.model_weights import ModelWeights


class Step:
    """One step, segment by segment. Between two segments only `attend` runs."""

    def __init__(self, backend: DenseBackend, config: ModelConfig, dtype: torch.dtype, token_ids: list[int]) -> None:
        self._backend, self._config = backend, config
        self._token_ids = torch.tensor(token_ids)
        self._qkv = torch.full((len(token_ids), config.qkv_size), torch.nan, dtype=dtype)

    def begin(self) -> None:
        self._residual = self._backend.first(self._token_ids, self._qkv)

    def middle(self, layer: int) -> None:
        attn_out = attend(self._qkv, self._config)
        self._residual = self._backend.middle(layer, attn_out, self._residual, self._qkv)

    def logits(self, rows: list[int]) -> torch.Tensor:
        return self._backend.last(attend(self._qkv, self._config), self._residual, torch.tensor(rows))


def run_step(
    backend: DenseBackend, config: ModelConfig, dtype: torch.dtype, token_ids: list[int], rows: list[int]
) -> torch.Tensor:
    """Logits [num_rows, vocab] of one step."""
    step = Step(backend, config, dtype, token_ids)
    step.begin()
    for layer in range(config.num_layers - 1):
        step.middle(layer)
    return step.logits(rows)


def attend(qkv: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """qkv [n, qkv_size] -> [n, attn_size]. The result depends on every element of q, k and v."""
    q, k, v = qkv.split([config.attn_size, config.kv_size, config.kv_size], dim=1)
    group = config.attn_size // config.kv_size
    return torch.tanh(q) + torch.tanh(k - 2 * v).repeat(1, group)


def make_noisy(weights: ModelWeights) -> ModelWeights:
    """Fills all tensors with random numbers. If norms or biases were 1 or 0, a test could not notice a missing one."""
    generator = torch.Generator().manual_seed(1)
    for _, tensor in weights.named_tensors():
        tensor.normal_(0.5 if tensor.dim() == 1 else 0.0, 0.2, generator=generator)
    return weights


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference relative to the greatest value."""
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
