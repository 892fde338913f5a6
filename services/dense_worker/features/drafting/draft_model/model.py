"""`DraftModel`: a small dense model with a KV cache of its own, in plain torch, on the device of the served model.

`DraftGraphs`: its passes for a single sequence on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from services.common.batch_buckets import bucket_for
from services.common.cuda_graphs import StepGraphs
from services.common.model_config import ModelConfig
from services.dense_worker.features.drafting.kv_cache.draft_attention import DraftAttention
from services.dense_worker.features.drafting.kv_cache.draft_blocks import block_buckets
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.segments import segments_of
from services.dense_worker.model.torch_operations import TorchOperations

# Not cuDNN's, which prepares each new shape for a long time.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_ROWS = [1, 8]  # rows of a pass with a graph: a draft, and the tokens of a step with drafts


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


class _Size(NamedTuple):
    """What a graph depends on."""

    num_rows: int
    num_blocks: int


class DraftGraphs:
    """The passes of a `DraftModel` on a GPU for a single sequence, as captured CUDA graphs.

    A small model's pass takes longer to launch, kernel by kernel, than to run. Passes of several sequences, or of many
    rows, have no graph.
    """

    def __init__(self, model: DraftModel) -> None:
        """Captures all graphs, and waits for the device."""
        self._model = model
        self._num_blocks = block_buckets(model.max_len)
        # The inputs of all graphs. Padding has position -1, so that captures write to the spare block only.
        self._token_ids = torch.zeros(1, _ROWS[-1], dtype=torch.int64, device=model.device)
        self._positions = torch.full((1, _ROWS[-1]), -1, dtype=torch.int64, device=model.device)
        self._tables = torch.zeros(1, self._num_blocks[-1], dtype=torch.int64, device=model.device)
        self._rows = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._logits = torch.zeros(1, model.config.vocab_size, dtype=torch.float32, device=model.device)
        torch.cuda.synchronize()
        self._graphs: StepGraphs[_Size] = StepGraphs(torch.cuda.Stream(), self._run, self._run)
        self._graphs.capture_all(_Size(rows, blocks) for blocks in reversed(self._num_blocks) for rows in _ROWS[::-1])

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As `DraftModel.forward`. The next pass overwrites the logits."""
        (num_seqs, num_rows), num_blocks = token_ids.shape, tables.shape[1]
        if num_seqs > 1 or num_rows > _ROWS[-1] or rows is None:
            return self._model.forward(token_ids, positions, tables, rows)
        self._token_ids[:, :num_rows] = token_ids
        self._positions.fill_(-1)
        self._positions[:, :num_rows] = positions
        self._tables.zero_()
        self._tables[:, :num_blocks] = tables
        self._rows.copy_(rows)
        size = _Size(bucket_for(_ROWS, num_rows), bucket_for(self._num_blocks, num_blocks))
        self._graphs.find(size).replay()
        return self._logits

    def _run(self, size: _Size) -> None:
        token_ids, positions = self._token_ids[:, : size.num_rows], self._positions[:, : size.num_rows]
        logits = self._model.forward(token_ids, positions, self._tables[:, : size.num_blocks], self._rows)
        assert logits is not None, "there is a row"
        self._logits.copy_(logits)
