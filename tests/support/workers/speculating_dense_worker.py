"""A dense worker for which drafts always pay: so it depends on no measured time which steps have some.

Nor does it learn from wrong guesses, as those of heads that know a single text are beside other texts.
"""

from __future__ import annotations

from services.dense_worker import service
from services.dense_worker.__main__ import main
from services.dense_worker.features.drafting.drafter import Acceptance
from services.dense_worker.features.drafting.measured_drafting import ForcedDrafting, MeasuredDrafting
from services.dense_worker.features.drafting.step_costs import StepCosts, TimeBudget

NUM_DRAFTS = 5


class FreeSteps(StepCosts):
    """Steps of every size and kind cost the same."""

    def cost(self, num_tokens: int, *, is_ahead: bool) -> float:
        return 1.0


class EndlessBudget(TimeBudget):
    """Any amount of time may be lost."""

    @property
    def is_spent(self) -> bool:
        return False


def learn_nothing(acceptance: Acceptance, *, is_first: bool, is_right: bool) -> None:
    """In place of `Acceptance.observe`: every guess is as likely as the first one."""


class SpeculatingDenseWorker(service.DenseWorker):
    """Drafts as `scheduler.speculation` says; without it, what forms force."""

    def drafting(self) -> MeasuredDrafting:
        section, drafter = self._config.scheduler, self._model.drafter
        costs = FreeSteps(section.max_num_seqs, section.max_num_batched_tokens)
        if drafter is None:
            drafting: MeasuredDrafting = ForcedDrafting(costs)
        else:
            drafter.note_cost = lambda num_steps: None  # type: ignore[method-assign]
            drafting = MeasuredDrafting(drafter, NUM_DRAFTS, costs)
        drafting._budget = drafting._trials = EndlessBudget()
        return drafting


if __name__ == "__main__":
    service.DenseWorker = SpeculatingDenseWorker  # type: ignore[misc]
    Acceptance.observe = learn_nothing  # type: ignore[method-assign]
    main()
