"""`EagleGraphs`: an EAGLE-3 head's passes for a single sequence, as captured CUDA graphs.

A layer takes longer to launch, kernel by kernel, than to run.
"""

from __future__ import annotations

import torch

from services.common.batch_buckets import bucket_for
from services.common.cuda_graphs import StepGraphs
from services.dense_worker.features.drafting.eagle.eagle_model import EagleModel
from services.dense_worker.features.drafting.kv_cache.draft_blocks import block_buckets


class EagleGraphs:
    """Runs an `EagleModel` on a GPU: a graph for each power of two of blocks. Several sequences run without one."""

    def __init__(self, model: EagleModel) -> None:
        """Captures all graphs, and waits for the device."""
        self._model = model
        self._num_blocks = block_buckets(model.max_len)
        # The inputs of all graphs. Padding has position -1, so that captures write to the spare block only.
        integers = torch.zeros(3, 1, dtype=torch.int64, device=model.device)
        self._token_ids, self._positions, self._starts = integers
        self._positions.fill_(-1)
        self._tables = torch.zeros(1, self._num_blocks[-1], dtype=torch.int64, device=model.device)
        self._hidden = torch.zeros(1, model.hidden_size, dtype=model.dtype, device=model.device)
        self._output = torch.zeros_like(self._hidden)
        self._logits = torch.zeros(1, model.vocab_size, dtype=torch.float32, device=model.device)
        torch.cuda.synchronize()
        self._graphs: StepGraphs[int] = StepGraphs(torch.cuda.Stream(), self._run, self._run)
        self._graphs.capture_all(reversed(self._num_blocks))

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `EagleModel.forward`. The next pass overwrites what it returns, but may have it as its input."""
        num_seqs, num_blocks = tables.shape
        if num_seqs > 1:
            return self._model.forward(token_ids, hidden, positions, tables, starts)
        self._token_ids.copy_(token_ids)
        self._hidden.copy_(hidden)
        self._positions.copy_(positions)
        self._starts.copy_(starts)
        self._tables.zero_()
        self._tables[:, :num_blocks] = tables
        self._graphs.find(bucket_for(self._num_blocks, num_blocks)).replay()
        return self._logits, self._output

    def _run(self, num_blocks: int) -> None:
        tables = self._tables[:, :num_blocks]
        logits, output = self._model.forward(self._token_ids, self._hidden, self._positions, tables, self._starts)
        self._logits.copy_(logits)
        self._output.copy_(output)
