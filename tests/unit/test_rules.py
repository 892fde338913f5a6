"""Rules of how the code is divided, which take the place of limits of lines and files."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.support.imports import MODULES, imports_of, tree_of

FEWEST_LINES = 40
# Modules that list parts of one kind: each part is a file of its own, however short.
LISTS = {
    "services.common.families.registry",
    "services.dense_worker.features.installed",
    "services.dense_worker.sampling.editors",
    "services.gateway.apis.app",
    "services.gateway.features.installed",
}
STEPPED = {  # compare the wall clock, and say what a step of it may do
    "services.lora.adapter_records",  # ages of files
    "services.rpc.otel",  # spans since 1970
}


def importers() -> dict[str, set[str]]:
    found = defaultdict[str, set[str]](set)
    for name in MODULES:
        for imported in imports_of(name):
            found[imported].add(name)
    return found


def imports_at_start(name: str) -> set[str]:
    """The modules that a module imports when it is imported, and not in a function, as what is not always there."""
    return {node.module for node in tree_of(name).body if isinstance(node, ast.ImportFrom) and node.module is not None}


def test_what_is_short_and_imported_once_is_part_of_its_importer() -> None:
    fragments = []
    for name, by in importers().items():
        if len(by) != 1 or name not in MODULES or MODULES[name].name == "__init__.py":
            continue
        importer = next(iter(by))
        num_lines = len(MODULES[name].read_text().splitlines())
        if num_lines < FEWEST_LINES and importer not in LISTS and name in imports_at_start(importer):
            fragments.append(f"{name} has {num_lines} lines, and only {importer} imports it")
    assert not fragments


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def test_what_is_public_says_what_a_caller_must_know() -> None:
    silent = [
        f"{name}: {node.name} in line {node.lineno}"
        for name in MODULES
        for node in public_definitions(tree_of(name))
        if not ast.get_docstring(node)
    ]
    assert not silent


def test_no_time_limit_is_of_the_wall_clock() -> None:
    """It may step, in either direction: sums, differences and comparisons are of `time.monotonic`."""

    def is_wall_clock(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.time", "time.time_ns")

    found = set()
    for name in MODULES:
        for node in ast.walk(tree_of(name)):
            is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
            if is_sum or isinstance(node, ast.Compare):
                found |= {name for each in ast.iter_child_nodes(node) if is_wall_clock(each)}
    assert found <= STEPPED
