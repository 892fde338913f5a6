"""`MinTokens`: forbids stop tokens before an output has its minimum length. An editor of logits."""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.upload import upload

_NONE = -1  # padding of slots with fewer tokens than the table


class MinTokens(LogitsEditor):
    """Minimum lengths and stop tokens by slot, on the host, which knows the length of every output."""

    options = ("min_tokens",)

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._min_tokens = np.zeros(num_slots, dtype=np.int64)
        self._stop_token_ids = np.full((num_slots, 1), _NONE, dtype=np.int64)
        self._forbidden = torch.tensor(-torch.inf, device=device)  # assigning a number would synchronise

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores the minimum length and the stop tokens, except ids beyond the vocabulary."""
        stop_token_ids = [token_id for token_id in sequence.stop_token_ids if token_id < self._vocab_size]
        min_tokens = sequence.params.min_tokens
        if min_tokens <= len(sequence.output_token_ids) or not stop_token_ids:
            return False
        missing = len(stop_token_ids) - self._stop_token_ids.shape[1]
        if missing > 0:
            self._stop_token_ids = np.pad(self._stop_token_ids, ((0, 0), (0, missing)), constant_values=_NONE)
        self._stop_token_ids[slot] = _NONE
        self._stop_token_ids[slot, : len(stop_token_ids)] = stop_token_ids
        self._min_tokens[slot] = min_tokens
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Sets the stop tokens of rows whose output is too short to -inf."""
        stop_token_ids = self._stop_token_ids[rows.slots]
        is_too_short = rows.output_lens < self._min_tokens[rows.slots]
        owners, columns = np.nonzero((stop_token_ids != _NONE) & is_too_short[:, None])
        if owners.size:
            index = upload(np.stack([rows.rows[owners], stop_token_ids[owners, columns]]), self._device)
            logits[index[0], index[1]] = self._forbidden
