"""`LogitBias`: numbers that requests add to the logits of single tokens. State of the sampler, on the device."""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.slot_table import SlotTable


class LogitBias:
    """Sets of biases by slot."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        # Padded with a bias of 0 for token 0.
        self._token_ids = SlotTable(num_slots, 1, torch.int64, 0, device)
        self._biases = SlotTable(num_slots, 1, torch.float32, 0.0, device)

    def set(self, slot: int, logit_bias: tuple[tuple[int, float], ...]) -> None:
        """`logit_bias`: (token id, bias), no token twice."""
        token_ids, biases = zip(*logit_bias, strict=True)
        self._token_ids.set(slot, np.array(token_ids, dtype=np.int64))
        self._biases.set(slot, np.array(biases, dtype=np.float32))

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Adds, in place, the biases of `slots` (int64 [n]) to `rows` (int64 [n]) of logits [r, vocab_size]."""
        index = rows[:, None] * logits.shape[1] + self._token_ids.values[slots]
        logits.view(-1).scatter_add_(0, index.view(-1), self._biases.values[slots].view(-1))
