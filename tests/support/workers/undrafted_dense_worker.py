"""A dense worker that samples every token in a step of its own, also those that a grammar forces, for comparisons."""

from __future__ import annotations

from services.dense_worker import service
from services.dense_worker.__main__ import main
from services.dense_worker.features.drafting.drafting import Drafting


class UndraftedDenseWorker(service.DenseWorker):
    def drafting(self) -> Drafting:
        return Drafting()


if __name__ == "__main__":
    service.DenseWorker = UndraftedDenseWorker  # type: ignore[misc]
    main()
