"""A dense worker for which drafts always pay: so it depends on no measured time which steps have some."""

from __future__ import annotations

from services.dense_worker import service
from services.dense_worker.__main__ import main
from services.dense_worker.engine.speculation.choose_source import make_guess_source
from services.dense_worker.engine.speculation.speculation import Speculation
from services.dense_worker.engine.speculation.step_costs import StepCosts
from services.dense_worker.engine.speculation.time_budget import TimeBudget

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


class SpeculatingDenseWorker(service.DenseWorker):
    def draft_source(self) -> Speculation:
        section = self._config.scheduler
        costs = FreeSteps(section.max_num_seqs, section.max_num_batched_tokens)
        source = make_guess_source(section, self._model.num_heads)
        source.note_guess_cost = lambda num_steps: None  # type: ignore[method-assign]
        speculation = Speculation(source, NUM_DRAFTS, costs)
        speculation._budget = speculation._trials = EndlessBudget()
        return speculation


if __name__ == "__main__":
    service.DenseWorker = SpeculatingDenseWorker  # type: ignore[misc]
    main()
