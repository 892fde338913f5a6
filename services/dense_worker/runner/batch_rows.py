"""`RequestState`: what the model runner keeps of a sequence. `BatchRows`: that of running ones, as arrays by slot.

A step reads and changes the rows of its sequences at once. A slot is used again, so a step that was launched before
that remembers which sequence it meant: `serials`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from services.dense_worker.features.sequence_feature import SequenceFeature
from services.step import SequenceSpec


@dataclass(slots=True, eq=False)
class RequestState:
    """The runner's data about a sequence."""

    seq_id: int
    spec: SequenceSpec
    token_ids: list[int]  # all tokens known on the host, prompt first; `BatchRows` counts them while it has a slot
    num_logprobs: int | None = None  # as in the spec, or as many as its row policy chooses from
    has_forced_tokens: bool = False  # its tokens are those of `StepPlan.forced`, not the sampler's
    slot: int | None = None  # of the sampler, and its row of `BatchRows`; None until it runs
    features: SequenceOf[SequenceFeature] = ()  # what it has that only some sequences have
    lane: int = 0  # in which its steps run

    def fork(self, seq_id: int, position: int) -> RequestState:
        """A sequence with its first tokens, for which the same was asked. It has no slot yet."""
        features = tuple(each.fork() for each in self.features)
        return replace(self, seq_id=seq_id, token_ids=self.token_ids[:position], slot=None, features=features)


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
