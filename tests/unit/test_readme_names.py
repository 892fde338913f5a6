"""README.md and docs/ name only files, functions, settings and make targets that exist."""

from __future__ import annotations

import ast
import re
from itertools import chain
from pathlib import Path

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


def test_a_named_function_is_in_its_file() -> None:
    named = set(chain.from_iterable(map(function_references, PAGES)))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {
        (path, node.name)
        for path in {path for path, _ in named}
        for node in ast.walk(ast.parse(_find(path).read_text()))
        if isinstance(node, kinds)
    }
    assert named and not named - defined


def test_every_stage_of_a_token_names_one_function() -> None:
    stages = re.findall(r"^\| \d+ \| (.*?) \|", LIFE_OF_A_TOKEN.read_text(), re.MULTILINE)
    assert len(stages) >= NUM_STAGES
    assert stages == [f"`{path}:{name}`" for path, name in function_references(LIFE_OF_A_TOKEN)]


def test_a_named_file_exists() -> None:
    paths = set(chain.from_iterable(map(mentioned_paths, PAGES)))
    assert paths
    for path in paths:
        _find(path)


def test_a_named_setting_exists() -> None:
    settings = {setting for page in PAGES for setting in mentioned_settings(page, Config.model_fields)}
    config = Config()
    existing = {f"{name}.{key}" for name in Config.model_fields for key in type(getattr(config, name)).model_fields}
    assert settings and not settings - existing


def test_a_named_make_target_is_in_the_makefile() -> None:
    targets = set(chain.from_iterable(map(mentioned_make_targets, PAGES)))
    makefile = (REPOSITORY / "Makefile").read_text()
    assert targets and not [target for target in targets if f"\n{target}:" not in makefile]


def _find(path: str) -> Path:
    """Finds a path from the root of the repository or, as tables abbreviate it, from `services/`."""
    for folder in (REPOSITORY, REPOSITORY / "services"):
        if (folder / path).exists():
            return folder / path
    raise AssertionError(f"a page names {path}, which is not there")
