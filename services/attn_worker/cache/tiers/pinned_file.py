"""`PinnedFile`: the shared memory of a host tier, mapped and pinned by a standby while another process serves."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Self

import structlog
import torch

log = structlog.get_logger()


class PinnedFile:
    """To map and pin 16 GiB when streams wait would take seconds. Ends with the process, or with the file."""

    def __init__(self, memory: mmap.mmap, status: os.stat_result) -> None:
        """Called by `open`."""
        self._memory: mmap.mmap | None = memory  # None: given up
        self._status = status

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """None: there is no such file yet, or it cannot be pinned, as one on a disk."""
        from cuda.bindings import runtime  # where there is a GPU

        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(file)
            if status.st_size == 0:
                return None
            memory = mmap.mmap(file, status.st_size)
        finally:
            os.close(file)  # the mapping keeps it
        [error] = runtime.cudaHostRegister(_address_of(memory), status.st_size, 0)
        if error != runtime.cudaError_t.cudaSuccess:
            runtime.cudaGetLastError()  # forgets it
            log.info("a standby cannot pin the host tier", path=str(path), error=error.name)
            return None
        return cls(memory, status)

    def memory_of(self, file: int) -> mmap.mmap | None:
        """The memory, if it is that of an open file as it is now. Otherwise that file was replaced: this is given up.

        Nobody may use the memory any longer when its file is replaced.
        """
        status = os.fstat(file)
        if os.path.samestat(status, self._status) and status.st_size == self._status.st_size:
            return self._memory
        if self._memory is not None:
            self._unpin(self._memory)
            self._memory = None
        return None

    def _unpin(self, memory: mmap.mmap) -> None:
        from cuda.bindings import runtime

        log.info("the host tier's file was replaced, so its pinned memory is given back", bytes=len(memory))
        [error] = runtime.cudaHostUnregister(_address_of(memory))
        if error != runtime.cudaError_t.cudaSuccess:
            runtime.cudaGetLastError()  # forgets it
            log.warning("the pinned memory of a replaced host tier stays with this process", error=error.name)
            return
        with contextlib.suppress(BufferError):  # a tensor over the memory still exists: the mapping ends with it
            memory.close()


def _address_of(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
