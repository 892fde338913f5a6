"""`DraftModel`: a small dense model with a KV cache of its own, in plain torch, on the device of the served model."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from services.common.model_config import ModelConfig
from services.dense_worker.features.drafting.kv_cache.draft_attention import DraftAttention
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.segments import segments_of
from services.dense_worker.model.torch_operations import TorchOperations

# Not cuDNN's, which prepares each new shape for a long time.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class DraftModel:
    """For one thread and one stream. No method waits for the device."""

    def __init__(self, weights: ModelWeights, config: ModelConfig, num_blocks: int, max_len: int) -> None:
        """num_blocks: of the cache, the spare one included; max_len: most tokens of a sequence"""
        self.config = config
        self.device = weights.device
        self.num_blocks = num_blocks
        self.max_len = max_len
        self._dtype = weights.dtype
        self._segments = segments_of(weights)
        self._operations = TorchOperations()
        self._attention = DraftAttention(config, num_blocks, max_len, weights.dtype, weights.device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Computes r tokens of each of b sequences, and keeps their keys and values.

        token_ids: int64 [b, r]; positions: int64 [b, r], -1 for padding; tables: int64 [b, num_blocks], the blocks of
        each sequence; rows: int64 [n] of the b * r rows, or None -> their logits float32 [n, vocab], or None
        """
        with sdpa_kernel(KERNELS):
            return self._forward(token_ids, positions, tables, rows)

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        segments, operations = self._segments, self._operations
        of_step = self._attention.begin(positions, tables)
        operations.set_positions(positions.clamp(min=0).flatten())
        shape = (positions.numel(), self.config.qkv_size)
        qkv = torch.empty(shape, dtype=self._dtype, device=self.device)
        residual = segments.first.forward(operations, token_ids.flatten(), qkv)[1]
        for layer, middle in enumerate(segments.middle):
            attn_out = self._attention.forward(layer, qkv, of_step)
            residual = middle.forward(operations, attn_out, residual, qkv)[1]
        attn_out = self._attention.forward(len(segments.middle), qkv, of_step)
        return None if rows is None else segments.last.forward(operations, attn_out, residual, rows)
