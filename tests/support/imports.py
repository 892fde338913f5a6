"""Which modules of services/ import which, read from their sources."""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
GENERATED = REPOSITORY / "services" / "pb"


def python_files(*folders: str) -> list[Path]:
    """The Python files of these folders, without generated ones."""
    files = (path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))
    return [path for path in files if GENERATED not in path.parents]


def module_name(path: Path) -> str:
    """The name by which it is imported. The name of an `__init__.py` is that of its package."""
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in python_files("services")}


@functools.cache
def tree_of(name: str) -> ast.Module:
    """A module's syntax tree, for all who read it."""
    return ast.parse(MODULES[name].read_text())


@functools.cache
def imports_of(name: str) -> frozenset[str]:
    """The modules of services/ that a module imports, also within functions and only for type checkers."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{name} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {full if full in MODULES else node.module for full in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(each for each in found if each.startswith("services.")) - {name}


def sources_of(names: Iterable[str]) -> dict[str, Path]:
    """These modules and all that they import, directly or not, with their packages: the files by name."""
    found: dict[str, Path] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name not in MODULES:  # a generated one, or services itself
            continue
        found[name] = MODULES[name]
        waiting += [*imports_of(name), name.rpartition(".")[0]]
    return found


@contextlib.contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Within, modules of services/ are read again when they are imported, as by a process that imports them first."""
    before = {name: module for name, module in sys.modules.items() if name in MODULES}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)
