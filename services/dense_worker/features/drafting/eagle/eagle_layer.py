"""`EagleLayer`: the one layer of an EAGLE-3 head, with two inputs and logits of its own.

For the token at position p its input is a hidden state of p and the embedding of the token at p + 1, and it drafts the
token at p + 2. The hidden state is made of the served model's residuals at p, or is the layer's own output for p - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.common.families.shape import Activation
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
