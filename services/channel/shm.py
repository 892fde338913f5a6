"""`ShmChannel`: the seam in POSIX shared memory, for two processes on one CPU host.

Ordering: one thread writes the data and then the flag. x86-64 keeps stores in order; on other CPUs the system calls
around an engine's step do.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Self

import torch

from services.channel import ChannelAborted, ChannelSpec, ChannelTimeout, Flag, align_up
from services.channel.region import HEADER_BYTES, RegionChannel, SharedRegion, flag_word

# A wait first spins for about as long as a layer of a small model takes, then yields the core, then sleeps. It sleeps
# at once after a long yield: another process needs the core, and who wakes gets it back sooner than who yields.
SPIN_S = 20e-6
YIELD_S = 1e-3
_LONG_YIELD_S = 0.5e-3
NAP_S = 50e-6
_LOOK_S = 2e-3  # between two looks at a peer that is waited for
_WORDS = tuple(map(flag_word, Flag))  # by flag


class ShmChannel(RegionChannel):
    """A `Channel` in POSIX shared memory. The attention worker calls `create`, the dense worker `map`."""

    kind = "shm"

    def __init__(self, region: SharedRegion, spec: ChannelSpec, wait_timeout_s: float) -> None:
        super().__init__(region)
        self.wait_timeout_s = wait_timeout_s
        self.num_waits = 0
        self.waited_s = 0.0
        self.looks_for_owner = False  # of the other end: a wait ends as soon as the owner is being killed
        self.qkv = self._tensor(HEADER_BYTES, spec, spec.qkv_size)
        self.attn_out = self._tensor(_attn_out_offset(spec), spec, spec.attn_size)

    def _tensor(self, offset: int, spec: ChannelSpec, row_size: int) -> torch.Tensor:
        count = spec.max_tokens * row_size
        flat = torch.frombuffer(self._region.memory, dtype=spec.dtype, count=count, offset=offset)
        return flat.view(spec.max_tokens, row_size)

    @classmethod
    def create(cls, spec: ChannelSpec, epoch: int, attachment_id: int, lane: int, wait_timeout_s: float) -> Self:
        """Allocates a region; raises `CapacityError` when shared memory cannot hold it."""
        return cls(SharedRegion.create(_region_bytes(spec), epoch, attachment_id, lane), spec, wait_timeout_s)

    @classmethod
    def map(cls, handle: bytes, spec: ChannelSpec, epoch: int, attachment_id: int, wait_timeout_s: float) -> Self:
        """Maps the peer's region; raises `StaleEpoch` when its epoch or attachment is not the expected one."""
        region = SharedRegion.open(handle.decode(), _region_bytes(spec), epoch, attachment_id)
        return cls(region, spec, wait_timeout_s)

    def signal(self, flag: Flag) -> None:
        """Sets the flag. The peer has cleared it before, since both sides strictly alternate."""
        self._region.words[_WORDS[flag]] = 1

    def has_signal(self, flag: Flag) -> bool:
        """Whether `wait` would return at once. Raises `ChannelAborted` after an abort."""
        self.check()
        return bool(self._region.words[_WORDS[flag]])

    def wait(self, flag: Flag) -> None:
        """Blocks the calling thread until the flag is set, then clears it."""
        words, index = self._region.words, _WORDS[flag]
        start = time.perf_counter()
        waited, looked, yields = 0.0, 0.0, True
        self.is_waiting = True
        try:
            while not words[index]:
                self.check()
                before, waited = waited, time.perf_counter() - start
                if waited < SPIN_S:
                    continue
                yields = yields and waited - before < _LONG_YIELD_S
                if yields and waited < YIELD_S:
                    os.sched_yield()
                    continue
                if waited > self.wait_timeout_s:
                    raise ChannelTimeout(f"no {flag.name} from the peer within {self.wait_timeout_s} s")
                if self.looks_for_owner and waited - looked > _LOOK_S:
                    looked = waited
                    if self._region.is_owner_ending:
                        raise ChannelAborted("the peer is being killed")
                time.sleep(NAP_S)
            self.check()
        finally:
            self.is_waiting = False
        words[index] = 0
        self.num_waits += 1
        self.waited_s += time.perf_counter() - start

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        """The first rows of `attn_out` themselves: shared memory is as fast to read as any other."""
        return self.attn_out[:num_tokens]

    def abort(self) -> None:
        """Sets the abort mark, which waits on both sides poll."""
        self._region.abort()

    def close(self) -> None:
        """Drops the tensors and unmaps the region."""
        del self.qkv, self.attn_out
        self._region.close()


def _attn_out_offset(spec: ChannelSpec) -> int:
    return align_up(HEADER_BYTES + spec.qkv_bytes, mmap.PAGESIZE)


def _region_bytes(spec: ChannelSpec) -> int:
    return _attn_out_offset(spec) + align_up(spec.attn_out_bytes, mmap.PAGESIZE)
