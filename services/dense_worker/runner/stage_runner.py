"""Lanes of a pipeline on a CPU: the first stage runs its layers for one step after the other, and the logits of each
come later, while it runs the next one.

All stages take the steps in the order of their plans. So no stage waits for a step that comes after its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from services.channel import Channel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.ranks.leading_backend import LeadingRanks
from services.dense_worker.ranks.leading_stage import LeadingStage
from services.dense_worker.runner.model_runner import ModelRunner, RunningStep
from services.dense_worker.runner.step_input import BoundPlan, StepInput
from services.step import NO_ROWS, StepPlan, StepResult


class StageSteps:
    """The steps of all lanes that the first stage has not run, in the order of their plans."""

    def __init__(self) -> None:
        self._waiting: deque[_StageStep] = deque()
        self._lanes: set[StageModelRunner] = set()  # those with a step that has run here and has not been collected

    def add(self, step: _StageStep) -> None:
        """A step comes after all others."""
        self._waiting.append(step)

    def clear(self) -> None:
        """Forgets all steps."""
        self._waiting.clear()
        self._lanes.clear()

    def run_up_to(self, step: _StageStep) -> None:
        """Runs this stage's layers of all steps up to this one, the oldest that is not collected."""
        while not step.has_run:
            self._run_next()

    def run_all(self) -> None:
        """The same of all steps that need no token of a step under way."""
        while self._waiting and self._waiting[0].runner not in self._lanes:
            self._run_next()

    def end(self, step: _StageStep) -> None:
        """A step is being collected. The next one of its lane may run."""
        self._lanes.remove(step.runner)

    def _run_next(self) -> None:
        step = self._waiting.popleft()
        self._lanes.add(step.runner)
        step.run()


class StageModelRunner(ModelRunner):
    """A `ModelRunner` of one lane of the first stage. `backend`: of this lane alone."""

    def __init__(self, steps: StageSteps, backend: DenseBackend, *arguments: Any) -> None:
        """`steps`: of all lanes"""
        assert isinstance(backend, LeadingStage), "the first stage has one"
        super().__init__(backend, *arguments)
        self._steps = steps
        backend.defer_logits()
        self._await_logits = backend.await_logits

    def attach(self, channels: Iterable[Channel], ranks: LeadingRanks | None = None) -> None:
        """Forgets all steps, too."""
        self._steps.clear()
        super().attach(channels, ranks)

    def launch(self, plan: StepPlan, channel: Channel) -> RunningStep:
        """Adds a step, which runs when it, or one before it, is collected."""
        step = _StageStep(self._steps, self, self.bind(plan), channel)
        self._steps.add(step)
        return step

    def end(self, step: StepInput, logits: torch.Tensor, residual: torch.Tensor, channel: Channel) -> StepResult:
        """Waits for the logits of a step that has run in this stage. Raises as `RankGroup.receive`."""
        self._await_logits()
        host_token_ids = torch.empty(len(logits), dtype=torch.int64)
        return self.finish(step, logits, residual, channel, host_token_ids).read()


class _StageStep(RunningStep):
    """A step in its lane. A stage runs all of its layers at once."""

    def __init__(self, steps: StageSteps, runner: StageModelRunner, bound: BoundPlan, channel: Channel) -> None:
        self.runner = runner
        self.has_run = False  # in this stage
        self._steps, self._bound, self._channel = steps, bound, channel
        # Input, logits, which come later, and residual of a step that has run; None: it has no entries.
        self._output: tuple[StepInput, torch.Tensor, torch.Tensor] | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """Runs the layers of this stage, and passes all rows on."""
        self.has_run, step = True, self.runner.prepare(self._bound)
        if self._bound.plan.entries:
            self._output = step, *self.runner.begin(step, self._channel).finish(torch.from_numpy(step.sampled_rows))

    def run_most(self) -> None:
        self._steps.run_up_to(self)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        self._steps.run_all()  # before it waits: the other stages have work meanwhile
        self._steps.end(self)
        return StepResult(NO_ROWS) if self._output is None else self.runner.end(*self._output, self._channel)
