"""`PinnedFile`: what is pinned of the file of a host tier. The GPU's runtime is one that counts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from services.attn_worker.cache.tiers.pinned_file import PinnedFile

SIZE = 4 * 4096


class Runtime:
    """`cuda.bindings.runtime`, as far as it pins memory."""

    cudaError_t = SimpleNamespace(cudaSuccess=0)

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}  # sizes by address

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[int]:
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        return (0,)

    def cudaHostUnregister(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime, bindings = Runtime(), ModuleType("cuda.bindings")
    bindings.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return runtime


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.write_bytes(bytes(SIZE))
    return path


def memory_of(pinned: PinnedFile, path: Path) -> object:
    file = os.open(path, os.O_RDWR)
    try:
        return pinned.memory_of(file)
    finally:
        os.close(file)


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_memory_stays_pinned_as_long_as_its_file_is_the_one(runtime: Runtime, path: Path) -> None:
    pinned = PinnedFile.open(path)
    assert pinned is not None
    memory = memory_of(pinned, path)
    assert memory is not None and memory_of(pinned, path) is memory, "a second attempt to start"
    assert list(runtime.pinned.values()) == [SIZE]


@pytest.mark.parametrize("is_other_size", [False, True])
def test_memory_of_a_file_that_was_replaced_is_given_back(runtime: Runtime, path: Path, is_other_size: bool) -> None:
    pinned = PinnedFile.open(path)
    assert pinned is not None and str(path) in mapped_files()
    if is_other_size:
        os.truncate(path, 2 * SIZE)
    else:
        other = path.with_name("other")
        other.write_bytes(bytes(SIZE))
        other.rename(path)
    for _ in range(2):
        assert memory_of(pinned, path) is None
        assert not runtime.pinned
        assert str(path) not in mapped_files()
