"""A launcher whose dense worker has drafts in every step that can have some, as `speculating_dense_worker` does."""

from __future__ import annotations

from services.launch import service
from services.launch.__main__ import main
from services.launch.child import Child


class SpeculatingChild(Child):
    """Runs the dense worker for which drafts always pay."""

    @property
    def module(self) -> str:
        return "tests.support.workers.speculating_dense_worker" if self.role == "dense_worker" else super().module


if __name__ == "__main__":
    service.Child = SpeculatingChild  # type: ignore[misc]
    main()
