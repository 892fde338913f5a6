"""A launcher whose dense worker samples every token in a step of its own, see `undrafted_dense_worker`."""

from __future__ import annotations

from services.launch import service
from services.launch.__main__ import main
from services.launch.child import Child


class UndraftedChild(Child):
    """Runs that dense worker."""

    @property
    def module(self) -> str:
        return "tests.support.workers.undrafted_dense_worker" if self.role == "dense_worker" else super().module


if __name__ == "__main__":
    service.Child = UndraftedChild  # type: ignore[misc]
    main()
