"""`StageOperations`: the operations of a stage in torch. All but the last stage compute all rows to their end."""

from __future__ import annotations

import torch

from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.model.operations import Residual
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.ranks.stage_links import StageLinks


class StageOperations(TorchOperations):
    """Rows of the residual go through `links`."""

    def __init__(self, links: StageLinks, lora: LoraStore | None, *, is_last: bool) -> None:
        super().__init__(lora)
        self.links = links
        self._is_last = is_last

    def enter(self, num_rows: int) -> None:
        """Nothing: the first operation of a step prepares no other."""

    def select_rows(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """Copies of the rows in the last stage; all rows themselves in others."""
        self.links.num_sampled = len(rows)
        if self._is_last:
            return super().select_rows(attn_out, residual, rows)
        return attn_out, Residual(residual)
