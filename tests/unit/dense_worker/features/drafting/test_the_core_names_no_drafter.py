"""Engine, scheduler, planner and model runner know `Drafting` and draft tokens in plans, and nothing of what drafts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[5] / "services" / "dense_worker"
FILES = sorted(path for folder in ("engine", "runner") for path in (CORE / folder).rglob("*.py"))
ROOM = re.compile(r"features\.drafting\.(?!drafting import Drafting$)")
NAMES = re.compile(r"guess|predictor|drafter|speculat|n-?gram|suffix_|medusa|eagle|draft.model", re.IGNORECASE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_the_core_names_no_drafter(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert not [line for line in lines if ROOM.search(line) or NAMES.search(line)]
