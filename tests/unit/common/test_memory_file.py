"""Memory files between two processes: the bytes, their end, and what can be opened."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.memory_file import MemoryFile, can_read, open_memory_file
from services.pb import images_pb2

ROOT = Path(__file__).parents[3]
OTHER = """
import sys
from services.common.memory_file import MemoryFile
file = MemoryFile(b"pixels of another process")
file.seal()
sys.stdout.buffer.write(len(data := file.describe().SerializeToString()).to_bytes(2, "big") + data)
sys.stdout.flush()
sys.stdin.read()
"""


def sealed(data: bytes) -> MemoryFile:
    file = MemoryFile(data)
    file.seal()
    return file


def test_slices_are_those_of_the_bytes() -> None:
    data = os.urandom(1000)
    file = sealed(data)
    assert len(file) == 1000
    assert all(file[start : start + 300] == data[start : start + 300] for start in range(0, 1100, 100))


def test_another_process_reads_it_also_after_its_owner_was_killed() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OTHER], cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        size = int.from_bytes(process.stdout.read(2), "big")
        described = images_pb2.MemoryFile.FromString(process.stdout.read(size))
        assert can_read(described)
        file = open_memory_file(described)
        process.kill()
    try:
        assert os.pread(file, 100, 0) == b"pixels of another process"
    finally:
        os.close(file)
    assert not can_read(described), "nothing is left of it"


def test_a_sealed_file_cannot_change() -> None:
    file = MemoryFile(b"before")
    with open(file.path, "wb") as writer:
        writer.write(b"pixels")
        writer.flush()
        file.seal()
        with pytest.raises(PermissionError):
            os.ftruncate(writer.fileno(), 0)
        writer.seek(0)
        with pytest.raises(PermissionError):
            os.write(writer.fileno(), b"others")
    assert file[0:100] == b"pixels"


def test_what_is_no_sealed_memory_file_of_that_number_and_length_is_refused(tmp_path: Path) -> None:
    described = sealed(b"12345").describe()
    assert not can_read(described), "it was closed when nobody referred to it any more"
    file = sealed(b"12345")
    for wrong in ({"inode": 1}, {"num_bytes": 4}, {"process_id": 2**22 + 1}, {"descriptor": 10**6}):
        described = file.describe()
        described.MergeFrom(images_pb2.MemoryFile(**wrong))
        assert not can_read(described)
    assert can_read(file.describe()) and not can_read(images_pb2.MemoryFile())
    assert not can_read(MemoryFile(b"not sealed").describe())
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "file", tmp_path / "pipe"):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        assert not can_read(
            images_pb2.MemoryFile(
                process_id=os.getpid(), descriptor=descriptor, inode=status.st_ino, num_bytes=status.st_size
            )
        )
        os.close(descriptor)


def test_it_is_closed_with_its_last_reference() -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = [MemoryFile(b"1") for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before + 10
    assert all(fcntl.fcntl(int(each.path.rpartition("/")[2]), fcntl.F_GETFD) & fcntl.FD_CLOEXEC for each in files)
    del files
    assert len(os.listdir("/proc/self/fd")) == before
