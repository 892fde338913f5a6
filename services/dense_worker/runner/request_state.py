"""`RequestState`: what the model runner keeps of a sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

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
