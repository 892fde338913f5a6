"""The seam between the dense worker's step and whatever computes the segments."""

from __future__ import annotations

from typing import Protocol

import torch

from services.step import StepPlan


class DenseBackend(Protocol):
    """Runs a model's dense stroke: `first`, `middle` per layer but the last, `last`. For one stream.

    All tensors are on the backend's device, n tokens of all sequences concatenated, activations in the model's dtype.
    The channel owns `qkv_out` and `attn_out`. The residual belongs to the step: each call takes what the call before
    gave, may overwrite it, and gives what takes its place; a backend keeps none, so several steps may be under way.
    Nothing here waits for the device. `first`, `middle` and `last` may be captured in a CUDA graph, which then serves
    exactly the numbers of tokens and rows it was captured with.
    """

    def begin_step(self, plan: StepPlan, num_tokens: int) -> None:
        """Prepares a step of `num_tokens` tokens (padding included) on the host. Called once a step, before it.

        Never captured: whatever differs between two steps of one captured graph is made ready here, such as the
        adapter of each row, copied to where the graph reads it.
        """

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [n]; writes the qkv of layer 0 into qkv_out [n, qkv_size] -> a new residual [n, hidden]."""

    def middle(
        self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv_out: torch.Tensor
    ) -> torch.Tensor:
        """Finishes `layer` from attn_out [n, attn_size]; writes the qkv of `layer + 1` -> the residual [n, hidden]."""

    def last(self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """rows int64 [r] of the step's tokens -> logits float32 [r, vocab], the caller's to keep.

        Leaves the residual as it is. Left out when no token of the step needs logits; called again where more rows
        need them than are wanted at a time.
        """
