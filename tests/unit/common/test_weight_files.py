"""A model without weights ends the start before anything is started."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from services.common.config import load_config
from services.common.errors import ModelError
from services.common.weight_files import check_weights
from tests.support.cluster import free_port
from tests.support.warm_process import run_warm
from tests.unit.common.test_streaming import write_config

INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}})


def check(path: Path, *settings: str) -> None:
    check_weights(load_config(None, [f"model.path={path}", *settings]))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "neither model.safetensors nor model.safetensors.index.json (found no weights)"),
        ({"pytorch_model.bin": ""}, "found pytorch_model.bin, supported: safetensors"),
        ({"model.safetensors.index.json": INDEX, "one.safetensors": ""}, "lacks 1 of 2 files of weights: two.safet"),
        ({"model.safetensors.index.json": "{}"}, "is not a safetensors index"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=re.escape(said)):
        check(tmp_path)


def test_who_needs_no_weights_may_lack_them(tmp_path: Path) -> None:
    check(tmp_path, "model.load_format=dummy")
    check(tmp_path, 'launch.services=["attn_worker", "gateway"]')
    (tmp_path / "model.safetensors").write_text("")
    check(tmp_path)


def test_the_start_ends_before_a_service_is_started(tmp_path: Path) -> None:
    path = write_config(tmp_path, "llama")
    ports = [f"--set={key}=127.0.0.1:{free_port()}" for key in ("gateway.address", "gateway.http_address")]
    done = run_warm("services.launch", "--model", str(path), *ports)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "found no weights" in line and "service=launch" in line
