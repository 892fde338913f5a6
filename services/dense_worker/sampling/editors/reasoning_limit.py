"""`ReasoningLimit`: ends a reasoning that has become too long with its end marker. An editor of logits.

Whether the reasoning is still open depends only on the tokens so far, so a resumed sequence continues as if nothing had
happened. The state is on the device, because the host does not know the newest token.
"""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.upload import upload

MAX_BEGIN_TOKENS = 4  # the reasoning begins within this many output tokens, or not at all
_NONE = -1  # no begin marker: the output begins with reasoning
_BEFORE, _OPEN, _OVER = range(3)  # states of the reasoning of a slot


class ReasoningLimit(LogitsEditor):
    """Limits and markers by slot."""

    options = ("reasoning_limit",)

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._max_tokens = np.zeros(num_slots, dtype=np.int64)
        self._markers = np.zeros((2, num_slots), dtype=np.int64)  # begin and end
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._states: torch.Tensor | None = None  # int8 [num_slots], once a sequence needs it

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores the limit, and whether the reasoning is open after the tokens so far."""
        limit = sequence.params.reasoning_limit
        assert limit is not None, "the sequence has a limit"
        output = sequence.output_token_ids
        begin = _NONE if limit.begin_token_id is None else limit.begin_token_id
        is_begun = begin == _NONE or begin in output[:MAX_BEGIN_TOKENS]
        if limit.end_token_id in output or (not is_begun and len(output) >= MAX_BEGIN_TOKENS):
            return False  # for good
        self._max_tokens[slot] = limit.max_tokens
        self._markers[:, slot] = begin, limit.end_token_id
        if self._states is None:
            self._states = torch.zeros(self._num_slots, dtype=torch.int8, device=self._device)
        self._states[slot].fill_(_OPEN if is_begun else _BEFORE)
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Sets all tokens but the end marker to -inf where the reasoning is open and has its maximum length."""
        late = np.flatnonzero(rows.output_lens >= self._max_tokens[rows.slots])
        if not late.size:
            return
        slots = rows.slots[late]
        index = upload(np.stack([rows.rows[late], slots, self._markers[1, slots]]), self._device)
        is_open = (self._states[index[1]] == _OPEN)[:, None]
        is_end = torch.arange(self._vocab_size, device=self._device) == index[2][:, None]
        forced = torch.where(is_end, 0.0, -torch.inf)
        logits[index[0]] = torch.where(is_open, forced, logits[index[0]])

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Looks for markers in the new tokens."""
        may_begin = rows.output_lens < MAX_BEGIN_TOKENS
        begin, end = self._markers[:, rows.slots]
        packed = np.stack([rows.rows, rows.slots, np.where(may_begin, begin, _NONE), end])
        device_rows, slots, begins, ends = upload(packed, self._device)
        newest, states = token_ids[device_rows], self._states[slots]
        states = torch.where((states == _BEFORE) & (newest == begins), _OPEN, states)
        self._states[slots] = torch.where(newest == ends, _OVER, states).to(torch.int8)
