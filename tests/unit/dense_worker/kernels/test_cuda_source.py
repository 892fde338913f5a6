"""Compiled kernels are kept in a folder, and are compiled again where a file there is damaged. NVRTC is not needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

MODULE = "services.dense_worker.kernels.cuda_source"
BINARY = bytes(range(256)) * 40
DEVICE = torch.device("cuda", 0)
CONSTANTS = {"HIDDEN": 256}


class Folder:
    """What `FileCacheManager` of Triton is for one key."""

    root: Path

    def __init__(self, key: str) -> None:
        self._directory = self.root / key

    def get_file(self, name: str) -> str | None:
        path = self._directory / name
        return str(path) if path.exists() else None

    def put(self, data: bytes, name: str, binary: bool = True) -> str:
        self._directory.mkdir(exist_ok=True)
        (self._directory / name).write_bytes(data)
        return str(self._directory / name)


@pytest.fixture
def cuda_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, whose compiler gives BINARY and counts."""
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    flags: Any = ModuleType("services.channel.cuda_flags")
    flags.check = None
    cache: Any = ModuleType("triton.runtime.cache")
    cache.get_cache_manager = Folder
    Folder.root = tmp_path / "kept"
    Folder.root.mkdir()
    packages = {name: ModuleType(name) for name in ("cuda", "triton", "triton.runtime")}
    modules = {each.__name__: each for each in (bindings, flags, cache)}
    for name, module in (packages | modules).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module.num_compiled = 0

    def compile_source(*_: object) -> bytes:
        module.num_compiled += 1
        return BINARY

    monkeypatch.setattr(module, "_compile", compile_source)
    yield module
    del sys.modules[MODULE]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cu"
    path.write_text("// a kernel")
    return path


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_kernel_is_compiled_once_for_its_source_and_constants(cuda_source: Any, source: Path) -> None:
    assert [cuda_source.compiled(source, CONSTANTS, DEVICE) for _ in range(3)] == [BINARY] * 3
    assert cuda_source.num_compiled == 1
    cuda_source.compiled(source, {"HIDDEN": 512}, DEVICE)
    source.write_text("// another kernel")
    cuda_source.compiled(source, CONSTANTS, DEVICE)
    assert cuda_source.num_compiled == 3


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.write_bytes(b""), lambda path: path.write_bytes(path.read_bytes()[:-1]), flip_a_bit],
    ids=["empty", "cut off", "one bit"],
)
def test_a_damaged_kernel_is_compiled_again_and_kept(
    cuda_source: Any, source: Path, damage: Callable[[Path], None]
) -> None:
    cuda_source.compiled(source, CONSTANTS, DEVICE)
    [path] = Folder.root.glob("*/*")
    damage(path)
    with capture_logs() as logs:
        assert cuda_source.compiled(source, CONSTANTS, DEVICE) == BINARY
    assert [each["log_level"] for each in logs] == ["warning"] and logs[0]["file"] == str(path)
    assert cuda_source.num_compiled == 2
    with capture_logs() as logs:
        assert cuda_source.compiled(source, CONSTANTS, DEVICE) == BINARY
    assert cuda_source.num_compiled == 2 and not logs


def test_a_kernel_that_can_be_neither_read_nor_kept_is_served(cuda_source: Any, source: Path) -> None:
    cuda_source.compiled(source, CONSTANTS, DEVICE)
    [path] = Folder.root.glob("*/*")
    make_unreadable(path)
    for _ in range(2):
        assert cuda_source.compiled(source, CONSTANTS, DEVICE) == BINARY
    assert cuda_source.num_compiled == 3
