"""README.md names only what is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from services.common.config import Config
from tests.cluster import REPOSITORY
from tests.readme import function_references, mentioned_make_targets, mentioned_paths, mentioned_settings


@pytest.mark.parametrize(("path", "name"), function_references())
def test_a_named_function_is_in_its_file(path: str, name: str) -> None:
    tree = ast.parse(_find(path).read_text())
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, definitions)}


@pytest.mark.parametrize("path", sorted(set(mentioned_paths())))
def test_a_named_file_is_there(path: str) -> None:
    _find(path)


@pytest.mark.parametrize("setting", sorted(set(mentioned_settings(Config.model_fields))))
def test_a_named_setting_is_one(setting: str) -> None:
    section, key = setting.split(".")
    assert key in type(getattr(Config(), section)).model_fields


@pytest.mark.parametrize("target", sorted(set(mentioned_make_targets())))
def test_a_named_make_target_is_in_the_makefile(target: str) -> None:
    assert f"\n{target}:" in (REPOSITORY / "Makefile").read_text()


def _find(path: str) -> Path:
    """From the root of the repository, or from `services/`, as the tables write it for short."""
    for folder in (REPOSITORY, REPOSITORY / "services"):
        if (folder / path).exists():
            return folder / path
    raise AssertionError(f"README.md names {path}, which is not there")
