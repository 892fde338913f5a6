"""What another process has rewritten is what pytest would have, until the file changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion import rewrite

from tests.support.rewriting import rewrite_all


def imported(file: Path, config: pytest.Config) -> ModuleType:
    """As pytest imports a module of tests."""
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=rewrite.AssertionRewritingHook(config))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pytest_takes_what_was_rewritten_and_rewrites_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "test_sums.py"
    file.write_text("def test_sum(): assert 1 + 1 == 3\n")
    rewrite_all([file], pytestconfig)
    rewritten, rewrite_test = [], rewrite._rewrite_test

    def note(path: Path, config: pytest.Config) -> object:
        rewritten.append(path)
        return rewrite_test(path, config)

    monkeypatch.setattr(rewrite, "_rewrite_test", note)
    with pytest.raises(AssertionError, match=r"assert \(1 \+ 1\) == 3"):
        imported(file, pytestconfig).test_sum()
    rewrite_all([file], pytestconfig)
    assert not rewritten
    file.write_text("def test_sum(): assert 1 + 2 == 4\n")
    with pytest.raises(AssertionError, match=r"assert \(1 \+ 2\) == 4"):
        imported(file, pytestconfig).test_sum()
    assert rewritten == [file]
