"""Notes when a service calls certain functions. Python imports this by its name if its directory is on PYTHONPATH.

The bench beside it starts a server in such an environment. The services know nothing of it.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

POINTS = tuple(line.split() for line in os.environ.get("FIRST_TOKEN_POINTS", "").splitlines())  # module, function
FILE = os.environ.get("FIRST_TOKEN_FILE", os.devnull)
COUNTS_CALLS = bool(os.environ.get("FIRST_TOKEN_CALLS"))
num_calls = 0  # of functions of Python and of C, by all threads of this process, if they are counted


class Finder(importlib.machinery.PathFinder):
    """Wraps functions of the modules that it finds."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        names = [name for module, name in POINTS if module == fullname]
        spec = super().find_spec(fullname, path, target) if names else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for name in names:
                *owners, last = name.split(".")
                owner: Any = functools.reduce(getattr, owners, module)
                setattr(owner, last, noting(f"{fullname}:{name}", getattr(owner, last)))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def noting(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which writes down before each call when that is, on the clock that all processes share."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        global num_calls
        before = num_calls - COUNTS_CALLS  # without this one
        os.write(file, b"%d %b %d %d\n" % (time.monotonic_ns(), point.encode(), os.getpid(), before))
        num_calls = before
        return function(*arguments, **options)

    return call


def count(frame: FrameType, event: str, argument: Any) -> None:
    """Called by Python for each call."""
    global num_calls
    if event in ("call", "c_call"):
        num_calls += 1


if POINTS:
    file = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.meta_path.insert(0, Finder)
    if COUNTS_CALLS:
        threading.setprofile(count)
        sys.setprofile(count)
