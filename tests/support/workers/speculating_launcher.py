"""A launcher of ranks, of which the first always drafts, see `speculating_dense_worker`."""

from __future__ import annotations

from services.launch import service
from services.launch.__main__ import main
from services.launch.child import Child


class SpeculatingChild(Child):
    """Runs that dense worker."""

    @property
    def module(self) -> str:
        own = super().module
        return "tests.support.workers.speculating_dense_worker" if own == "services.dense_worker" else own


if __name__ == "__main__":
    service.Child = SpeculatingChild  # type: ignore[misc]
    main()
