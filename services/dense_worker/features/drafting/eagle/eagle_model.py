"""`EagleModel`: an EAGLE-3 head with a cache of its keys and values, in plain torch, on the served model's device."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import sdpa_kernel

from services.dense_worker.features.drafting.draft_model.model import KERNELS
from services.dense_worker.features.drafting.eagle.eagle_config import EagleConfig
from services.dense_worker.features.drafting.eagle.eagle_layer import EagleLayer
from services.dense_worker.features.drafting.kv_cache.draft_attention import DraftAttention


class EagleModel:
    """For one thread and one stream. No method waits for the device."""

    def __init__(self, config: EagleConfig, layer: EagleLayer, num_blocks: int, max_len: int) -> None:
        """num_blocks: of the cache, the spare one included; max_len: most tokens of a sequence"""
        self.residual_layers = config.residual_layers
        self.hidden_size, self.vocab_size = config.layer.hidden_size, config.layer.vocab_size
        self.num_blocks = num_blocks
        self.max_len = max_len
        self.dtype, self.device = layer.fc.dtype, layer.fc.device
        self._layer = layer
        self._attention = DraftAttention(config.layer, num_blocks, max_len, self.dtype, self.device)

    def keep(
        self, residuals: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Computes and stores keys and values of n tokens -> their hidden states [n, hidden].

        residuals: [n, 3, hidden]; token_ids: int64 [n], of the tokens after them; slots: int64 [n], of the cache;
        positions: int64 [n]
        """
        hidden = self._layer.join(residuals)
        self._attention.store(0, self._layer.keys_values(token_ids, hidden), slots, positions)
        return hidden

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts the second token after one token of each of b sequences; stores its keys and values.

        token_ids: int64 [b], of the next tokens; hidden: [b, hidden]; positions: int64 [b], -1 for padding; tables:
        int64 [b, num_blocks], see `DraftAttention.begin`; starts: int64 [b] -> logits float32 [b, vocab], the hidden
        states of the next tokens [b, hidden]
        """
        with sdpa_kernel(KERNELS):
            rows = self._attention.begin(positions[:, None], tables, starts)
            return self._layer.forward(token_ids, hidden, partial(self._attention.forward, 0, rows=rows))
