"""The segments run by torch, operator by operator, on any device: the reference and the CPU default."""

from __future__ import annotations

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.model.segments import First, Last, Middle
from services.dense_worker.model.weights import ModelWeights


class TorchBackend:
    """A DenseBackend on the device where `weights` lie, for one thread and one step at a time.

    No weight requires a gradient, so nothing is recorded; under `torch.inference_mode` (where the engine
    loop belongs) it is a little faster still.
    """

    def __init__(self, weights: ModelWeights, config: ModelConfig) -> None:
        self._first, self._middle, self._last = First(config), Middle(config), Last(config)
        self._first_weights = self._first.select(weights)
        self._middle_weights = [self._middle.select(weights, layer) for layer in range(config.num_layers - 1)]
        self._last_weights = self._last.select(weights)
        self._residual: torch.Tensor | None = None  # [n, hidden], from `first` to `last`

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """See DenseBackend."""
        _, self._residual = self._first(token_ids, *self._first_weights, qkv_out=qkv_out)

    def middle(self, layer: int, attn_out: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """See DenseBackend."""
        assert self._residual is not None, "middle before first"
        weights = self._middle_weights[layer]
        _, self._residual = self._middle(attn_out, self._residual, *weights, qkv_out=qkv_out)

    def last(self, attn_out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See DenseBackend."""
        assert self._residual is not None, "last before first"
        return self._last(attn_out, self._residual, rows, *self._last_weights)
