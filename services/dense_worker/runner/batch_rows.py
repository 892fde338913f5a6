"""`BatchRows`: what the model runner knows of the running sequences, as arrays by slot. Engine thread.

A step reads and changes the rows of its sequences at once. A slot is used again, so a step that was launched before
that remembers which sequence it meant: `serials`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from services.dense_worker.runner.request_state import RequestState


class BatchRows:
    """All arrays are int64 [num_slots]."""

    def __init__(self, num_slots: int) -> None:
        self.num_known, self.last_token, self.num_prompt_tokens, *rest = np.zeros((5, num_slots), np.int64)
        self.has_forced_tokens, self.serials = rest
        self.version = 0  # changes whenever a slot changes hands

    def begin(self, slot: int, sequence: RequestState) -> None:
        """Gives a slot to a sequence."""
        token_ids = sequence.token_ids
        self.num_known[slot], self.last_token[slot] = len(token_ids), token_ids[-1]
        self.num_prompt_tokens[slot] = sequence.spec.num_prompt_tokens
        self.has_forced_tokens[slot] = sequence.has_forced_tokens
        self.version += 1
        self.serials[slot] = self.version
        sequence.slot = slot

    def end(self, sequence: RequestState) -> None:
        """Takes the slot away."""
        assert sequence.slot is not None, "it has a slot"
        self.version += 1
        self.serials[sequence.slot] = 0
        sequence.slot = None

    def append(self, slots: np.ndarray, lists: Iterable[list[int]], token_ids: np.ndarray) -> None:
        """A token of each of these slots has become known; `lists` are their tokens. All slots differ."""
        for tokens, token_id in zip(lists, token_ids.tolist(), strict=True):
            tokens.append(token_id)
        self.num_known[slots] += 1
        self.last_token[slots] = token_ids

    def extend(self, sequence: RequestState, token_ids: SequenceOf[int]) -> None:
        """Tokens of one sequence, at least one, have become known; it may not have a slot yet."""
        sequence.token_ids.extend(token_ids)
        if sequence.slot is not None:
            self.num_known[sequence.slot] += len(token_ids)
            self.last_token[sequence.slot] = token_ids[-1]
