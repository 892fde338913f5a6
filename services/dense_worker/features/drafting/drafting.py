"""`Drafting`: which steps have draft tokens, and which ones. Asked by the scheduler, on the engine thread.

A draft token may be the next one of a sequence, and a step verifies it: it is accepted if it equals the token that the
sampler chooses at its position. So drafts change only the number of steps, never the text. How many are accepted
decides the next position, and to draft takes all tokens. So a step with drafts is planned only after the previous step
has ended, and so is the step after it (bench/results/steps.md). All others are planned while the previous one runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, ClassVar

from services.dense_worker.features.drafting.draft_counts import DraftCounts

if TYPE_CHECKING:
    from services.dense_worker.engine.observer import StepStats
    from services.dense_worker.engine.planning.plan_builder import PlanBuilder
    from services.dense_worker.engine.sequence import Sequence, SequenceOutput
    from services.dense_worker.engine.session import Session
    from services.dense_worker.runner.model_runner import RunningStep


class Drafting:
    """No step has drafts. Subclasses have some. An `EngineObserver`."""

    looks_at_each: ClassVar[bool] = False  # whether all sequences are planned one by one, also those without drafts

    def __init__(self) -> None:
        self.counts = DraftCounts()  # of what steps have verified

    def waits_for(
        self, step: RunningStep, running: SequenceOf[Sequence], num_rows: int, max_num_drafts: int
    ) -> bool:
        """Whether the next step is planned only when this one, which is under way, has ended.

        Asked once for each step, before it is collected; may ask for something to be done after the step.

        running: the sequences that are planned one by one; num_rows: number of the others, which get no drafts;
        max_num_drafts: that the next step may have
        """
        return False

    def begin_step(self, decodes: SequenceOf[Sequence], num_rows: int, max_num_drafts: int) -> None:
        """A step is planned now, with a token for each of these sequences and rows, and at most so many drafts.

        num_rows: number of sequences that are not planned one by one
        """

    def propose(self, sequence: Sequence, session: Session, step: PlanBuilder) -> tuple[int, ...]:
        """The drafts that follow the last tokens of a sequence in the step that is being planned."""
        return ()

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended, for whatever reason."""

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """A step has ended, and its sequences have their tokens."""

    def on_handoff_abort(self) -> None:
        """The plans under way are void."""
