"""`CudaBlockCopier`: copies between a GPU and rows of pinned host memory, on a stream of their own.

The engine thread launches steps meanwhile. A copy from or to memory that is not pinned makes the driver keep a lock
until all copies before it have ended, and launches of other threads wait for that. So every copy here is of pinned
memory, also those of block ids and of checksums. And small copies of steps wait until a copy before them has ended, so
no copy is of many rows.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence

import structlog
import torch
from cuda.bindings import runtime

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.tiers.block_copier import (
    STAGING_BYTES,
    checksum_weights,
    checksums,
    copy_row,
    max_blocks,
)
from services.attn_worker.cache.tiers.triton_copies import copy_blocks

log = structlog.get_logger()

_NUM_STAGINGS = 2  # the host writes into one while the device works on the other
_GPU_STAGING_BYTES = 4 * STAGING_BYTES  # what a copy costs besides its bytes is Python and waits for its lock
_PIECE_BYTES = 16 * 2**20  # pinned at a time, in 0.5 to 8 ms: launches may wait for that
_COPY_BYTES = 8 * 2**20  # copied at a time, in 0.15 ms: small copies of steps may wait for that


class CudaBlockCopier:
    """A `BlockCopier` for blocks on a GPU."""

    rest_factor = 0.0

    def __init__(
        self,
        storage: BlockStorage,
        rows: torch.Tensor,
        device: torch.device,
        *,
        are_pinned: bool = False,
    ) -> None:
        """rows: int64 [num_rows, block_words], as `RowPins` wants them; `are_pinned`: all of them, already."""
        self.max_blocks = self.max_read = max_blocks(storage, _GPU_STAGING_BYTES)
        self._storage = storage
        self._device = device
        self._rows = rows
        self._pins = RowPins(rows, are_pinned=are_pinned)
        self._stream = torch.cuda.Stream(device, priority=-1)  # else its short kernels wait behind those of steps
        stagings = [_Staging(self.max_blocks, storage.block_words, device) for _ in range(_NUM_STAGINGS)]
        self._stagings = itertools.cycle(stagings)
        self._weights = checksum_weights(storage.block_words).to(device)

    @torch.inference_mode()
    def load_kernels(self) -> None:
        torch.cuda.set_device(self._device)  # for its thread, which would otherwise use the first GPU
        staging = self._take_staging()
        with torch.cuda.stream(self._stream):
            null_block = staging.put_ids([len(self._storage.layers[0]) - 1])  # nobody needs what it holds
            for to_rows in (True, False):
                self._copy_blocks(null_block, staging.on_device[:1], to_rows=to_rows)

    def pin_ahead(self) -> bool:
        return self._pins.pin_ahead()

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int], rows: Sequence[int]) -> list[int]:
        staging, num_blocks = self._take_staging(), len(block_ids)
        copies = list(self._copies(rows))
        with torch.cuda.stream(self._stream):
            sums = self._copy_blocks(staging.put_ids(block_ids), staging.on_device[:num_blocks], to_rows=True)
            for at, own, is_pinned in copies:
                place = self._rows[own] if is_pinned else staging.on_host[at]
                place.copy_(staging.on_device[at], non_blocking=True)
            staging.sums_on_host[:num_blocks].copy_(sums, non_blocking=True)
            staging.is_done.record()
        staging.is_done.synchronize()
        for at, own, is_pinned in copies:
            if not is_pinned:
                copy_row(self._rows[own], staging.on_host[at])
        return staging.sums_on_host[:num_blocks].tolist()

    @torch.inference_mode()
    def write(self, block_ids: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        staging, num_blocks = self._take_staging(), len(block_ids)
        places = list[tuple[slice, torch.Tensor]]()
        for at, own, is_pinned in self._copies(rows):
            if not is_pinned:
                copy_row(staging.on_host[at], self._rows[own])
            places.append((at, self._rows[own] if is_pinned else staging.on_host[at]))
        with torch.cuda.stream(self._stream):
            for at, place in places:
                staging.on_device[at].copy_(place, non_blocking=True)
            sums = self._copy_blocks(staging.put_ids(block_ids), staging.on_device[:num_blocks], to_rows=False)
            staging.is_done.record()
        return sums

    @torch.inference_mode()
    def finish(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        with torch.cuda.stream(self._stream):
            sums = torch.cat(list(checksums))
            on_host = torch.empty(sums.shape, dtype=torch.int64, pin_memory=True).copy_(sums, non_blocking=True)
            is_done = torch.cuda.Event(blocking=True)
            is_done.record()
        is_done.synchronize()
        return on_host.tolist()

    def wait_for(self, fence: torch.cuda.Event | None) -> None:
        if fence is not None:
            self._stream.wait_event(fence)

    def close(self) -> None:
        try:
            self._stream.synchronize()
        finally:
            self._pins.close()
            del self._rows

    def _copies(self, rows: Sequence[int]) -> Iterator[tuple[slice, slice, bool]]:
        """What is copied at a time, of a staging and of the rows, and whether these are pinned.

        Rows that lie behind each other are one copy, up to a size that copies of steps can wait for.
        """
        first, most = 0, max(1, _COPY_BYTES // (8 * self._rows.shape[1])) if self._rows.is_contiguous() else 1
        for index, row in enumerate(rows):
            end, following = index + 1, row + 1
            if end < min(len(rows), first + most) and rows[end] == following and self._pins.share_piece(row, following):
                continue
            own = slice(rows[first], following)
            yield slice(first, end), own, self._pins.pin(row)
            first = end

    def _take_staging(self) -> _Staging:
        staging = next(self._stagings)
        staging.is_done.synchronize()
        return staging

    def _copy_blocks(self, block_ids: torch.Tensor, rows: torch.Tensor, *, to_rows: bool) -> torch.Tensor:
        """Copies between blocks and rows, int64 [num_blocks, block_words], and returns the checksums of the rows."""
        parts = list(self._storage.parts(rows))
        if any(blocks.dtype != torch.int64 for _, blocks in parts):
            copy = self._storage.gather_blocks if to_rows else self._storage.scatter_blocks
            copy(block_ids, rows)
            return checksums(rows, self._weights)
        sums = torch.zeros(len(block_ids), dtype=torch.int64, device=self._device)
        first = 0
        for part, blocks in parts:
            weights = self._weights[first : first + part[0].numel()]
            copy_blocks(blocks, block_ids, part, weights, sums, to_rows=to_rows)
            first += part[0].numel()
        return sums


class _Staging:
    """Room for the blocks of one copy on the device, and in pinned memory for rows that cannot be pinned."""

    def __init__(self, max_blocks: int, block_words: int, device: torch.device) -> None:
        size = (max_blocks, block_words)
        self.on_host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self.on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self.sums_on_host = torch.zeros(max_blocks, dtype=torch.int64, pin_memory=True)
        self.is_done = torch.cuda.Event(blocking=True)  # the device needs nothing of this any more
        self._ids_on_host = torch.zeros(max_blocks, dtype=torch.int64, pin_memory=True)
        self._ids_on_device = torch.zeros(max_blocks, dtype=torch.int64, device=device)

    def put_ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Copies them to the device, in order with the current stream: int64 [num_blocks]."""
        ids = self._ids_on_device[: len(block_ids)]
        self._ids_on_host[: len(block_ids)] = torch.tensor(block_ids, dtype=torch.int64)
        return ids.copy_(self._ids_on_host[: len(block_ids)], non_blocking=True)


class RowPins:
    """Pins rows of host memory when they are first used. For one thread.

    Pins pieces of whole rows and whole pages, because a copy must lie within one piece.
    """

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
        self._num_ahead = 0  # the first ones, which have been tried
        self._can_pin = True

    def share_piece(self, row: int, other: int) -> bool:
        """Whether two rows can be copied at once."""
        return self._are_pinned or row // self._piece_rows == other // self._piece_rows

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

    def pin_ahead(self) -> bool:
        """Pins the next piece that is not; False: all are pinned, or none can be."""
        first = self._num_ahead * self._piece_rows
        if self._are_pinned or not self._can_pin or first >= self._num_rows:
            return False
        self._num_ahead += 1
        if self.pin(first) and self._num_ahead * self._piece_rows >= self._num_rows:
            log.info("the host tier's memory is pinned", bytes=self._num_rows * self._row_bytes)
        return True

    def close(self) -> None:
        """Unpins the rows that it has pinned. No copy of them may be under way."""
        for piece in self._pieces:
            runtime.cudaHostUnregister(self._address + piece * self._piece_rows * self._row_bytes)
        self._pieces.clear()
