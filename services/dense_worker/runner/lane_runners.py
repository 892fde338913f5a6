"""The runners of several lanes. `LaneRunners` has a `ModelRunner` for each, with slots, sampler and buffers of its own;
they share the weights. On a CPU each is a `TurnModelRunner`, and their steps run by turns on one thread; with stages
it is a `StageModelRunner`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from services.channel import Channel, Flag
from services.channel.turns import Turn, TurnChannel, Turns
from services.dense_worker.ranks.leading_backend import LeadingRanks
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.runner.model_runner import ModelRunner, RunningStep
from services.dense_worker.runner.step_input import BoundPlan
from services.step import NO_ROWS, StepPlan, StepResult


class LaneRunners:
    """A `StepRunner`: the lane of a sequence or of a plan says which `ModelRunner` is meant."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        self._runners = runners

    def attach(self, channels: Iterable[Channel], ranks: LeadingRanks | None = None) -> None:
        """Makes later steps run on the channels of their lanes only; forgets all sequences."""
        for lane, (runner, channel) in enumerate(zip(self._runners, channels, strict=True)):
            runner.attach([channel], ranks and ranks.of_lane(lane))

    def capture_ahead(self) -> bool:
        """Prepares one kind of later steps in one lane."""
        return any(runner.capture_ahead() for runner in self._runners)

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


class TurnModelRunner(ModelRunner):
    """A `ModelRunner` whose steps run when any lane's step is collected, each as soon as its next part can run."""

    def __init__(self, turns: Turns, *arguments: Any) -> None:
        """`turns`: of all lanes"""
        super().__init__(*arguments)
        self._turns = turns

    def attach(self, channels: Iterable[Channel], ranks: LeadingRanks | None = None) -> None:
        """Forgets all steps, too."""
        self._turns.clear()
        super().attach(channels, ranks)

    def launch(self, plan: StepPlan, channel: TurnChannel) -> RunningStep:
        """Adds a step to those of the lane."""
        bound = self.bind(plan)
        return _TurnStep(self._turns, channel, self._num_layers, lambda step: self._run(step, bound))

    def _run(self, step: _TurnStep, bound: BoundPlan) -> Iterator[Flag]:
        prepared = self.prepare(bound)
        if not bound.plan.entries:
            step.result = StepResult(NO_ROWS)
            return
        layers = self.begin(prepared, step.channel)
        for _ in range(self._num_layers - 1):
            yield Flag.ATTENTION_READY
            layers.go_on()
            step.num_run += 1
        yield Flag.ATTENTION_READY
        step.result = self.run_rest(prepared, layers, step.channel)


class _TurnStep(RunningStep):
    """A step in its lane's queue. It begins when it has its turn beside other lanes' steps."""

    def __init__(
        self,
        turns: Turns,
        channel: TurnChannel,
        num_layers: int,
        run: Callable[[_TurnStep], Iterator[Flag]],
    ) -> None:
        self._turns = turns
        self._num_layers = num_layers
        self.channel = channel
        self.num_run = 0  # layers whose attention has come
        self.result: StepResult | None = None
        turns.add(Turn(channel, run(self)))

    @torch.inference_mode()
    def run_most(self) -> None:
        while self.result is None and self.num_run < self._num_layers * 3 // 4:
            self._go_on()

    @torch.inference_mode()
    def collect(self) -> StepResult:
        while self.result is None:
            self._go_on()
        return self.result

    def _go_on(self) -> None:
        if not self._turns.go_on():
            self._turns.pause()
