"""Packages import only those below them."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.imports import MODULES, imports_of

# The packages of services/, and the others that each may import. The three services share only messages.
LAYERS = {
    "pb": set(),
    "common": {"pb"},
    "grammar": {"common"},
    "lora": {"common", "pb"},
    "step": {"common", "lora", "pb"},
    "channel": {"common"},
    "rpc": {"common", "pb"},
    "gateway": {"common", "grammar", "lora", "step", "rpc", "pb"},
    "dense_worker": {"common", "grammar", "lora", "step", "channel", "rpc", "pb"},
    "attn_worker": {"common", "step", "channel", "rpc", "pb"},
    "launch": {"common", "channel", "rpc", "gateway", "pb"},  # gateway: the chat client; channel: the cleanup
    "console": {"channel", "common", "dense_worker", "gateway", "launch"},
}


@pytest.fixture(scope="module")
def graph() -> dict[str, frozenset[str]]:
    """What each module imports. To read all takes seconds, which only the process that runs these tests needs."""
    return {name: imports_of(name) for name in MODULES}


def test_the_graph_contains_imports_in_functions_and_for_types(graph: dict[str, frozenset[str]]) -> None:
    assert "services.rpc.otel" in graph["services.rpc.tracing"], "imported in a function"
    assert "services.gateway.link.journal_entry" in graph["services.gateway.link.journal"]
    assert "services.step.plan" in graph["services.step.codec"]


def test_no_cyclic_imports(graph: dict[str, frozenset[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_a_package_imports_only_those_below_it(package: str, graph: dict[str, frozenset[str]]) -> None:
    allowed = LAYERS[package] | {package}
    wrong = [
        f"{name} imports {imported}"
        for name, imports in graph.items()
        if name.split(".")[1:2] == [package]
        for imported in imports
        if imported.split(".")[1] not in allowed
    ]
    assert not wrong


def test_every_package_has_its_layer(graph: dict[str, frozenset[str]]) -> None:
    assert {name.split(".")[1] for name in graph if "." in name} | {"pb"} == set(LAYERS)
