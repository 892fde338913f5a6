"""The names that `tests.support` promises to programs outside this repository are where it says."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from tests import support

SURFACE = dict(re.findall(r"^    ([a-z][\w.]*) {2,}(\S.*)$", support.__doc__ or "", re.MULTILINE))
# Parameters that programs outside this repository use by name.
PARAMETERS = {
    "cluster.running_cluster": ["directory", "overrides", "wrapper", "is_warm", "launcher"],
    "cluster.request": ["prompt", "max_tokens", "options"],
    "clients.streams.collect": ["gateway", "message", "on_chunk"],
    "undisturbed.assert_undisturbed": ["cluster", "attack", "headers", "max_growth_bytes"],
}


def test_the_surface_is_read() -> None:
    assert len(SURFACE) > 20 and "running_cluster" in SURFACE["cluster"].split()


@pytest.mark.parametrize("module", SURFACE)
def test_a_promised_name_is_in_its_module(module: str) -> None:
    found = importlib.import_module(f"tests.support.{module}")
    assert [name for name in SURFACE[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_promised_parameters_keep_their_names(name: str) -> None:
    module, _, function = name.rpartition(".")
    found = inspect.signature(getattr(importlib.import_module(f"tests.support.{module}"), function)).parameters
    assert PARAMETERS[name] == [*found][: len(PARAMETERS[name])]
