"""`AllowedTokens`: requests that may get certain tokens only. State of the sampler, on the device."""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.slot_table import SlotTable

_NONE = -1  # no token, where a slot has fewer than the table


class AllowedTokens:
    """Sets of token ids by slot."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._token_ids = SlotTable(num_slots, 1, torch.int64, _NONE, device)

    def set(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """At least one, no token twice."""
        self._token_ids.set(slot, np.array(token_ids, dtype=np.int64))

    def restrict(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Sets, in place, all tokens but those of `slots` (int64 [n]) in `rows` (int64 [n]) of logits to -inf.

        Where all of a row's allowed tokens are -inf already they become equally likely: one of them is chosen.
        """
        token_ids = self._token_ids.values[slots]
        token_ids = torch.where(token_ids == _NONE, token_ids[:, :1], token_ids)  # written twice, the same each time
        index = rows[:, None] * logits.shape[1] + token_ids
        allowed = logits.view(-1)[index]
        allowed = torch.where((allowed == -torch.inf).all(-1, keepdim=True), 0.0, allowed)
        logits.index_fill_(0, rows, -torch.inf)
        logits.view(-1).scatter_(0, index.view(-1), allowed.view(-1))
