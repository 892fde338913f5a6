"""A model without weights ends the start before anything is started."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from services.common import weight_files
from services.common.config import load_config
from services.common.errors import ModelError
from services.common.weight_files import begin_reading_weights, check_weights
from tests.support.cluster import free_port
from tests.support.warm_process import run_warm
from tests.unit.common.test_streaming import write_config

INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}})


def num_cached_pages(file: Path) -> int:
    """How many pages of a file the kernel has in memory."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        view = np.frombuffer(memory, np.uint8)
        pages = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(pages.ctypes.data)
        assert libc.mincore(*arguments) == 0
        del view
    return int((pages & 1).sum())


def write_uncached(file: Path, num_bytes: int) -> None:
    with file.open("wb") as stream:
        stream.write(bytes(num_bytes))
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if num_cached_pages(file):
        pytest.skip("this file system keeps files in memory")


def test_weights_are_read_ahead_as_far_as_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        write_uncached(tmp_path / f"{name}.safetensors", 2**21)
    (tmp_path / "model.safetensors.index.json").write_text(INDEX)
    config = load_config(None, [f"model.path={tmp_path}"])
    monkeypatch.setattr(weight_files, "available_bytes", lambda: 2 * (2**21 + 2**19))
    begin_reading_weights(config)
    deadline = time.monotonic() + 60
    while num_cached_pages(tmp_path / "one.safetensors") < 2**21 // mmap.PAGESIZE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert num_cached_pages(tmp_path / "two.safetensors") < 2**21 // mmap.PAGESIZE


def test_no_weights_are_looked_for_where_none_are_read(tmp_path: Path) -> None:
    for setting in ("model.load_format=dummy", "launch.services=['gateway']"):
        begin_reading_weights(load_config(None, [f"model.path={tmp_path}", setting]))


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
