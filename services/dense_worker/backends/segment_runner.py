"""The segments one by one, the residual in the caller's hands: so TensorRT and torch take turns in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.model.segments import First, Last, Middle
from services.dense_worker.model.weights import ModelWeights

if TYPE_CHECKING:
    from services.dense_worker.backends.cuda_backend import CudaBackend


class SegmentRunner(Protocol):
    """A DenseBackend that leaves the residual to its caller, so that two can take turns within a step."""

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [n]; writes qkv_out [n, qkv_size] -> a new residual [n, hidden]."""

    def middle(
        self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv_out: torch.Tensor
    ) -> torch.Tensor:
        """attn_out [n, attn_size], residual [n, hidden]; writes qkv_out -> a new residual [n, hidden]."""

    def last(self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """rows int64 [r], r >= 1 -> logits float32 [r, vocab]."""


def torch_segments(weights: ModelWeights, config: ModelConfig, max_num_tokens: int) -> SegmentRunner:
    """The fastest way without TensorRT on the device where `weights` lie."""
    if weights.embed.device.type == "cpu":
        return TorchSegments(weights, config)
    from services.dense_worker.backends.cuda_backend import CudaBackend  # needs triton

    return CudaSegments(CudaBackend(weights, config, max_num_tokens))


class TorchSegments:
    """A SegmentRunner by torch."""

    def __init__(self, weights: ModelWeights, config: ModelConfig) -> None:
        self._first, self._middle, self._last = First(config), Middle(config), Last(config)
        self._first_weights = self._first.select(weights)
        self._middle_weights = [self._middle.select(weights, layer) for layer in range(config.num_layers - 1)]
        self._last_weights = self._last.select(weights)

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> torch.Tensor:
        """See SegmentRunner."""
        return self._first(token_ids, *self._first_weights, qkv_out=qkv_out)[1]

    def middle(
        self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv_out: torch.Tensor
    ) -> torch.Tensor:
        """See SegmentRunner."""
        return self._middle(attn_out, residual, *self._middle_weights[layer], qkv_out=qkv_out)[1]

    def last(self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See SegmentRunner."""
        return self._last(attn_out, residual, rows, *self._last_weights)


class CudaSegments:
    """A SegmentRunner by CudaBackend, which keeps the residual in a workspace of its own.

    A residual that another runner made is copied in; those returned are the workspace itself.
    """

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> torch.Tensor:
        """See SegmentRunner."""
        self._backend.first(token_ids, qkv_out)
        return self._backend.residual(len(token_ids))

    def middle(
        self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv_out: torch.Tensor
    ) -> torch.Tensor:
        """See SegmentRunner."""
        own = self._take(residual)
        self._backend.middle(layer, attn_out, qkv_out)
        return own

    def last(self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See SegmentRunner."""
        self._take(residual)
        return self._backend.last(attn_out, rows)

    def _take(self, residual: torch.Tensor) -> torch.Tensor:
        own = self._backend.residual(len(residual))
        if own.data_ptr() != residual.data_ptr():
            own.copy_(residual)
        return own
