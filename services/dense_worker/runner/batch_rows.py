"""`BatchRows`: what the model runner knows of the running sequences, as arrays by slot. Engine thread.

A step reads and changes the rows of its sequences at once. A slot is used again, so a step that was launched before
that remembers which sequence it meant: `serials`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from services.dense_worker.runner.request_state import RequestState


class RowFeature:
    """What only some sequences have, as bits. A step asks for each once, and for the rows that have it."""

    GRAMMAR = 1  # its output has a form
    GIVEN_VECTORS = 2  # instead of some prompt tokens
    PROMPT_LOGPROBS = 4
    TOKEN_REPORT = 8  # see `services.step.TokenReport`
    GENERATION_LOGITS = 16
    FORCED_TOKENS = 32  # the scheduler's, not those that are sampled


# Those that ask for more of a step than tokens, or give it more.
MORE_THAN_TOKENS = (
    RowFeature.GIVEN_VECTORS | RowFeature.PROMPT_LOGPROBS | RowFeature.TOKEN_REPORT | RowFeature.GENERATION_LOGITS
)


class BatchRows:
    """All arrays are int64 [num_slots]."""

    def __init__(self, num_slots: int) -> None:
        self.num_known, self.last_token, self.num_prompt_tokens, *rest = np.zeros((6, num_slots), np.int64)
        self.adapter_slots, self.features, self.serials = rest
        self.version = 0  # changes whenever a slot changes hands

    def begin(self, slot: int, sequence: RequestState) -> None:
        """Gives a slot to a sequence."""
        token_ids = sequence.token_ids
        self.num_known[slot], self.last_token[slot] = len(token_ids), token_ids[-1]
        self.num_prompt_tokens[slot] = sequence.spec.num_prompt_tokens
        self.adapter_slots[slot] = -1 if sequence.adapter_slot is None else sequence.adapter_slot
        self.features[slot] = _features(sequence)
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


def _features(sequence: RequestState) -> int:
    present = {
        RowFeature.GRAMMAR: sequence.grammar is not None,
        RowFeature.GIVEN_VECTORS: sequence.table is not None,
        RowFeature.PROMPT_LOGPROBS: sequence.reports_prompt_logprobs,
        RowFeature.TOKEN_REPORT: bool(sequence.token_report),
        RowFeature.GENERATION_LOGITS: sequence.spec.return_generation_logits,
        RowFeature.FORCED_TOKENS: sequence.has_forced_tokens,
    }
    return sum(feature for feature, is_present in present.items() if is_present)
