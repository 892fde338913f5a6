"""`GpuModel`: both workers' parts in one process on a GPU, with decode steps in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from services.attn_worker.layers import AttentionBackend, BackendSetup
from services.attn_worker.layers.backends import triton_backend
from tests.support.dense.whole_model import WholeModel

MAX_NUM_TOKENS, MAX_NUM_SEQS = 24, 4  # of a step
NUM_ROWS = 4  # of the graph; those beyond the step's sequences are padding


class GpuModel(WholeModel):
    """A model with the kernels for CUDA. On a CPU, Triton's interpreter runs them without a graph."""

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, num_window_blocks: int | None = None
    ) -> None:
        from services.dense_worker.backends.cuda_backend import CudaBackend

        def make_attention(setup: BackendSetup) -> AttentionBackend:
            return triton_backend(replace(setup, max_num_seqs=MAX_NUM_SEQS, max_num_tokens=MAX_NUM_TOKENS))

        super().__init__(
            path,
            lambda weights: CudaBackend(weights, self.config, MAX_NUM_TOKENS),
            make_attention=make_attention,
            device=device,
            dtype=dtype,
            num_window_blocks=num_window_blocks,
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_token_ids = torch.zeros(NUM_ROWS, dtype=torch.int64, device=device)
        self._graph_logits = torch.empty(0)

    @torch.inference_mode()
    def decode(self, tokens: dict[int, list[int]]) -> torch.Tensor:
        """One step of the last token of each sequence, new to the model -> logits [num_seqs, vocab_size].

        tokens: all tokens so far, by seq_id.
        """
        entries = [(seq_id, 1, len(each) - 1) for seq_id, each in tokens.items()]
        sampled = [(seq_id, each[-1]) for seq_id, each in tokens.items()]
        if self.device.type == "cpu" or not self.attention.captured_shapes:
            return torch.cat(self.step(*entries, sampled=sampled))
        planned, token_ids, _ = self.prepare(entries, sampled, NUM_ROWS)
        self.attention.begin_step(planned.metadata, NUM_ROWS)
        self._graph_token_ids[: len(token_ids)] = torch.tensor(token_ids)
        if self._graph is None:
            self.run(self._graph_token_ids)  # compiles; the same step later stores the same keys and values
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._graph_logits = self.run(self._graph_token_ids)
        self._graph_logits.zero_()
        self._graph.replay()
        self.cache.commit_step()
        return self._graph_logits[: len(tokens)]
