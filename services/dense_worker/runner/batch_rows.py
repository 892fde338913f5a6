"""`BatchRows`: what the model runner knows of the running sequences, as arrays by slot. Engine thread.

A step reads and changes the rows of its sequences at once. A slot is used again, so a step that was launched before
that remembers which sequence it meant: `serials`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf

import numpy as np

from services.dense_worker.runner.known_sequence import KnownSequence
from services.dense_worker.token_tails import TokenTails


class RowFeature(enum.IntFlag):
    """What only some sequences have. A step asks for each once, and for the rows that have it."""

    GRAMMAR = enum.auto()  # its output has a form
    GIVEN_VECTORS = enum.auto()  # instead of some prompt tokens
    PROMPT_LOGPROBS = enum.auto()
    TOKEN_REPORT = enum.auto()  # see `services.step.TokenReport`
    GENERATION_LOGITS = enum.auto()
    CHOSEN_TOKENS = enum.auto()  # the scheduler's, not those that are sampled


# Those that ask for more of a step than tokens, or give it more.
MORE_THAN_TOKENS = (
    RowFeature.GIVEN_VECTORS | RowFeature.PROMPT_LOGPROBS | RowFeature.TOKEN_REPORT | RowFeature.GENERATION_LOGITS
)


class BatchRows:
    """All arrays are int64 [num_slots]."""

    def __init__(self, num_slots: int) -> None:
        self.num_known, self.last_token, self.num_prompt_tokens, *rest = np.zeros((6, num_slots), np.int64)
        self.adapter_slots, self.features, self.serials = rest
        self._tails = TokenTails(num_slots)
        self.version = 0  # changes whenever a slot changes hands

    def begin(self, slot: int, sequence: KnownSequence) -> None:
        """Gives a slot to a sequence."""
        new, token_ids = sequence.new, sequence.token_ids_before
        self.num_known[slot], self.last_token[slot] = len(token_ids), token_ids[-1]
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self.adapter_slots[slot] = -1 if sequence.adapter_slot is None else sequence.adapter_slot
        self.features[slot] = _features(sequence)
        self.version += 1
        self.serials[slot] = self.version
        self._tails.begin(slot, token_ids)
        sequence.slot, sequence.tails = slot, self._tails

    def end(self, sequence: KnownSequence) -> None:
        """Takes the slot away; the sequence keeps its tokens."""
        assert sequence.slot is not None, "it has a slot"
        self._tails.flush(sequence.slot)
        self.version += 1
        self.serials[sequence.slot] = 0
        sequence.slot = sequence.tails = None

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """A token of each of these slots has become known. All slots differ."""
        self._tails.append(slots, token_ids)
        self.num_known[slots] += 1
        self.last_token[slots] = token_ids

    def extend(self, sequence: KnownSequence, token_ids: SequenceOf[int]) -> None:
        """Tokens of one sequence, at least one, have become known; it may not have a slot yet."""
        sequence.token_ids.extend(token_ids)
        if sequence.slot is not None:
            self.num_known[sequence.slot] += len(token_ids)
            self.last_token[sequence.slot] = token_ids[-1]


def _features(sequence: KnownSequence) -> RowFeature:
    new, found = sequence.new, RowFeature(0)
    for feature, is_present in (
        (RowFeature.GRAMMAR, sequence.grammar is not None),
        (RowFeature.GIVEN_VECTORS, sequence.table is not None),
        (RowFeature.PROMPT_LOGPROBS, new.num_prompt_logprobs is not None),
        (RowFeature.TOKEN_REPORT, bool(new.token_report)),
        (RowFeature.GENERATION_LOGITS, new.return_generation_logits),
        (RowFeature.CHOSEN_TOKENS, new.has_chosen_tokens),
    ):
        found |= feature if is_present else RowFeature(0)
    return found
