"""Packages import only those below them."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.cluster import REPOSITORY

GENERATED = REPOSITORY / "services" / "pb"
# The packages of services/, and the others that each may import. The three services share only messages.
LAYERS = {
    "pb": set(),
    "common": {"pb"},
    "grammar": {"common"},
    "lora": {"common", "pb"},
    "step": {"common", "lora", "pb"},
    "channel": {"common"},
    "rpc": {"common", "pb"},
    "gateway": {"common", "grammar", "lora", "rpc", "pb"},
    "dense_worker": {"common", "grammar", "lora", "step", "channel", "rpc", "pb"},
    "attn_worker": {"common", "step", "channel", "rpc", "pb"},
    "launch": {"common", "channel", "rpc", "gateway", "pb"},  # gateway: the chat client; channel: the cleanup
}


def python_files(*folders: str) -> list[Path]:
    """The Python files of these folders, without generated ones."""
    files = (path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))
    return [path for path in files if GENERATED not in path.parents]


def module_name(path: Path) -> str:
    """The name by which it is imported. The name of an `__init__.py` is that of its package."""
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in python_files("services")}


def imports_of(name: str) -> set[str]:
    """The modules of services/ that a module imports, also within functions and only for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{name} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {full if full in MODULES else node.module for full in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {each for each in found if each.startswith("services.")} - {name}


GRAPH = {name: imports_of(name) for name in MODULES}


def test_the_graph_contains_imports_in_functions_and_for_types() -> None:
    assert "services.rpc.otel" in GRAPH["services.rpc.tracing"], "imported in a function"
    assert "services.gateway.link.journal_entry" in GRAPH["services.gateway.link.stream_sequences"]
    assert "services.step.plan" in GRAPH["services.step.codec"]


def test_no_cyclic_imports() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_a_package_imports_only_those_below_it(package: str) -> None:
    allowed = LAYERS[package] | {package}
    wrong = [
        f"{name} imports {imported}"
        for name, imports in GRAPH.items()
        if name.split(".")[1:2] == [package]
        for imported in imports
        if imported.split(".")[1] not in allowed
    ]
    assert not wrong


def test_every_package_has_its_layer() -> None:
    assert {name.split(".")[1] for name in GRAPH if "." in name} | {"pb"} == set(LAYERS)
