"""`PinnedFile`: the shared memory of a host tier, mapped and pinned by a standby while another process serves."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Self

import structlog
import torch

log = structlog.get_logger()


class PinnedFile:
    """To map and pin 16 GiB when streams wait would take seconds. Ends with the process."""

    def __init__(self, memory: mmap.mmap, status: os.stat_result) -> None:
        """Called by `open`."""
        self._memory = memory
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
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        [error] = runtime.cudaHostRegister(address, status.st_size, 0)
        if error != runtime.cudaError_t.cudaSuccess:
            runtime.cudaGetLastError()  # forgets it
            log.info("a standby cannot pin the host tier", path=str(path), error=error.name)
            return None
        return cls(memory, status)

    def memory_of(self, file: int) -> mmap.mmap | None:
        """The memory, if it is that of an open file as it is now."""
        status = os.fstat(file)
        is_same = os.path.samestat(status, self._status) and status.st_size == self._status.st_size
        return self._memory if is_same else None
