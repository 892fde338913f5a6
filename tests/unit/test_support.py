"""The names that `tests.support` promises to programs outside this repository are where it says."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
import threading
from pathlib import Path
from typing import Any

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


def test_the_example_runs(tmp_path: Path) -> None:
    [example] = re.findall(r"^    with running_cluster.*", support.__doc__ or "", re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"directory": tmp_path, "threading": threading}
    for module, name in (("cluster", "running_cluster"), ("cluster", "request"), ("clients.streams", "collect")):
        names[name] = getattr(importlib.import_module(f"tests.support.{module}"), name)
    exec(textwrap.dedent(example), names)
    assert len(names["undisturbed"].token_ids[0]) > 10
