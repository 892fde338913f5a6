"""`BlockReceiver`: copies blocks from the attention worker that a sequence leaves into this worker's KV cache.

A thread of its own reads the stream and writes to the blocks, beside the steps. What has not come in time, or not as it
was sent, is computed again; the blocks before that count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import structlog
import torch

from services.attn_worker.cache.tiers.tier import MissingBlock
from services.attn_worker.moved_blocks.staging import BlockStaging
from services.common.errors import DeviceError, PeerError
from services.pb import attn_pb2, attn_pb2_grpc

log = structlog.get_logger()

_START_S = 5.0  # for the other worker to answer
_SLOWEST_BYTES_PER_S = 50e6  # slower, computing again takes no longer
_CANCEL_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Load:
    address: str
    blocks: Sequence[MissingBlock]
    fence: torch.cuda.Event | None
    num_cancelled: int  # how often loads have been cancelled when it was asked for
    num_loaded: int = 0  # of its first blocks


class BlockReceiver:
    """Used by the engine thread. Blocks of one sequence are copied at a time."""

    def __init__(
        self,
        make_staging: Callable[[], BlockStaging],
        identity: str,
        open_peer: Callable[[str], grpc.Channel],
        longest_s: float,
    ) -> None:
        """`identity`: how the KV cache holds a block; `longest_s`: that a sequence may take."""
        self._make_staging = make_staging
        self._staging: BlockStaging | None = None
        self._identity = identity
        self._open_peer = open_peer
        self._longest_s = longest_s
        self._is_loading = threading.Lock()  # held while blocks are written
        self._num_cancelled = 0
        self._call: grpc.Future | None = None
        self._thread = ThreadPoolExecutor(1, "block-receiver")

    def supplier_at(self, address: str) -> PeerBlocks:
        """The blocks of the attention worker at an address."""
        return PeerBlocks(self, address)

    def load(
        self,
        address: str,
        blocks: Sequence[MissingBlock],
        fence: torch.cuda.Event | None,
        on_loaded: Callable[[int], None],
    ) -> None:
        """As `BlockSupplier.load`."""
        self._thread.submit(self._run, _Load(address, blocks, fence, self._num_cancelled), on_loaded)

    def cancel_loads(self) -> None:
        """When it returns, nothing is written any more, nor reported. Raises DeviceError if that takes too long."""
        self._num_cancelled += 1
        if (call := self._call) is not None:
            call.cancel()
        if not self._is_loading.acquire(timeout=_CANCEL_TIMEOUT_S):
            raise DeviceError(f"a copy of moved blocks has not ended within {_CANCEL_TIMEOUT_S:g} s")
        self._is_loading.release()

    def close(self) -> None:
        """Ends the thread after its current copy."""
        self.cancel_loads()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, load: _Load, on_loaded: Callable[[int], None]) -> None:
        begin_s, reason = time.monotonic(), "it has no more of them"
        with self._is_loading:
            try:
                self._load(load)
            except grpc.RpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except Exception as error:  # whatever it is, the sequence can be computed again
                reason = str(error) if isinstance(error, PeerError) else repr(error)
            self._call = None
            if load.num_cancelled != self._num_cancelled:
                return
            on_loaded(load.num_loaded)
        duration_ms = round(1000 * (time.monotonic() - begin_s))
        figures = {"address": load.address, "num_blocks": load.num_loaded, "duration_ms": duration_ms}
        if num_left := len(load.blocks) - load.num_loaded:
            log.warning("a sequence that moves is computed again", num_left=num_left, reason=reason, **figures)
        else:
            log.info("copied the blocks of a sequence that moves", **figures)

    def _load(self, load: _Load) -> None:
        """Writes the blocks as they come. Raises an error of gRPC, or `PeerError`."""
        if self._staging is None:
            self._staging = self._make_staging()
        staging, blocks, num_bytes = self._staging, load.blocks, 0
        staging.copier.wait_for(load.fence)
        request = attn_pb2.ReadBlocksRequest(
            identity=self._identity, digests=b"".join([digest for digest, _ in blocks])
        )
        timeout_s = min(self._longest_s, _START_S + len(blocks) * staging.block_bytes / _SLOWEST_BYTES_PER_S)
        with self._open_peer(load.address) as channel:
            call = self._call = attn_pb2_grpc.AttentionWorkerStub(channel).ReadBlocks(request, timeout=timeout_s)
            if load.num_cancelled != self._num_cancelled:
                call.cancel()
            for part in call:
                end = num_bytes + len(part.content)
                if end > len(staging.bytes):
                    raise PeerError(f"{end} bytes came without a checksum, {len(staging.bytes)} are possible")
                staging.bytes[num_bytes:end] = part.content
                num_bytes = end
                if part.checksums:
                    num_new = self._write(staging, blocks[load.num_loaded :], num_bytes, part.checksums)
                    load.num_loaded, num_bytes = load.num_loaded + num_new, 0
                    if num_new < len(part.checksums):
                        raise PeerError("the checksum of the next one is wrong")

    def _write(
        self, staging: BlockStaging, blocks: Sequence[MissingBlock], num_bytes: int, checksums: Sequence[int]
    ) -> int:
        """Writes what has come to the first of `blocks`; returns how many of them have arrived as they were sent."""
        count = len(checksums)
        if count > len(blocks) or num_bytes != count * staging.block_bytes:
            raise PeerError(f"{num_bytes} bytes and {count} checksums came for {len(blocks)} blocks")
        written = staging.copier.write([block_id for _, block_id in blocks[:count]], range(count))
        arrived = staging.copier.finish([written])
        return next((index for index in range(count) if arrived[index] != checksums[index]), count)


@dataclass(frozen=True, slots=True)
class PeerBlocks:
    """A `BlockSupplier`: the KV cache of another attention worker."""

    receiver: BlockReceiver
    address: str

    def has(self, digest: bytes) -> bool:
        """It is asked for all; what it lacks turns out when it sends the others."""
        return True

    def load(
        self, blocks: Sequence[MissingBlock], fence: torch.cuda.Event | None, on_loaded: Callable[[int], None]
    ) -> None:
        self.receiver.load(self.address, blocks, fence, on_loaded)
