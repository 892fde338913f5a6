"""The segments run by torch, operator by operator, on any device: the reference and the CPU default."""

from __future__ import annotations

import torch

from services.dense_worker.backends import GivenEmbeds, InputEmbeds
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.operations import Operations
from services.dense_worker.model.segments import segments_of
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.sampling.upload import upload
from services.step import StepPlan, positions_of


class TorchBackend:
    """A DenseBackend on the device where `weights` lie. Its operations overwrite no residual.

    No weight requires a gradient, so nothing is recorded; under `torch.inference_mode` (where the engine
    loop belongs) it is a little faster still.
    """

    takes_input_embeds = True
    captures_embeds = False
    gives_hidden_states = True
    skips_logits = True
    logits_dtype = torch.float32

    def __init__(self, weights: ModelWeights, operations: Operations | None = None) -> None:
        """`operations`: None: the plain ones, without adapters. Others may overwrite residuals."""
        self._segments = segments_of(weights)
        self.always_ends = weights.head.passes_rows_on
        self._operations = operations or TorchOperations()
        self._reads_positions, self._device = weights.reads_positions, weights.device

    def begin_step(
        self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, input_embeds: InputEmbeds | None = None
    ) -> None:
        """Passes the positions on, if the embedding needs them. Steps share nothing else but weights and adapters."""
        if self._reads_positions:
            self._operations.set_positions(upload(positions_of(plan, num_tokens), self._device))

    def choose_products(self, num_rows: int) -> None:
        """There is one way to multiply."""

    def first(
        self, token_ids: torch.Tensor, qkv_out: torch.Tensor, input_embeds: GivenEmbeds | None = None
    ) -> torch.Tensor:
        """Writes qkv in place -> a new residual."""
        return self._segments.first.forward(self._operations, token_ids, qkv_out, input_embeds)[1]

    def middle(
        self,
        layer: int,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        qkv_out: torch.Tensor,
        added: InputEmbeds | None = None,
    ) -> torch.Tensor:
        """Writes qkv in place -> the next residual."""
        return self._segments.middle[layer].forward(self._operations, attn_out, residual, qkv_out, added)[1]

    def last(
        self,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the selected rows -> their logits."""
        return self._segments.last.forward(self._operations, attn_out, residual, rows, hidden_out)

    def hidden(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor
    ) -> None:
        """Computes the selected rows without logits."""
        self._segments.last.hidden(self._operations, attn_out, residual, rows, hidden_out)
