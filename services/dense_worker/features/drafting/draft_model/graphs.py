"""`DraftGraphs`: a draft model's passes for a single sequence, as captured CUDA graphs.

A small model's pass takes longer to launch, kernel by kernel, than to run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from services.common.batch_buckets import bucket_for
from services.common.cuda_graphs import StepGraphs
from services.dense_worker.features.drafting.draft_model.model import DraftModel
from services.dense_worker.features.drafting.kv_cache.draft_blocks import block_buckets

_ROWS = [1, 8]  # numbers of rows: a draft, and the tokens of a step with drafts


class _Size(NamedTuple):
    """What a graph depends on."""

    num_rows: int
    num_blocks: int


class DraftGraphs:
    """Runs a `DraftModel` on a GPU. Passes of several sequences, or of many rows, run kernel by kernel."""

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
