"""Notes when modules are imported and functions run. Python imports this by its name if its directory is on PYTHONPATH.

The bench beside it starts a server in such an environment. The services know nothing of it.
"""

from __future__ import annotations

import functools
import importlib._bootstrap as bootstrap
import inspect
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

PHASES = dict[str, list[str]]()  # of a module, the functions; "" is its import
for line in os.environ.get("START_PHASES", "").splitlines():
    module_name, _, function_name = line.partition(" ")
    PHASES.setdefault(module_name, []).append(function_name)
FILE = os.open(os.environ.get("START_FILE", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
SERVICE = next((each for each in sys.orig_argv if each.startswith("services.")), "")


def note(phase: str, what: str) -> None:
    """Writes a line, by one call, as several processes write."""
    os.write(FILE, f"{os.getpid()} {time.monotonic_ns()} {what} {phase}\n".encode())


def noting(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls are noted; of a coroutine function, until its end."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        note(phase, "begin")
        try:
            return function(*args, **options)
        finally:
            note(phase, "end")

    @functools.wraps(function)
    async def run(*args: Any, **options: Any) -> Any:
        note(phase, "begin")
        try:
            return await function(*args, **options)
        finally:
            note(phase, "end")

    return run if inspect.iscoroutinefunction(function) else call


def find_and_load(name: str, import_: Callable[..., ModuleType]) -> ModuleType:
    """As the interpreter does it. Before others have the module, its functions are exchanged."""
    names = PHASES.get(name, ())
    if "" in names:
        note(name, "begin")
    module = find_and_load_as_before(name, import_)
    if "" in names:
        note(name, "end")
    for function in filter(None, names):
        *owners, last = function.split(".")
        owner: Any = functools.reduce(getattr, owners, module)
        setattr(owner, last, noting(f"{name}:{function}", getattr(owner, last)))
    return module


if PHASES and SERVICE:
    find_and_load_as_before = bootstrap._find_and_load_unlocked
    bootstrap._find_and_load_unlocked = find_and_load
    note(SERVICE, "process")
