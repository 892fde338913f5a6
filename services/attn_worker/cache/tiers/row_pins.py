"""`RowPins`: pins rows of host memory for a GPU when they are first used."""

from __future__ import annotations

import math
import mmap

import structlog
import torch
from cuda.bindings import runtime

log = structlog.get_logger()

_PIECE_BYTES = 16 * 2**20  # pinned at a time, in about half a millisecond: launches may wait for that


class RowPins:
    """For one thread. Pins pieces of whole rows and whole pages, because a copy must lie within one piece."""

    def __init__(self, rows: torch.Tensor, *, are_pinned: bool) -> None:
        """rows: [num_rows, ...]; the first one begins with a page, and the last page is that of no other rows.

        are_pinned: all of them, already.
        """
        self._are_pinned = are_pinned
        self._row_bytes = rows.stride(0) * rows.itemsize
        self._num_rows = len(rows)
        self._address = rows.data_ptr()
        rows_of_pages = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, self._row_bytes)
        self._piece_rows = rows_of_pages * max(1, _PIECE_BYTES // (rows_of_pages * self._row_bytes))
        self._pieces = set[int]()  # that are pinned
        self._can_pin = True

    def pin(self, row: int) -> bool:
        """Whether a row is pinned now. After one that cannot be, as in a file on a disk, no other is tried."""
        piece = row // self._piece_rows
        if self._are_pinned or piece in self._pieces:
            return True
        if not self._can_pin:
            return False
        first = piece * self._piece_rows
        num_bytes = min(self._piece_rows, self._num_rows - first) * self._row_bytes
        [error] = runtime.cudaHostRegister(self._address + first * self._row_bytes, num_bytes, 0)
        if error != runtime.cudaError_t.cudaSuccess:
            runtime.cudaGetLastError()  # forgets it
            self._can_pin = False
            log.warning("the host tier's memory cannot be pinned, so copies take longer", error=error.name)
            return False
        self._pieces.add(piece)
        return True

    def close(self) -> None:
        """Unpins the rows that it has pinned. No copy of them may be under way."""
        for piece in self._pieces:
            runtime.cudaHostUnregister(self._address + piece * self._piece_rows * self._row_bytes)
        self._pieces.clear()
