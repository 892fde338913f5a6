"""A launcher of ranks, of which one has a device that hangs, see `hanging_rank`."""

from __future__ import annotations

from services.launch import service
from services.launch.__main__ import main
from services.launch.child import Child


class HangingChild(Child):
    """Runs that shard."""

    @property
    def module(self) -> str:
        own = super().module
        return "tests.support.workers.hanging_rank" if own == "services.dense_worker.ranks" else own


if __name__ == "__main__":
    service.Child = HangingChild  # type: ignore[misc]
    main()
