"""`AllowedTokens`: requests that may get certain tokens only. An editor of logits."""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence
from services.dense_worker.sampling.slot_table import SlotTable

_NONE = -1  # no token, where a slot has fewer than the table


class AllowedTokens:
    """Sets of token ids by slot, on the device."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._token_ids = SlotTable(num_slots, 1, torch.int64, _NONE, device)

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Takes `allowed_token_ids`."""
        token_ids = sequence.params.allowed_token_ids
        if not token_ids:
            return False
        self._token_ids.set(slot, np.array(token_ids, dtype=np.int64))
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Sets all tokens but the allowed ones to -inf.

        Where all of a row's allowed tokens are -inf already they become equally likely: one of them is chosen.
        """
        device_rows, slots = rows.on_device
        token_ids = self._token_ids.values[slots]
        token_ids = torch.where(token_ids == _NONE, token_ids[:, :1], token_ids)  # written twice, the same each time
        index = device_rows[:, None] * logits.shape[1] + token_ids
        allowed = logits.view(-1)[index]
        allowed = torch.where((allowed == -torch.inf).all(-1, keepdim=True), 0.0, allowed)
        logits.index_fill_(0, device_rows, -torch.inf)
        logits.view(-1).scatter_(0, index.view(-1), allowed.view(-1))

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Nothing: the same tokens are allowed throughout."""
