"""The example of `tests.support`, which programs outside this repository begin with, runs."""

from __future__ import annotations

import functools
import importlib
import re
import textwrap
import threading
from pathlib import Path
from typing import Any

from tests import support


def test_the_example_runs(tmp_path: Path) -> None:
    [example] = re.findall(r"^    with running_cluster.*", support.__doc__ or "", re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"directory": tmp_path, "threading": threading}
    for module, name in (("cluster", "running_cluster"), ("cluster", "request"), ("clients.streams", "collect")):
        names[name] = getattr(importlib.import_module(f"tests.support.{module}"), name)
    names["running_cluster"] = functools.partial(names["running_cluster"], is_warm=True)
    exec(textwrap.dedent(example), names)
    assert len(names["undisturbed"].token_ids[0]) > 10
