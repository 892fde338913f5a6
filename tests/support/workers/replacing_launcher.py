"""A launcher that runs other modules in place of some: see `MODULES`."""

from __future__ import annotations

import json
import os

from services.launch import early_services, service
from services.launch.__main__ import main
from services.launch.child import Child
from tests.support.warm_process import MODULES


class ReplacedChild(Child):
    """Runs the module that replaces its own."""

    @property
    def module(self) -> str:
        own = super().module
        return json.loads(os.environ[MODULES]).get(own, own)


if __name__ == "__main__":
    service.Child = ReplacedChild  # type: ignore[misc]
    # Nobody would take the early ones of these, which would wait to the end.
    replaced = json.loads(os.environ[MODULES])
    early_services.MODULES = tuple(each for each in early_services.MODULES if each not in replaced)
    main()
