"""`MovedBlocks`: both sides of a move, as one attention worker has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import grpc

from services.attn_worker.cache.block_pool import DIGEST_SIZE_BYTES
from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.tiers.host_tier import FindableBlocks
from services.attn_worker.moved_blocks.receiver import BlockReceiver
from services.attn_worker.moved_blocks.sender import BlockSender
from services.attn_worker.moved_blocks.staging import BlockStaging
from services.common.errors import InvalidRequest


class MovedBlocks:
    """Of a KV cache on a CPU that keeps nothing of a sequence but full blocks, and finds them by their digests.

    On a GPU a sequence that moves is computed again: that takes a tenth of the time or less.
    """

    def __init__(
        self,
        storage: BlockStorage,
        findable: FindableBlocks,
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
