"""`BlockSender`: sends blocks of this worker's KV cache to another attention worker, a few at a time.

Blocks are copied by a thread of its own beside the steps, which go on. The blocks of a sequence that has left stay
findable until others need the room, so nobody holds them: a copy counts only if its block has not changed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.attn_worker.cache.tiers.host_tier import FindableBlocks
from services.attn_worker.moved_blocks.staging import BlockStaging
from services.common.errors import PeerError
from services.pb import attn_pb2

PART_BYTES = 2**18  # of a message, which the event loop handles in about 0.1 ms


class BlockSender:
    """For the event loop. Calls are served one after the other."""

    def __init__(self, make_staging: Callable[[], BlockStaging], findable: FindableBlocks, longest_s: float) -> None:
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
