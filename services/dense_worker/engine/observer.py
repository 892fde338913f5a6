"""The figures that the engine reports to observers: the metrics, and the step log if it is on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.dense_worker.engine.drafts import DraftCounts, DraftSource
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence, SequenceOutput
from services.dense_worker.engine.session import InFlight


@dataclass(frozen=True, slots=True)
class StepStats:
    """The figures of one completed step; counts of sequences and blocks are those at its end."""

    step_id: int
    num_seqs: int
    num_tokens: int  # computed in the step
    num_sampled: int  # sampled tokens, including those after a rejected draft
    num_output_tokens: int  # that sequences got: without those nobody waits for, and with accepted drafts
    num_running: int
    num_waiting: int
    num_preemptions: int  # total so far
    num_blocks: int  # all blocks of the KV cache
    num_free_blocks: int  # as the scheduler counts them, reserved ones included
    num_reserved_blocks: int
    gap_s: float  # from the end of the previous step to its launch; 0 if it was planned while that one ran
    launch_s: float  # host time to publish the plan and launch the step
    duration_s: float  # from the end of the previous step (or its launch, if later) until its tokens came
    wait_s: float | None  # part of it spent waiting for the attention worker; None on CUDA: the host cannot see it
    guess_s: float = 0.0  # part of it in which heads or a draft model guessed the tokens after its own


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Present counts of sequences, and total counts of steps and preemptions."""

    num_waiting: int
    num_opening: int
    num_running: int
    num_steps: int
    num_preemptions: int
    is_attached: bool  # to an attention worker
    drafts: DraftCounts = field(default_factory=DraftCounts)


class EngineObserver(Protocol):
    """Receives figures on the engine thread; must not block."""

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Called after each step. `started` are sequences in their first step, `outputs` those of `StepOutputs.others`.
        """

    def on_handoff_abort(self) -> None:
        """Called when the attention worker was lost; steps in flight are void."""


class ObservingDraftSource(DraftSource, EngineObserver, Protocol):
    """A source of drafts that learns from the figures of steps."""


def read_counts(scheduler: Scheduler, *, is_attached: bool) -> EngineCounts:
    """The present counts. May be called from any thread."""
    return EngineCounts(
        scheduler.num_waiting,
        scheduler.num_opening,
        scheduler.num_running,
        scheduler.num_steps,
        scheduler.num_preemptions,
        is_attached,
        scheduler.draft_counts,
    )


def describe_step(step: InFlight, scheduler: Scheduler, num_output_tokens: int) -> StepStats:
    """The figures of a step that has just run, and from which sequences got so many tokens."""
    plan, ledger = step.published.plan, scheduler.session.ledger
    return StepStats(
        step_id=plan.step_id,
        num_seqs=len(plan.entries),
        num_tokens=plan.num_tokens,
        num_sampled=int(np.add.reduce(plan.entries.num_logits)),
        num_output_tokens=num_output_tokens,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_preemptions=scheduler.num_preemptions,
        num_blocks=ledger.num_blocks,
        num_free_blocks=ledger.num_free_blocks,
        num_reserved_blocks=ledger.num_reserved_blocks,
        gap_s=step.gap_s,
        launch_s=step.launch_s,
        duration_s=step.end_s - step.begin_s,
        wait_s=step.wait_s,
        guess_s=step.guess_s,
    )
