"""The seam between the dense worker's step and whatever computes the segments."""

from __future__ import annotations

from typing import Protocol

import torch


class DenseBackend(Protocol):
    """Runs a model's dense stroke, one step at a time: `first`, `middle` per layer but the last, `last`.

    All tensors are on the backend's device and of the model's dtype, n tokens of all sequences
    concatenated. The channel owns `qkv_out` and `attn_out`; the backend keeps the residual
    [n, hidden] between the calls of a step. Nothing here waits for the device.
    """

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """Begin a step: token_ids int64 [n] -> qkv of layer 0, written into qkv_out [n, qkv_size]."""

    def middle(self, layer: int, attn_out: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """Finish `layer` from attn_out [n, attn_size]; write the qkv of `layer + 1` into qkv_out."""

    def last(self, attn_out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Finish the step: rows int64 [r] -> logits float32 [r, vocab], the caller's to keep.

        Left out when no token of the step needs logits; called again where more rows need them than are
        wanted at a time.
        """
