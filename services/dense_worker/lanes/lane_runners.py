"""`LaneRunners`: a `ModelRunner` for each lane, with slots, sampler and buffers of its own. They share the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.channel import Channel
from services.dense_worker.ranks.leading_backend import LeadingRanks
from services.dense_worker.runner.model_runner import ModelRunner, RunningStep
from services.dense_worker.runner.request_state import RequestState
from services.step import StepPlan


class LaneRunners:
    """Used as a `ModelRunner`: the lane of a sequence or of a plan says which one is meant."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        self._runners = runners

    def attach(self, channels: Iterable[Channel], ranks: LeadingRanks | None = None) -> None:
        """Makes later steps run on the channels of their lanes only; forgets all sequences."""
        for runner, channel in zip(self._runners, channels, strict=True):
            runner.attach([channel], ranks)

    def open(self, sequence: RequestState) -> None:
        """Adds a sequence to its lane, which later plans of the lane may name until one closes it."""
        self._runners[sequence.lane].open(sequence)

    def move(self, sequence: RequestState, lane: int) -> None:
        """A sequence leaves this lane, in which no step is under way with it, for its own."""
        self._runners[lane].forget(sequence.seq_id)
        self.open(sequence)

    def launch(self, plan: StepPlan, channel: Channel) -> RunningStep:
        """Launches a step in its lane, on the lane's channel."""
        return self._runners[plan.lane].launch(plan, channel)
