"""A region keeps what was published, whatever happens to the process that writes it, and believes nothing else."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import time
from itertools import count
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.attn_worker.cache.tiers.pinned_file import PinnedFile
from services.attn_worker.cache.tiers.region import Entry, TierRegion
from services.common.errors import CapacityError, ConfigError
from tests.support.examples import examples

BLOCK_BYTES, NUM_SLOTS = 320, 5
NUM_BYTES = 4096 + 4096 + NUM_SLOTS * BLOCK_BYTES  # a page of header, a page of table, slots
IDENTITY = {"model": "abc", "dtype": "float32", "block_size": 16}
NUM_KILLS = 30


def open_region(path: Path | None, **changes: object) -> TierRegion:
    arguments = {"num_bytes": NUM_BYTES, "block_bytes": BLOCK_BYTES, "identity": IDENTITY, "lock_timeout_s": 0.2}
    return TierRegion.open(path, **(arguments | changes))


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content_of(digest: bytes) -> bytes:
    return Random(digest).randbytes(BLOCK_BYTES)


def write(region: TierRegion, slot: int, number: int, checksum: int = -7, pause_s: float = 0.0) -> None:
    """`pause_s`: in the middle of the content."""
    offset, content = region.slot_offset(slot), content_of(digest_of(number))
    region.invalidate(slot)
    for first in range(0, BLOCK_BYTES, BLOCK_BYTES // 2):
        time.sleep(pause_s)
        region.memory[offset + first : offset + first + BLOCK_BYTES // 2] = content[first:][: BLOCK_BYTES // 2]
    region.publish(slot, Entry(digest_of(number), checksum))


def read(region: TierRegion, slot: int) -> bytes:
    return region.memory[region.slot_offset(slot) :][:BLOCK_BYTES]


def test_what_was_published_is_found_again_in_the_order_of_its_last_use(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    region = open_region(path)
    assert (region.num_slots, region.slots) == (NUM_SLOTS, {})
    for slot, number in ((0, 10), (1, 11), (2, 12), (0, 13)):
        write(region, slot, number, checksum=number - 2**63)
    region.invalidate(1)
    region.close()
    region = open_region(path)
    assert region.slots == {digest_of(12): 2, digest_of(13): 0}
    assert [*region.slots] == [digest_of(12), digest_of(13)]
    assert region.entry(0) == Entry(digest_of(13), 13 - 2**63) and region.entry(1) is None
    assert read(region, 2) == content_of(digest_of(12))
    assert region.num_corrupt_entries == 0
    region.close()


def test_a_region_is_no_larger_than_it_may_be_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    for num_bytes in (NUM_BYTES, NUM_BYTES + BLOCK_BYTES - 1, 1_000_000):
        region = open_region(path, num_bytes=num_bytes)
        status = path.stat()
        assert num_bytes - BLOCK_BYTES - 4096 < status.st_size <= num_bytes
        assert status.st_blocks * 512 >= status.st_size, "all its space is taken"
        assert status.st_mode & 0o777 == 0o600
        region.close()
    with pytest.raises(ConfigError, match=rf"host_kv_bytes is 8000, room for one block takes {8192 + BLOCK_BYTES}"):
        open_region(path, num_bytes=8000)


def test_shared_memory_without_a_path_ends_with_its_process() -> None:
    region = open_region(None)
    write(region, 3, 1)
    assert region.entry(3) is not None
    region.close()
    region = open_region(None)
    assert region.slots == {}
    region.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"identity": IDENTITY | {"model": "other"}}, "model was abc, is other"),
        ({"identity": IDENTITY | {"dtype": "int8"}}, "dtype was float32, is int8"),
        ({"block_bytes": 256}, "num_slots was 5, is 6; slot_bytes was 320, is 256"),
        ({"num_bytes": NUM_BYTES - BLOCK_BYTES}, "num_slots was 5, is 4"),
    ],
)
def test_a_region_of_something_else_is_made_anew(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = tmp_path / "kv"
    region = open_region(path)
    write(region, 0, 1)
    region.close()
    with capture_logs() as logs:
        region = open_region(path, **changes)
    assert region.slots == {} and all(region.entry(slot) is None for slot in range(region.num_slots))
    [line] = logs
    assert (line["event"], line["path"]) == ("the host tier is made anew", str(path))
    assert sorted(line["reason"].split("; ")) == sorted(reason.split("; "))
    write(region, 0, 2)
    region.close()
    region = open_region(path, **changes)
    assert region.slots == {digest_of(2): 0}
    region.close()


def test_a_region_of_another_version_of_the_layout_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    region = open_region(path)
    write(region, 0, 1)
    region.close()
    monkeypatch.setattr("services.attn_worker.cache.tiers.region._VERSION", 2)
    with capture_logs() as logs:
        region = open_region(path)
    assert region.slots == {} and logs[0]["reason"] == "its layout is version 1, this is version 2"
    region.close()


def test_a_region_keeps_the_generation_of_prefixes_and_believes_no_other(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    for generation in (0, 1, 2**64 - 1):
        region = open_region(path)
        region.keep_generation(generation)
        write(region, 0, 1)
        region.close()
        region = open_region(path)
        assert region.generation == generation and region.slots == {digest_of(1): 0}
        region.close()
    generation_at = 4096 - 8 - 8 - 16  # before the header's checksum and the mark at its end
    with path.open("r+b") as file:
        file.seek(generation_at)
        file.write(b"\1")
    with capture_logs() as logs:
        region = open_region(path)
    assert (region.generation, region.slots) == (0, {})
    assert logs[0]["reason"] == "its generation of prefixes is damaged"
    region.close()


def test_a_region_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    region = open_region(path)
    write(region, NUM_SLOTS - 1, 1)
    region.close()
    os.truncate(path, path.stat().st_size - 100)
    region = open_region(path)
    assert region.slots == {} and read(region, NUM_SLOTS - 1) is not None
    region.close()


def test_a_file_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("important" * 2000)
    with pytest.raises(ConfigError, match=r"thesis\.tex is not empty, and not a file of keys and values"):
        open_region(path)
    assert path.read_text() == "important" * 2000
    with pytest.raises(ConfigError, match="cannot be opened: No such file or directory"):
        open_region(tmp_path / "no directory" / "kv")


def test_two_workers_never_write_the_same_region(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    region = open_region(path)
    write(region, 0, 1)
    with pytest.raises(ConfigError, match=f"{path} has been locked by another attention worker for 0.2 s"):
        open_region(path)
    region.close()
    region = open_region(path)
    assert region.slots == {digest_of(1): 0}
    region.close()


def test_a_region_leaves_pinned_memory_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    open_region(path).close()
    with open(path, "r+b") as file:
        pinned = PinnedFile(mmap.mmap(file.fileno(), 0), os.fstat(file.fileno()))
    for number in range(2):  # the second time after an attempt to start that has failed
        region = open_region(path, pinned=pinned)
        assert region.is_pinned and len(region.slots) == number
        write(region, number, number)
        region.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_too_little_space_is_an_error_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(file: int, offset: int, num_bytes: int) -> None:
        os.pwrite(file, b"x" * 1000, 0)  # what there was room for
        raise OSError(number, os.strerror(number))

    path, allocate = tmp_path / "kv", os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(CapacityError, match=rf"needs {NUM_BYTES} bytes in {path}, \d+ are available"):
        open_region(path)
    assert path.stat().st_size == 0
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    open_region(path).close()


def test_a_file_with_all_its_space_is_opened_without_taking_it_again_and_one_with_holes_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, allocate, calls = tmp_path / "kv", os.posix_fallocate, []

    def count(*arguments: int) -> None:
        calls.append(arguments)
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", count)
    sizes = {"num_bytes": 1_000_000, "block_bytes": 100_000}
    open_region(path, **sizes).close()
    open_region(path, **sizes).close()
    assert len(calls) == 1
    size = path.stat().st_size
    os.truncate(path, 8192)
    os.truncate(path, size)
    open_region(path, **sizes).close()
    assert len(calls) == 2 and path.stat().st_blocks * 512 >= size


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_no_changed_entry_is_believed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any bytes of header and table change while nobody looks: entries that are valid afterwards are as they were."""
    path = tmp_path_factory.mktemp("region") / "kv"
    region = open_region(path)
    for slot in range(NUM_SLOTS - 1):
        write(region, slot, slot)
    before = [region.entry(slot) for slot in range(NUM_SLOTS)]
    region.close()
    used = st.integers(0, 200) | st.integers(4060, 4096 + 64 * NUM_SLOTS)  # where most bytes mean something
    for at in data.draw(st.lists(used, min_size=1, max_size=4)):
        with path.open("r+b") as file:
            file.seek(at)
            [byte] = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ data.draw(st.integers(1, 255))]))
    try:
        region = open_region(path)
    except ConfigError as error:  # both ends of the header have changed
        assert "not a file of keys and values" in str(error)
        return
    for slot in range(NUM_SLOTS):
        assert region.entry(slot) in (before[slot], None)
    assert all(before[slot] == Entry(digest, -7) for digest, slot in region.slots.items())
    region.close()


def test_a_killed_writer_leaves_no_half_block(tmp_path: Path) -> None:
    path, random = tmp_path / "kv", Random(0)
    num_found, newest = 0, -1
    for _ in range(examples(NUM_KILLS, 8)):
        pid = start_writer(path, newest + 1)
        time.sleep(random.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        region = open_region(path)
        for digest, slot in region.slots.items():
            assert read(region, slot) == content_of(digest)
            newest = max(newest, int.from_bytes(digest, "big"))
            num_found += 1
        assert len(region.slots) >= NUM_SLOTS - 1, "only the slot that was being written may be empty"
        region.close()
    assert num_found


def start_writer(path: Path, first: int) -> int:
    """A process that writes blocks from this number on until it is killed; returns when all slots have been written."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        return pid
    try:
        region = open_region(path)
        for number in count(first):
            write(region, number % NUM_SLOTS, number, pause_s=0.002)
            if number == first + NUM_SLOTS:
                os.write(writer, b"x")
    finally:
        os._exit(1)
