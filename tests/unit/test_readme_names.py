"""README.md and docs/ name only files, functions, settings and make targets that exist."""

from __future__ import annotations

import ast
import re
from itertools import chain
from pathlib import Path

import pytest

from services.common.config import Config
from tests.support.cluster import REPOSITORY
from tests.support.documents import (
    LIFE_OF_A_TOKEN,
    PAGES,
    function_references,
    mentioned_make_targets,
    mentioned_paths,
    mentioned_settings,
)

NUM_STAGES = 15  # the minimum for a token's life


@pytest.mark.parametrize(("path", "name"), sorted(set(chain.from_iterable(map(function_references, PAGES)))))
def test_a_named_function_is_in_its_file(path: str, name: str) -> None:
    tree = ast.parse(_find(path).read_text())
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, definitions)}


def test_every_stage_of_a_token_names_one_function() -> None:
    stages = re.findall(r"^\| \d+ \| (.*?) \|", LIFE_OF_A_TOKEN.read_text(), re.MULTILINE)
    assert len(stages) >= NUM_STAGES
    assert stages == [f"`{path}:{name}`" for path, name in function_references(LIFE_OF_A_TOKEN)]


@pytest.mark.parametrize("path", sorted(set(chain.from_iterable(map(mentioned_paths, PAGES)))))
def test_a_named_file_exists(path: str) -> None:
    _find(path)


@pytest.mark.parametrize(
    "setting", sorted({setting for page in PAGES for setting in mentioned_settings(page, Config.model_fields)})
)
def test_a_named_setting_exists(setting: str) -> None:
    section, key = setting.split(".")
    assert key in type(getattr(Config(), section)).model_fields


@pytest.mark.parametrize("target", sorted(set(chain.from_iterable(map(mentioned_make_targets, PAGES)))))
def test_a_named_make_target_is_in_the_makefile(target: str) -> None:
    assert f"\n{target}:" in (REPOSITORY / "Makefile").read_text()


def _find(path: str) -> Path:
    """Finds a path from the root of the repository or, as tables abbreviate it, from `services/`."""
    for folder in (REPOSITORY, REPOSITORY / "services"):
        if (folder / path).exists():
            return folder / path
    raise AssertionError(f"a page names {path}, which is not there")
