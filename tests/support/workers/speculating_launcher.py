"""A launcher of ranks, of which the first always drafts, see `speculating_dense_worker`."""

from __future__ import annotations

from services.launch import early_services, service
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
    # Nobody would take the early one, which would wait to the end.
    early_services.MODULES = tuple(each for each in early_services.MODULES if each != "services.dense_worker")
    main()
