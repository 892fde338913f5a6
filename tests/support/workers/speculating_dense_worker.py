"""A dense worker for which drafts always pay: so it depends on no measured time which steps have some."""

from __future__ import annotations

from services.dense_worker import service
from services.dense_worker.__main__ import main
from services.dense_worker.engine.speculation.choose_source import make_guess_source
from services.dense_worker.engine.speculation.speculation import Speculation
from services.dense_worker.engine.speculation.step_costs import StepCosts

NUM_DRAFTS = 5


class FreeSteps(StepCosts):
    """Steps of every size and kind cost the same."""

    def cost(self, num_tokens: int, *, is_ahead: bool) -> float:
        return 1.0


class SpeculatingDenseWorker(service.DenseWorker):
    def draft_source(self) -> Speculation:
        section = self._config.scheduler
        costs = FreeSteps(section.max_num_seqs, section.max_num_batched_tokens)
        return Speculation(make_guess_source(section, self._model.num_heads), NUM_DRAFTS, costs)


if __name__ == "__main__":
    service.DenseWorker = SpeculatingDenseWorker  # type: ignore[misc]
    main()
