"""`StageCudaOperations`: the operations of a stage by fused kernels. All but the last stage compute all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.backends.cuda_operations import CudaOperations
from services.dense_worker.model.operations import Residual
from services.dense_worker.ranks.stage_links import StageLinks

if TYPE_CHECKING:
    from services.dense_worker.kernels.lora.cuda_lora import CudaLora


class StageCudaOperations(CudaOperations):
    """What stages exchange is enqueued on the current stream, between the kernels, and captured with them."""

    def __init__(
        self,
        config: ModelConfig,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        links: StageLinks,
        lora: CudaLora | None = None,
        *,
        is_last: bool,
    ) -> None:
        """`config`: with the stage's layers."""
        super().__init__(config, max_num_tokens, dtype, device, lora)
        self.links = links
        self._is_last = is_last

    def enter(self, num_rows: int) -> None:
        """The first operation of a stage that embeds no tokens."""
        if self._lora is not None and self._lora.is_active:
            self._lora.start(num_rows)

    def select_rows(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """Copies of the rows in the last stage; all rows themselves in others."""
        self.links.num_sampled = len(rows)
        if self._is_last:
            return super().select_rows(attn_out, residual, rows)
        return attn_out, Residual(residual)
