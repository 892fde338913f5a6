"""`ForcedDrafting`: steps of a server without speculation have the tokens that grammars force, and no other drafts."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, ClassVar

from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.sequence import Sequence, SequenceOutput
from services.dense_worker.features.drafting.drafter import Drafter
from services.dense_worker.features.drafting.measured_drafting import MeasuredDrafting
from services.dense_worker.features.drafting.step_costs import StepCosts

if TYPE_CHECKING:
    from services.dense_worker.runner.model_runner import RunningStep


class ForcedDrafting(MeasuredDrafting):
    """As `MeasuredDrafting`, but sequences without a form meet nothing of it: all others of a step keep their rows.

    While no form runs, nothing is measured.
    """

    looks_at_each: ClassVar[bool] = False

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(Drafter(), 0, costs)
        self._has_forms = False  # whether a form runs

    def waits_for(
        self, step: RunningStep, running: SequenceOf[Sequence], num_rows: int, max_num_drafts: int
    ) -> bool:
        """Whether a token promises to take less time if the next step is planned later, with forced tokens."""
        self._has_forms = any([sequence.forced_by is not None for sequence in running])
        if not self._has_forms:
            self._forget_plans()
            return False
        return super().waits_for(step, running, num_rows, max_num_drafts)

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Notes what a step has cost, if there are forms."""
        if self._has_forms:
            super().on_step(stats, started, outputs)
