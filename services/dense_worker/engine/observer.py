"""The figures that the engine reports to observers: the metrics, and the step log if it is on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from services.dense_worker.engine.sequence import Sequence, SequenceOutput


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
    follow_up_s: float = 0.0  # part of it that followed its sampler, see `FollowUp`
    lane: int = 0  # in which it ran


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What is in the KV cache of one attention worker."""

    cache_id: int
    num_sequences: int
    num_blocks: int
    num_free_blocks: int  # that the scheduler knows to be free


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Present counts of sequences, and total counts of steps and preemptions."""

    num_waiting: int
    num_opening: int
    num_running: int
    num_steps: int
    num_preemptions: int
    is_attached: bool  # to an attention worker


class EngineObserver(Protocol):
    """Receives figures on the engine thread; must not block."""

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Called after each step. `started` are sequences in their first step, `outputs` those of `StepOutputs.others`.
        """

    def on_handoff_abort(self) -> None:
        """Called when the attention worker was lost; steps in flight are void."""
