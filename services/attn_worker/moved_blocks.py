"""`MovedBlocks`: blocks of a sequence that moves. The attention worker that it leaves sends them, the other one
receives them; each has both sides.

Each side has a thread of its own, beside the steps, which go on. The blocks of a sequence that has left stay findable
until others need the room, so nobody holds them: a copy counts only if its block has not changed since. What has not
come in time, or not as it was sent, is computed again; the blocks before that count.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import grpc
import structlog
import torch

from services.attn_worker.cache.block_pool import DIGEST_SIZE_BYTES, BlockPool
from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.tiers.block_copier import CpuBlockCopier, max_blocks
from services.attn_worker.cache.tiers.tier import MissingBlock
from services.common.errors import DeviceError, InvalidRequest, PeerError
from services.pb import attn_pb2, attn_pb2_grpc

log = structlog.get_logger()

STAGING_BYTES = 4 * 2**20  # or those of one block
PART_BYTES = 2**18  # of a message, which the event loop handles in about 0.1 ms
_START_S = 5.0  # for the other worker to answer
_SLOWEST_BYTES_PER_S = 50e6  # slower, computing again takes no longer
_CANCEL_TIMEOUT_S = 10.0


class MovedBlocks:
    """Of a KV cache on a CPU that keeps nothing of a sequence but full blocks, and finds them by their digests.

    On a GPU a sequence that moves is computed again: that takes a tenth of the time or less.
    """

    def __init__(
        self,
        storage: BlockStorage,
        findable: BlockPool,
        identity: str,
        open_peer: Callable[[str], grpc.Channel],
        longest_s: float,
    ) -> None:
        """`identity`: how the cache holds a block; `open_peer`: a channel to another attention worker.

        Copying one sequence may take `longest_s`.
        """
        make_staging = partial(BlockStaging, storage)
        self._identity = identity
        self.sender = BlockSender(make_staging, findable, longest_s)
        self.receiver = BlockReceiver(make_staging, identity, open_peer, longest_s)

    def digests_of(self, identity: str, digests: bytes) -> Sequence[bytes]:
        """The digests of a request. Raises `InvalidRequest` for other blocks, and for parts of a digest."""
        if identity != self._identity:
            raise InvalidRequest(f"blocks are {self._identity}, and {identity} are wanted: start all workers alike")
        if len(digests) % DIGEST_SIZE_BYTES:
            raise InvalidRequest(f"digests have {DIGEST_SIZE_BYTES} bytes each, {len(digests)} came")
        return [digests[first : first + DIGEST_SIZE_BYTES] for first in range(0, len(digests), DIGEST_SIZE_BYTES)]

    def close(self) -> None:
        """Ends both threads."""
        self.sender.close()
        self.receiver.close()


class BlockStaging:
    """Room in memory for a few blocks on their way, and the copier between it and the KV cache.

    For one thread, which makes it when the first sequence moves, since most workers never move any.
    """

    def __init__(self, storage: BlockStorage, staging_bytes: int = STAGING_BYTES) -> None:
        self.num_blocks = max_blocks(storage, staging_bytes)
        self.block_bytes = 8 * storage.block_words
        rows = torch.zeros(self.num_blocks, storage.block_words, dtype=torch.int64)
        self.bytes = memoryview(rows.numpy()).cast("B")  # of the blocks, one after the other
        self.copier = CpuBlockCopier(storage, rows, staging_bytes)


class BlockSender:
    """Sends blocks of this worker's KV cache to another attention worker, a few at a time.

    For the event loop. Calls are served one after the other.
    """

    def __init__(self, make_staging: Callable[[], BlockStaging], findable: BlockPool, longest_s: float) -> None:
        """`longest_s`: that a call may take, also to wait for its turn."""
        self._make_staging = make_staging
        self._staging: BlockStaging | None = None
        self._findable = findable
        self._longest_s = longest_s
        self._is_sending = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "block-sender")

    async def send(
        self, digests: Sequence[bytes], write: Callable[[attn_pb2.BlockPart], Awaitable[object]]
    ) -> None:
        """Writes the contents of the first blocks, up to one that is not here, or not any more.

        Raises `PeerError` if that takes too long: others wait until the receiver, which may hang, has read.
        """
        try:
            async with asyncio.timeout(self._longest_s), self._is_sending:
                await self._send(digests, write)
        except TimeoutError as error:
            raise PeerError(f"{len(digests)} blocks have not been sent within {self._longest_s:g} s") from error

    async def _send(
        self, digests: Sequence[bytes], write: Callable[[attn_pb2.BlockPart], Awaitable[object]]
    ) -> None:
        loop = asyncio.get_running_loop()
        if self._staging is None:
            self._staging = await loop.run_in_executor(self._thread, self._make_staging)
        staging, num_read = self._staging, 0
        while num_read < len(digests):
            wanted = digests[num_read : num_read + staging.num_blocks]
            checksums = await loop.run_in_executor(self._thread, self._read, staging, wanted)
            content = staging.bytes[: len(checksums) * staging.block_bytes]
            for first in range(0, len(content), PART_BYTES):
                part = content[first : first + PART_BYTES]
                is_last = first + len(part) == len(content)
                await write(attn_pb2.BlockPart(content=bytes(part), checksums=checksums if is_last else ()))
            if len(checksums) < len(wanted):
                return
            num_read += len(checksums)

    def close(self) -> None:
        """Ends the thread after its current copy."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, staging: BlockStaging, digests: Sequence[bytes]) -> list[int]:
        """Copies blocks to the staging; returns the checksums of the first ones, which are what they should be."""
        found = list[tuple[bytes, int, int]]()
        for digest in digests:
            block_id = self._findable.lookup(digest)
            if block_id is None:
                break
            found.append((digest, block_id, self._findable.generation(block_id)))
        if not found:
            return []
        checksums = staging.copier.read([block_id for _, block_id, _ in found], range(len(found)))
        for index, (digest, block_id, generation) in enumerate(found):
            # In this order: a block that was findable by another digest between the first two calls has changed since.
            if self._findable.lookup(digest) != block_id or self._findable.generation(block_id) != generation:
                return checksums[:index]
        return checksums


@dataclass(slots=True)
class _Load:
    address: str
    blocks: Sequence[MissingBlock]
    fence: torch.cuda.Event | None
    num_cancelled: int  # how often loads have been cancelled when it was asked for
    num_loaded: int = 0  # of its first blocks


class BlockReceiver:
    """Copies blocks from the attention worker that a sequence leaves into this worker's KV cache.

    Used by the engine thread. Blocks of one sequence are copied at a time.
    """

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
