"""The protocol between the dense worker's step and the backends that compute the segments."""

from __future__ import annotations

from typing import Protocol

import torch

from services.dense_worker.features.prompt_embeds.given_rows import GivenRows
from services.step import StepPlan


class DenseBackend(Protocol):
    """Runs a model's dense stroke: `first`, `middle` for every layer but the last, `last`. For one stream.

    All tensors are on the backend's device, n tokens of all sequences concatenated, activations in the model's dtype.
    The channel owns `qkv_out` and `attn_out`. The step owns the residual: each call takes the residual that the
    previous call returned, may overwrite it, and returns the next one. A backend keeps no residual, so several steps
    may be in flight. No method waits for the device. `first`, `middle` and `last` may be captured in a CUDA graph,
    which is then valid only for the numbers of tokens and rows of its capture. Each must have run for these numbers
    before, `middle` for one layer.
    """

    takes_given_rows: bool  # whether `first` may be given vectors in place of embeddings
    gives_hidden_states: bool  # whether `last` may be given `hidden_out`

    def begin_step(self, plan: StepPlan, num_tokens: int) -> None:
        """Prepares a step of `num_tokens` tokens (padding included) on the host. Called once before each step.

        It is never captured. It prepares everything that differs between two steps of one captured graph, such as the
        adapter of each row, and copies it to where the graph reads it.
        """

    def first(
        self, token_ids: torch.Tensor, qkv_out: torch.Tensor, given: GivenRows | None = None
    ) -> torch.Tensor:
        """token_ids int64 [n]; writes the qkv of layer 0 into qkv_out [n, qkv_size] -> a new residual [n, hidden].

        given: rows of the step whose vectors are given; their token ids are any valid ones. Never during a capture.
        """

    def middle(
        self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv_out: torch.Tensor
    ) -> torch.Tensor:
        """Finishes `layer` from attn_out [n, attn_size]; writes the qkv of `layer + 1` -> the residual [n, hidden]."""

    def last(
        self,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """rows int64 [r] of the step's tokens -> logits float32 [r, vocab], which the caller owns.

        The rows' hidden states after the final norm are written to hidden_out [r, hidden], if that is given: see
        `gives_hidden_states`.
        Does not change the residual. It is not called if no token of the step needs logits, and called several times if
        more rows need logits than fit into one call.
        """
