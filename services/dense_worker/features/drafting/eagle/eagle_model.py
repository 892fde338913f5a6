"""`EagleModel`: an EAGLE-3 head with a cache of its keys and values, in plain torch, on the served model's device.

The head is one layer with two inputs and logits of its own (`EagleLayer`). For the token at position p its input is a
hidden state of p and the embedding of the token at p + 1, and it drafts the token at p + 2. The hidden state is made of
the served model's residuals at p, or is the layer's own output for p - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from services.common.batch_buckets import bucket_for
from services.common.cuda_graphs import StepGraphs
from services.common.families.shape import Activation
from services.dense_worker.features.drafting.draft_model.model import KERNELS
from services.dense_worker.features.drafting.eagle.eagle_config import EagleConfig
from services.dense_worker.features.drafting.kv_cache.draft_attention import DraftAttention
from services.dense_worker.features.drafting.kv_cache.draft_blocks import block_buckets
from services.dense_worker.kernels.linear.activation import ACTIVATIONS
from services.dense_worker.kernels.norm.norm import RmsNorm

Attend = Callable[[torch.Tensor], torch.Tensor]  # qkv [n, qkv_size], which may be overwritten -> [n, attn_size]


@dataclass(frozen=True, slots=True)
class EagleLayer:
    """All weights of a head, in the dtype and on the device of the served model. No method waits for the device."""

    embedding: torch.Tensor  # [vocab, hidden]
    fc: torch.Tensor  # [hidden, 3 * hidden]
    embedding_norm: RmsNorm  # "input_layernorm" in checkpoints
    hidden_norm: RmsNorm
    qkv: torch.Tensor  # [qkv_size, 2 * hidden]: q rows, then k, then v
    o: torch.Tensor  # [hidden, attn_size]
    mlp_norm: RmsNorm  # "post_attention_layernorm"
    gate_up: torch.Tensor  # [2 * intermediate, hidden]: gate rows, then up rows
    down: torch.Tensor  # [hidden, intermediate]
    final_norm: RmsNorm
    lm_head: torch.Tensor  # [draft_vocab, hidden]
    target_ids: torch.Tensor | None  # int64 [draft_vocab]: the served model's token ids; None: they are the same
    activation: Activation
    norm_before_residual: bool  # whether the layer adds to the normalised hidden state, not to the state itself

    def join(self, residuals: torch.Tensor) -> torch.Tensor:
        """residuals [n, 3, hidden] of tokens -> their hidden states [n, hidden]."""
        return F.linear(residuals.flatten(1), self.fc)

    def keys_values(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [n], hidden [n, hidden] -> k and v of all heads, not rotated, [n, 2 * kv_size]."""
        num_q = self.o.shape[1]
        return F.linear(self._input(token_ids, self.hidden_norm.normalize(hidden)), self.qkv[num_q:])

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids int64 [n], hidden [n, hidden] -> logits float32 [n, vocab], the layer's output [n, hidden].

        The output is the hidden state for the next draft. Tokens that the head cannot draft have the logit -inf.
        """
        normed = self.hidden_norm.normalize(hidden)
        x = normed if self.norm_before_residual else hidden
        x = x + F.linear(attend(F.linear(self._input(token_ids, normed), self.qkv)), self.o)
        gate, up = F.linear(self.mlp_norm.normalize(x), self.gate_up).chunk(2, dim=1)
        x = x + F.linear(ACTIVATIONS[self.activation](gate) * up, self.down)
        logits = F.linear(self.final_norm.normalize(x), self.lm_head).float()
        if self.target_ids is not None:
            of_all = logits.new_full((len(logits), len(self.embedding)), -torch.inf)
            logits = of_all.index_copy_(1, self.target_ids, logits)
        return logits, x

    def _input(self, token_ids: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """[n, 2 * hidden]"""
        return torch.cat((self.embedding_norm.normalize(F.embedding(token_ids, self.embedding)), normed), dim=1)


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


class EagleGraphs:
    """The passes of an `EagleModel` on a GPU for one sequence: a captured CUDA graph for each power of two of blocks.

    A layer takes longer to launch, kernel by kernel, than to run. Several sequences run without a graph.
    """

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
