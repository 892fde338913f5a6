"""Who may change weights, and to which models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from services.common.errors import InvalidRequest, NotFound, PeerError, PermissionDenied
from services.gateway.access.weight_updates import WeightUpdates, find_model


@pytest.mark.parametrize("model", ["inside", "./inside", "{root}/inside", "link"])
def test_a_model_lies_below_the_directory(model: str, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "inside")
    assert find_model(tmp_path, model.format(root=tmp_path)) == (tmp_path / "inside").resolve()


@pytest.mark.parametrize("model", ["", ".", "..", "../other", "/", "out", "a\0b", "x" * 5000, "loop"])
def test_no_other_directory_is_found(model: str, tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    (tmp_path / "other").mkdir()
    (root / "out").symlink_to(tmp_path / "other")
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(InvalidRequest):
        find_model(root, model)
    with pytest.raises(NotFound, match="'missing' is no directory"):
        find_model(root, "missing")


def caller(name: str) -> Any:
    found = Mock(key=Mock() if name else None)
    found.name = name
    return found


@pytest.mark.parametrize(("name", "may"), [("admin", True), ("other", False), ("", True)])
def test_with_api_keys_only_those_of_admins_may_change_weights(name: str, may: bool, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    updates = WeightUpdates(tmp_path, ["admin"], f"unix:{tmp_path}/nobody.sock")
    assert updates.is_enabled
    error = PeerError if may else PermissionDenied  # nobody answers at that address
    with pytest.raises(error, match=None if may else "'other' may not change weights: see gateway.weights_admins"):
        asyncio.run(updates.update(caller(name), "b", "keep", keeps_caches=False, wait_timeout_s=0.0))


def test_weights_cannot_be_changed_by_default_or_without_a_launcher(tmp_path: Path) -> None:
    assert not WeightUpdates(None, [], "unix:/launch.sock").is_enabled
    assert not WeightUpdates(tmp_path, [], None).is_enabled
