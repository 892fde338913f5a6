"""`AllowedTokens`: restricts requests to certain tokens. An editor of logits."""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.slot_table import SlotTable

_NONE = -1  # padding of slots with fewer tokens than the table


class AllowedTokens(LogitsEditor):
    """Sets of token ids by slot, on the device."""

    options = ("allowed_token_ids",)

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._token_ids = SlotTable(num_slots, 1, torch.int64, _NONE, device)

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores `allowed_token_ids`."""
        self._token_ids.set(slot, np.array(sequence.params.allowed_token_ids, dtype=np.int64))
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Sets all tokens but the allowed ones to -inf.

        If all allowed tokens of a row are -inf already, they become equally likely.
        """
        device_rows, slots = rows.on_device
        token_ids = self._token_ids.values[slots]
        token_ids = torch.where(token_ids == _NONE, token_ids[:, :1], token_ids)  # padding repeats the first token
        index = device_rows[:, None] * logits.shape[1] + token_ids
        allowed = logits.view(-1)[index]
        allowed = torch.where((allowed == -torch.inf).all(-1, keepdim=True), 0.0, allowed)
        logits.index_fill_(0, device_rows, -torch.inf)
        logits.view(-1).scatter_(0, index.view(-1), allowed.view(-1))
