"""`LogitBias`: numbers that requests add to the logits of single tokens. An editor of logits."""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.slot_table import SlotTable


class LogitBias(LogitsEditor):
    """Sets of biases by slot, on the device."""

    options = ("logit_bias",)

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        # The padding is a bias of 0 for token 0.
        self._token_ids = SlotTable(num_slots, 1, torch.int64, 0, device)
        self._biases = SlotTable(num_slots, 1, torch.float32, 0.0, device)

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores `logit_bias`."""
        token_ids, biases = zip(*sequence.params.logit_bias, strict=True)
        self._token_ids.set(slot, np.array(token_ids, dtype=np.int64))
        self._biases.set(slot, np.array(biases, dtype=np.float32))
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Adds the biases."""
        device_rows, slots = rows.on_device
        index = device_rows[:, None] * logits.shape[1] + self._token_ids.values[slots]
        logits.view(-1).scatter_add_(0, index.view(-1), self._biases.values[slots].view(-1))
