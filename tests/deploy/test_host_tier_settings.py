"""The commented settings of the host tier in the configs of Compose and Kubernetes can be used as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.common.config import load_config
from tests.support.cluster import REPOSITORY

FILES = (
    "config/cpu.toml",
    "config/cuda.toml",
    "kubernetes/base/config.toml",
    "kubernetes/overlays/cuda/config.toml",
)


@pytest.mark.parametrize("name", FILES)
def test_the_settings_are_valid_without_their_comment_signs(name: str, tmp_path: Path) -> None:
    text, num_settings = re.subn("(?m)^# (?=host_kv_)", "", (REPOSITORY / "deploy" / name).read_text())
    assert num_settings == 2
    (tmp_path / "config.toml").write_text(text)
    section = load_config(tmp_path / "config.toml", [f"model.path={tmp_path}"]).attention
    assert section.host_kv_bytes == 2**29
    assert section.host_kv_path == Path("/dev/shm/host-kv")
    assert not section.host_kv_path.match("twostroke-*"), "workers remove such files as those of dead processes"
