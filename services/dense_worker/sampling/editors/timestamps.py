"""`Timestamps`: how text and timestamps alternate in the output of a speech model. An editor of logits.

The newest two tokens and the latest timestamp are kept on the device, because the host does not know the token of a
running step when the next step is enqueued.
"""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.upload import upload

_NONE = -1  # no token yet


class Timestamps(LogitsEditor):
    """Rules and state of each slot: one row of int64 on the device, whose columns are named below."""

    options = ("timestamps",)
    FIRST, END, LAST_INITIAL, NEWEST, SECOND, LATEST = range(6)

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._table = torch.full((num_slots, 6), _NONE, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self._token_ids: torch.Tensor | None = None  # int64 [vocab_size], once a sequence has rules

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores the rules, and what the output so far says."""
        rules, tokens = sequence.params.timestamps, list(sequence.output_token_ids)
        assert rules is not None, "the sequence has rules"
        if self._token_ids is None:
            self._token_ids = torch.arange(self._vocab_size, device=self._table.device)
        times = [each for each in tokens if each >= rules.first_token_id]
        last_initial = self._vocab_size if rules.last_initial_token_id is None else rules.last_initial_token_id
        newest, second = ([_NONE, _NONE, *tokens])[:-3:-1]
        row = [rules.first_token_id, rules.end_token_id, last_initial, newest, second, times[-1] if times else _NONE]
        self._table[slot].copy_(upload(np.array(row, np.int64), self._table.device))
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Sets the tokens that may not come next to -inf."""
        device_rows, slots = rows.on_device
        first, end, last_initial, newest, second, latest = self._table[slots].T[..., None]  # [n, 1] each
        ids = self._token_ids
        assert ids is not None, "rows of the step have rules"
        is_time, begins = ids >= first, newest == _NONE
        was_time = newest >= first
        is_paired = was_time & ((second >= first) | (second == _NONE))  # text comes next
        is_open = was_time & ~is_paired  # its pair comes next, or the end
        hidden = (ids == first - 1) | (is_paired & is_time) | (is_open & (ids < end))
        hidden |= is_time & (latest != _NONE) & (ids < torch.where(is_open, latest, latest + 1))
        hidden |= begins & (~is_time | (ids > last_initial))
        allowed = logits[device_rows].masked_fill(hidden, -torch.inf)
        times = allowed.masked_fill(~is_time, -torch.inf).logsumexp(dim=1, keepdim=True)
        others = allowed.masked_fill(is_time, -torch.inf).amax(dim=1, keepdim=True)
        logits[device_rows] = allowed.masked_fill((times > others) & ~is_time, -torch.inf)

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Puts the new tokens into the state."""
        device_rows, slots = rows.on_device
        newest, before = token_ids[device_rows], self._table[slots]
        latest = torch.where(newest >= before[:, self.FIRST], newest, before[:, self.LATEST])
        after = torch.stack([*before[:, : self.NEWEST].T, newest, before[:, self.NEWEST], latest], dim=1)
        self._table[slots] = after
