"""`TierRegion`: slots for blocks of keys and values in a mapped file, which outlives the process that writes it.

    header (a page) · table, one entry for each slot · slots

An entry names what its slot holds by the digest of the prefix cache, with a checksum of the content and one of itself.
Whoever writes a slot makes its entry invalid, writes the content, and then publishes the entry. So a process may be
killed at any time, and half a block is never believed. What other software has changed is found by the checksums.
The header also has the generation of prefixes, with a checksum of its own: what was flushed stays out of reach.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Self

import structlog
import torch

from services.attn_worker.cache.tiers.pinned_file import PinnedFile
from services.channel import align_up
from services.channel.region import SHM_DIR
from services.common.errors import CapacityError, ConfigError

log = structlog.get_logger()

_MAGIC = b"TWOSTKV\n"  # at both ends of the header, so that one flipped byte does not make the file a stranger's
_VERSION = 1  # of this layout
_PAGE_BYTES = 4096
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, length of the identity, bytes of a slot, number of slots
_CHECK_BYTES = 8
_CHECK_AT = _PAGE_BYTES - len(_MAGIC) - _CHECK_BYTES
_GENERATION = struct.Struct("<Q8s")  # and its checksum; zeros: none has been kept, it is 0
_GENERATION_AT = _CHECK_AT - _GENERATION.size  # the header's checksum counts zeros here
_CONTENT = struct.Struct("<16sqQ")  # digest, checksum of the slot, number of its last use
_ENTRY_BYTES = 64
_SLOT_ALIGNMENT = 64
_LOCK_POLL_S = 0.05


class Entry(NamedTuple):
    """What a slot holds."""

    digest: bytes  # 16 bytes
    checksum: int  # of the content, signed, 64 bits


class TierRegion:
    """For one process at a time, which holds a lock on the file. `slots`: of the digests that were found, in the order
    of their last use; the writer keeps its own list from then on.

    The mapping, `memory`, holds slot i at `slot_offset(i)`; its owner writes it between `invalidate` and `publish`.
    """

    def __init__(self, file: int, where: str, num_slots: int, block_bytes: int, pinned: mmap.mmap | None) -> None:
        """Called by `open`, which says what the parameters are."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.slot_bytes = _slot_bytes(block_bytes)
        self.slots: dict[bytes, int] = {}
        self.num_corrupt_entries = 0
        self.where = where
        self._file = file
        self._data_at = _data_offset(num_slots)
        self.generation = 0  # of prefixes: the highest that has been kept
        self.num_bytes = self._data_at + num_slots * self.slot_bytes
        self.is_pinned = pinned is not None
        self.memory = pinned or mmap.mmap(file, self.num_bytes)
        with contextlib.suppress(OSError):  # where the kernel gives shared memory huge pages, they are pinned sooner
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self._num_uses = 0

    @classmethod
    def open(
        cls,
        path: Path | None,
        num_bytes: int,
        block_bytes: int,
        identity: Mapping[str, str | int],
        pinned: PinnedFile | None = None,
        lock_timeout_s: float = 10.0,
    ) -> Self:
        """Opens or makes a region of at most `num_bytes` for blocks of `block_bytes`.

        path: of the file; None: shared memory that ends with this process. identity: of what the bytes of a block
        mean. A file of another identity, size or layout is made anew. Raises ConfigError if `num_bytes` has room for no
        block, if another process has locked the file for `lock_timeout_s`, or if it is not such a file; CapacityError
        if there is too little space.
        """
        slot_bytes = _slot_bytes(block_bytes)
        num_slots = _most_slots(num_bytes, slot_bytes)
        if num_slots < 1:
            needed = _data_offset(1) + slot_bytes
            raise ConfigError(f"attention.host_kv_bytes is {num_bytes}, room for one block takes {needed}")
        header = _make_header(slot_bytes, num_slots, identity)
        where = str(path or SHM_DIR)
        file = _open_file(path)
        try:
            _lock(file, where, lock_timeout_s)
            change = _find_change(file, where, header)
            _allocate(file, where, _data_offset(num_slots) + num_slots * slot_bytes)
            region = cls(file, where, num_slots, block_bytes, pinned and pinned.memory_of(file))
        except BaseException:
            os.close(file)
            raise
        if change is None:
            region.generation, _ = _read_generation(region.memory[:_PAGE_BYTES])
            region._read_entries()
        else:
            region._make_anew(header)
            if change:
                log.warning("the host tier is made anew", path=where, reason=change)
        return region

    def rows(self) -> torch.Tensor:
        """The content of all slots: int64 [num_slots, words of a block]. Shares the memory, which outlives it."""
        row_words = self.slot_bytes // 8
        words = torch.frombuffer(
            self.memory, dtype=torch.int64, count=self.num_slots * row_words, offset=self.slot_offset(0)
        )
        return words.view(self.num_slots, row_words)[:, : self.block_bytes // 8]

    def slot_offset(self, slot: int) -> int:
        """Where a slot begins in `memory`; a multiple of 64."""
        return self._data_at + slot * self.slot_bytes

    def entry(self, slot: int) -> Entry | None:
        """The entry of a slot; None: it is not valid."""
        content, is_valid = self._read_entry(slot)
        return Entry(*_CONTENT.unpack(content)[:2]) if is_valid else None

    def invalidate(self, slot: int) -> None:
        """Makes a slot empty, before its content changes."""
        self.memory[_entry_offset(slot) : _entry_offset(slot) + _ENTRY_BYTES] = bytes(_ENTRY_BYTES)

    def publish(self, slot: int, entry: Entry) -> None:
        """Says what a slot holds, which is its last use from now on. The content must be there."""
        self._num_uses += 1
        content = _CONTENT.pack(*entry, self._num_uses)
        offset = _entry_offset(slot)
        self.memory[offset : offset + _CONTENT.size + _CHECK_BYTES] = content + _check(slot, content)

    def keep_generation(self, generation: int) -> None:
        """Keeps the generation of prefixes, before the first block of it is published."""
        self.generation = generation
        self.memory[_GENERATION_AT:_CHECK_AT] = _GENERATION.pack(generation, _check_generation(generation))

    def close(self) -> None:
        """Gives up the lock, and unmaps the file if this has mapped it: pinned memory stays with its `PinnedFile`.

        Tensors over `memory` must not be used afterwards.
        """
        os.close(self._file)
        if self.is_pinned:
            return
        with contextlib.suppress(BufferError):  # a tensor over the memory still exists: the mapping ends with it
            self.memory.close()

    def _make_anew(self, header: bytes) -> None:
        self.memory[:_PAGE_BYTES] = bytes(_PAGE_BYTES)  # until the table is empty
        self.memory[_PAGE_BYTES : self._data_at] = bytes(self._data_at - _PAGE_BYTES)
        self.memory[:_PAGE_BYTES] = header

    def _read_entries(self) -> None:
        found = []
        for slot in range(self.num_slots):
            content, is_valid = self._read_entry(slot)
            if is_valid:
                digest, _, num_uses = _CONTENT.unpack(content)
                found.append((num_uses, digest, slot))
            elif any(content):  # changed by other software, or its writer was killed
                self.num_corrupt_entries += 1
                self.invalidate(slot)
        for num_uses, digest, slot in sorted(found):
            self.slots.pop(digest, None)  # of two slots with the same content the later one counts
            self.slots[digest] = slot
            self._num_uses = num_uses

    def _read_entry(self, slot: int) -> tuple[bytes, bool]:
        """The content of an entry, and whether it is valid."""
        offset = _entry_offset(slot)
        content = self.memory[offset : offset + _CONTENT.size]
        check = self.memory[offset + _CONTENT.size : offset + _CONTENT.size + _CHECK_BYTES]
        return content, check == _check(slot, content)


def _slot_bytes(block_bytes: int) -> int:
    return align_up(block_bytes, _SLOT_ALIGNMENT)


def _most_slots(num_bytes: int, slot_bytes: int) -> int:
    num_slots = max(0, num_bytes - _PAGE_BYTES) // (slot_bytes + _ENTRY_BYTES)
    while num_slots and _data_offset(num_slots) + num_slots * slot_bytes > num_bytes:
        num_slots -= 1
    return num_slots


def _entry_offset(slot: int) -> int:
    return _PAGE_BYTES + slot * _ENTRY_BYTES


def _data_offset(num_slots: int) -> int:
    return align_up(_entry_offset(num_slots), _PAGE_BYTES)


def _check(slot: int, content: bytes) -> bytes:
    """The checksum of an entry. It is of one slot, so that a copy of the entry of another slot is not valid."""
    return blake2b(slot.to_bytes(8, "little") + content, digest_size=_CHECK_BYTES).digest()


def _make_header(slot_bytes: int, num_slots: int, identity: Mapping[str, str | int]) -> bytes:
    text = json.dumps(identity, sort_keys=True).encode()
    start = _HEADER.pack(_MAGIC, _VERSION, len(text), slot_bytes, num_slots) + text
    assert len(start) <= _GENERATION_AT, "an identity is short"
    body = start.ljust(_CHECK_AT, b"\0")
    return body + blake2b(body, digest_size=_CHECK_BYTES).digest() + _MAGIC


def _check_generation(generation: int) -> bytes:
    return blake2b(b"generation" + generation.to_bytes(8, "little"), digest_size=_CHECK_BYTES).digest()


def _read_generation(header: bytes) -> tuple[int, bool]:
    """The generation of prefixes, and whether it is valid."""
    generation, check = _GENERATION.unpack_from(header, _GENERATION_AT)
    is_kept = any(header[_GENERATION_AT:_CHECK_AT])
    return generation, not is_kept or check == _check_generation(generation)


def _find_change(file: int, where: str, header: bytes) -> str | None:
    """Why the region must be made anew: "" if the file is new; None: it need not, for it is as `header` says.

    Raises ConfigError for a file that is none of ours, which must not be overwritten.
    """
    found = os.pread(file, _PAGE_BYTES, 0)
    if not any(found):
        return ""
    if _MAGIC not in (found[: len(_MAGIC)], found[-len(_MAGIC) :]):
        raise ConfigError(f"attention.host_kv_path {where} is not empty, and not a file of keys and values")
    if not _read_generation(found)[1]:
        return "its generation of prefixes is damaged"
    found = found[:_GENERATION_AT] + bytes(_GENERATION.size) + found[_CHECK_AT:]
    _, slot_bytes, num_slots, wanted = _read_header(header)
    if found == header and os.fstat(file).st_size == _data_offset(num_slots) + num_slots * slot_bytes:
        return None
    body = found[:_CHECK_AT]
    if found[_CHECK_AT : _CHECK_AT + _CHECK_BYTES] != blake2b(body, digest_size=_CHECK_BYTES).digest():
        return "its header is damaged"
    version, found_slot_bytes, found_num_slots, identity = _read_header(found)
    if version != _VERSION:
        return f"its layout is version {version}, this is version {_VERSION}"
    sizes = {"slot_bytes": (found_slot_bytes, slot_bytes), "num_slots": (found_num_slots, num_slots)}
    pairs = {key: (identity.get(key), wanted.get(key)) for key in sorted({*identity, *wanted})} | sizes
    changed = [f"{key} was {before}, is {now}" for key, (before, now) in pairs.items() if before != now]
    return "; ".join(changed) or "its size is not what its header says"


def _read_header(header: bytes) -> tuple[int, int, int, dict[str, str | int]]:
    _, version, length, slot_bytes, num_slots = _HEADER.unpack_from(header)
    text = header[_HEADER.size : _HEADER.size + length] if version == _VERSION else b"{}"
    return version, slot_bytes, num_slots, json.loads(text)


def _open_file(path: Path | None) -> int:
    try:
        if path is None:
            return os.open(SHM_DIR, os.O_RDWR | os.O_TMPFILE, 0o600)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"attention.host_kv_path {path or SHM_DIR} cannot be opened: {error.strerror}") from error


def _lock(file: int, where: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"attention.host_kv_path {where} has been locked by another attention worker for {timeout_s:g} s;"
                    " each needs a file of its own"
                ) from error
        time.sleep(_LOCK_POLL_S)


def _allocate(file: int, where: str, num_bytes: int) -> None:
    """Gives the file its size and all its space now: a store to a page without space would end the process."""
    status = os.fstat(file)
    size = status.st_size
    if size == num_bytes and status.st_blocks * 512 >= num_bytes:
        return  # it has all; to ask again takes as long as the first time, while streams wait
    try:
        if size > num_bytes:
            os.truncate(file, num_bytes)
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        os.truncate(file, min(size, num_bytes))  # gives back what this has taken
        status, space = os.fstat(file), os.fstatvfs(file)
        available = space.f_bavail * space.f_frsize + status.st_blocks * 512
        raise CapacityError(
            f"the host tier needs {num_bytes} bytes in {where}, {available} are available ({error.strerror}):"
            " lower attention.host_kv_bytes"
        ) from error
