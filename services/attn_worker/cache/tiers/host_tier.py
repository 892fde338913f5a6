"""`HostTier`: copies of blocks in a `TierRegion`, written and read by a thread of its own.

The engine thread asks what is here, offers blocks, and has blocks loaded; it never waits for a copy. The other thread
loads for one sequence, writes a few blocks, and so on. It looks for offered blocks only when their turn comes: those
that were evicted meanwhile are skipped, and a copy counts only if its block has not changed since.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog
import torch

from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.tiers.block_copier import BlockCopier
from services.attn_worker.cache.tiers.region import Entry, TierRegion
from services.attn_worker.cache.tiers.tier import MissingBlock, TierCounts
from services.common.errors import DeviceError

log = structlog.get_logger()

MAX_OFFERED = 16384  # blocks that may wait to be written
_CANCEL_TIMEOUT_S = 10.0
_IDLE_CHECK_S = 0.1  # between two looks whether anybody has blocks, until all memory is pinned


@dataclass(frozen=True, slots=True)
class _Load:
    blocks: Sequence[MissingBlock]
    fence: torch.cuda.Event | None
    on_loaded: Callable[[int], None]


class HostTier:
    """A `Tier`. When its region is full, the least recently used block is overwritten first."""

    def __init__(
        self, region: TierRegion, copier: BlockCopier, findable: BlockPool, *, keeps_loaded: bool = True
    ) -> None:
        """Owns region and copier from now on. Of `findable` it calls what may be called from any thread.

        `keeps_loaded`: a load is a use; otherwise what has been loaded is overwritten first.
        """
        self._keeps_loaded = keeps_loaded
        self.counts = TierCounts(region.num_bytes, region.num_slots)
        self._region = region
        self._copier = copier
        self._findable = findable
        # By digest, the least recently used first. Both threads use it, by single calls, which Python makes atomic.
        self._slots = OrderedDict(region.slots)
        used = set(region.slots.values())
        self._free_slots = [slot for slot in reversed(range(region.num_slots)) if slot not in used]
        self._offered: deque[bytes] = deque()
        self._loads: deque[_Load] = deque()
        self._is_loading = threading.Lock()  # held while a load runs
        self._is_cancelled = False
        self._has_work = threading.Event()
        self._has_load = threading.Event()  # or the thread shall end
        self._end_s: float | None = None  # when the thread ends at the latest, on the monotonic clock
        self._has_failed = False
        self.counts.num_corrupt_blocks = region.num_corrupt_entries
        self.counts.num_used_slots = len(self._slots)
        self._thread = threading.Thread(target=self._run, name="host-tier", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def generation(self) -> int:
        return self._region.generation

    def keep_generation(self, generation: int) -> None:
        self._region.keep_generation(generation)

    def has(self, digest: bytes) -> bool:
        return digest in self._slots and not self._has_failed

    def offer(self, digests: Iterable[bytes], *, is_urgent: bool = False) -> None:
        new = []
        for digest in digests:
            try:
                self._slots.move_to_end(digest)  # it is used
            except KeyError:
                new.append(digest)
        if self._has_failed or len(new) > MAX_OFFERED - len(self._offered):
            self.counts.num_skipped_blocks += len(new)
        elif new:
            if is_urgent:
                self._offered.extendleft(reversed(new))
            else:
                self._offered.extend(new)
            self._has_work.set()

    def load(
        self, blocks: Sequence[MissingBlock], fence: torch.cuda.Event | None, on_loaded: Callable[[int], None]
    ) -> None:
        self._loads.append(_Load(blocks, fence, on_loaded))
        self._has_load.set()
        self._has_work.set()
        if self._has_failed:  # since `has`
            self._give_up_loads()

    def cancel_loads(self) -> None:
        self._is_cancelled = True
        self._loads.clear()
        if not self._is_loading.acquire(timeout=_CANCEL_TIMEOUT_S):
            raise DeviceError(f"the host tier has not ended a copy within {_CANCEL_TIMEOUT_S:g} s")
        self._is_loading.release()
        self._is_cancelled = False

    def close(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s
        self._has_load.set()
        self._has_work.set()
        self._thread.join(timeout_s + _CANCEL_TIMEOUT_S)
        if self._thread.is_alive():
            return  # everything that it uses stays open
        try:
            self._copier.close()
        finally:
            self._region.close()  # also after an error of the device: the next worker waits for its lock

    # The thread

    def _run(self) -> None:
        try:
            self._copier.load_kernels()
            while self._end_s is None:
                has_pinned = self._pin_while_idle()
                if self._has_work.wait(None if has_pinned else _IDLE_CHECK_S):
                    self._has_work.clear()
                    self._work()
        except Exception:  # a bug, or a failed device: the worker goes on without the tier
            self._has_failed = True
            log.exception("the host tier has failed: blocks are computed again from now on", path=self._region.where)
            self._give_up_loads()

    def _give_up_loads(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._loads.popleft().on_loaded(0)

    def _pin_while_idle(self) -> bool:
        """Makes memory ready for copies while no sequence has blocks and there is nothing to copy; False: not all."""
        while not self._has_work.is_set() and self._findable.num_used_blocks == 0:
            if not self._copier.pin_ahead():
                return True
        return False

    def _work(self) -> None:
        while True:
            self._has_load.clear()
            if self._loads:
                self._load_next()
            is_over = self._end_s is not None and time.monotonic() > self._end_s
            if self._offered and not is_over:  # after each load, or blocks of sequences that leave would be gone
                start_s = time.monotonic()
                self._write(self._take_offered())
                if self._end_s is None and not self._loads:
                    self._has_load.wait((time.monotonic() - start_s) * self._copier.rest_factor)
            elif not self._loads:
                return

    def _take_offered(self) -> list[bytes]:
        """The next offered blocks that are not here yet."""
        most = min(self._copier.max_read, self._region.num_slots)
        taken = list[bytes]()
        while self._offered and len(taken) < most:
            digest = self._offered.popleft()
            if digest not in self._slots:  # another sequence may have offered it, too
                taken.append(digest)
        return taken

    def _write(self, digests: Iterable[bytes]) -> None:
        found = list[tuple[bytes, int, int]]()
        for digest in dict.fromkeys(digests):
            block_id = self._findable.lookup(digest)
            if block_id is None:
                self.counts.num_skipped_blocks += 1
            else:
                found.append((digest, block_id, self._findable.generation(block_id)))
        if not found:
            return
        slots = [self._take_slot() for _ in found]
        for slot in slots:
            self._region.invalidate(slot)
        checksums = self._copier.read([block_id for _, block_id, _ in found], slots)
        for (digest, block_id, generation), slot, checksum in zip(found, slots, checksums, strict=True):
            # In this order: a block that was findable by another digest between the first two calls has changed since.
            if self._findable.lookup(digest) != block_id or self._findable.generation(block_id) != generation:
                self.counts.num_skipped_blocks += 1
                self._free_slots.append(slot)
                continue
            self._region.publish(slot, Entry(digest, checksum))
            self._slots[digest] = slot
            self.counts.num_written_blocks += 1
        self.counts.num_used_slots = len(self._slots)

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        _, slot = self._slots.popitem(last=False)
        return slot

    def _load_next(self) -> None:
        with self._is_loading:
            try:
                load = self._loads.popleft()
            except IndexError:
                return  # cancelled
            try:
                loaded = self._load(load)
            except BaseException:
                load.on_loaded(0)
                raise
            if not self._is_cancelled:
                load.on_loaded(len(loaded))
            for entry in loaded:  # their last use, also for the next process
                self._slots.move_to_end(entry.digest, last=self._keeps_loaded)
                self._region.publish(self._slots[entry.digest], entry)

    def _load(self, load: _Load) -> list[Entry]:
        """Returns the entries of the first blocks, which are there now. No copy is under way afterwards."""
        self._copier.wait_for(load.fence)
        checksums = list[torch.Tensor]()
        try:
            expected = self._write_blocks(load, checksums)
        except BaseException:
            if checksums:
                self._copier.finish(checksums)  # blocks that are given back may be used for something else
            raise
        loaded = list[Entry]()
        for entry, checksum in zip(expected, self._copier.finish(checksums) if checksums else (), strict=True):
            if checksum != entry.checksum:
                self._forget_corrupt(entry.digest)
                break
            loaded.append(entry)
        self.counts.num_read_blocks += len(loaded)
        return loaded

    def _write_blocks(self, load: _Load, checksums: list[torch.Tensor]) -> list[Entry]:
        """Begins to copy the first blocks to the device, appends what `finish` needs, and returns their entries."""
        expected = list[Entry]()
        for first in range(0, len(load.blocks), self._copier.max_blocks):
            if self._is_cancelled:
                break
            blocks = load.blocks[first : first + self._copier.max_blocks]
            entries = self._find_entries(digest for digest, _ in blocks)
            if entries:
                block_ids = [block_id for _, block_id in blocks[: len(entries)]]
                checksums.append(self._copier.write(block_ids, [self._slots[entry.digest] for entry in entries]))
                expected += entries
            if len(entries) < len(blocks):
                break
        return expected

    def _find_entries(self, digests: Iterable[bytes]) -> list[Entry]:
        """The entries of the first blocks that are here, up to one that is not."""
        entries = list[Entry]()
        for digest in digests:
            slot = self._slots.get(digest)
            if slot is None:
                break
            entry = self._region.entry(slot)
            if entry is None or entry.digest != digest:
                self._forget_corrupt(digest)
                break
            entries.append(entry)
        return entries

    def _forget_corrupt(self, digest: bytes) -> None:
        slot = self._slots.pop(digest)
        self._region.invalidate(slot)
        self._free_slots.append(slot)
        self.counts.num_corrupt_blocks += 1
        self.counts.num_used_slots = len(self._slots)
        log.error("a block in the host tier is corrupt and is computed again", path=self._region.where, slot=slot)
