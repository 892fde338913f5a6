"""`TokenTails`: the newest tokens of many lists in one array, so that a step appends to all of them at once."""

from __future__ import annotations

import numpy as np

WIDTH = 64  # tokens that a tail holds before they move to its list


class TokenTails:
    """Each slot belongs to one list at a time. What was appended is in the list after `flush`. One thread uses it."""

    def __init__(self, num_slots: int) -> None:
        self.lengths = np.zeros(num_slots, np.int64)  # tokens that the lists do not have yet
        self._token_ids = np.zeros((num_slots, WIDTH), np.int64)
        self._lists: list[list[int]] = [[] for _ in range(num_slots)]
        self._most = 0  # at least the length of the longest tail

    def begin(self, slot: int, tokens: list[int]) -> None:
        """Gives a slot to a list. Tokens that an earlier list has not got are forgotten."""
        self._lists[slot] = tokens
        self.lengths[slot] = 0

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Appends a token to the list of each slot; all slots differ. slots, token_ids: int64 [n]"""
        lengths = self.lengths[slots]
        self._token_ids[slots, lengths] = token_ids
        self.lengths[slots] = lengths + 1
        self._most += 1
        if self._most == WIDTH:
            for slot in np.flatnonzero(self.lengths == WIDTH).tolist():
                self.flush(slot)
            self._most = int(self.lengths.max())

    def flush(self, slot: int) -> None:
        """Moves the tokens of a slot to its list."""
        if length := self.lengths.item(slot):
            self._lists[slot].extend(self._token_ids[slot, :length].tolist())
            self.lengths[slot] = 0

    def __len__(self) -> int:
        return len(self._lists)
