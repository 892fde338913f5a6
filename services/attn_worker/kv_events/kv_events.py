"""`KVEvents`: which blocks have become findable in the prefix cache, and which have gone.

The engine thread records, and the publisher's thread takes what has come meanwhile. A cache whose blocks are reported
is made of `ReportedPool` and `ReportedPrefixCache`; any other one pays nothing for it.

Only sequences without a prefix key are reported: what salts, adapters and vectors separate must stay separate at a
router that looks at token ids alone.
"""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass
from typing import Any

import structlog

from services.attn_worker.cache.block_pool import BlockPool, root_digest
from services.attn_worker.cache.cached_sequence import CachedSequence
from services.attn_worker.cache.prefix_cache import PrefixCache

log = structlog.get_logger()

MAX_QUEUED = 100_000  # events that nobody has taken yet
MAX_QUEUED_BYTES = 64 * 2**20  # of their digests and tokens
_EVENT_BYTES = 200  # of one beside these
_DIGEST_BYTES = 100  # of one in a list


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one sequence, which can be found from now on."""

    parent: bytes | None  # the digest of the block before them; None: they are the first
    digests: list[bytes]
    token_ids: array[int]  # of all blocks together
    block_size: int


@dataclass(frozen=True, slots=True)
class Removed:
    """A block that can no longer be found."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block reported before can be found."""


Event = Stored | Removed | Cleared


class KVEvents:
    """The queue between the two threads. If it is full, all events in it are replaced by a `Cleared`.

    A router then knows of fewer blocks than there are, never of blocks that are not there.
    """

    def __init__(self, max_queued: int = MAX_QUEUED, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_queued, self._max_queued_bytes = max_queued, max_queued_bytes
        self._num_queued_bytes = 0
        self._lock = threading.Lock()  # held for an append or an exchange only
        self._queue: list[Event] = []
        self._reported: set[bytes] = set()  # by a `Stored` after the last `Cleared`

    @property
    def num_queued(self) -> int:
        """Events that nobody has taken yet."""
        return len(self._queue)

    def take(self) -> list[Event]:
        """All events since the last call, in order; for the publisher's thread."""
        with self._lock:
            taken, self._queue = self._queue, []
            self._num_queued_bytes = 0
        return taken

    def is_reported(self, digest: bytes) -> bool:
        """Whether a router should know this block."""
        return digest in self._reported

    def store(self, parent: bytes | None, digests: list[bytes], token_ids: array[int], block_size: int) -> None:
        """Reports blocks that are not reported yet."""
        self._reported.update(digests)
        self._put(Stored(parent, digests, token_ids, block_size))

    def remove(self, digest: bytes) -> None:
        """Reports that a block has gone, if it has been reported."""
        if digest in self._reported:
            self._reported.remove(digest)
            self._put(Removed(digest))

    def clear(self) -> None:
        """Reports that no block is left."""
        self._reported.clear()
        self._put(Cleared())

    def _put(self, event: Event) -> None:
        num_bytes = _EVENT_BYTES
        if isinstance(event, Stored):
            num_bytes += _DIGEST_BYTES * len(event.digests) + event.token_ids.itemsize * len(event.token_ids)
        with self._lock:
            has_room = self._num_queued_bytes + num_bytes <= self._max_queued_bytes
            if has_room and len(self._queue) < self._max_queued:
                self._queue.append(event)
                self._num_queued_bytes += num_bytes
                return
            num_dropped, self._queue = len(self._queue) + 1, [Cleared()]
            self._num_queued_bytes = _EVENT_BYTES
        self._reported.clear()
        log.warning("KV events were dropped: more than attention.kv_events can send", num_dropped=num_dropped)


class ReportedPool(BlockPool):
    """A pool that reports each block whose hash it forgets."""

    def __init__(self, events: KVEvents, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._events = events

    def _forget(self, block_id: int) -> None:
        digest = self._digest_of.get(block_id)
        super()._forget(block_id)
        if digest is not None:
            self._events.remove(digest)


class ReportedPrefixCache(PrefixCache):
    """A prefix cache that reports the blocks of the first group that it makes findable."""

    def __init__(self, events: KVEvents, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._events = events
        self._plain_root = b""  # of sequences without a prefix key

    def use_weights(self, weights_hash: bytes) -> None:
        super().use_weights(weights_hash)
        self._begin()

    def use_generation(self, generation: int) -> None:
        is_new = generation > self.generation
        super().use_generation(generation)
        if is_new:
            self._begin()

    def _begin(self) -> None:
        self._plain_root = root_digest(self._weights_hash, b"", generation=self.generation)
        self._events.clear()

    def register(self, sequence: CachedSequence) -> None:
        first = len(sequence.digests)
        super().register(sequence)
        if sequence.root == self._plain_root:
            if first and not self._events.is_reported(sequence.digests[first - 1]):
                first = 0  # they came from a tier, or were forgotten since though they are cached
            self._report(sequence, first)

    def _report(self, sequence: CachedSequence, first: int) -> None:
        """Reports the sequence's blocks from `first` on that can be found, if those before them are reported, too."""
        digests, pool, size = sequence.digests, self._groups[0].pool, self._block_size
        known = self._events.is_reported
        start = first
        while start < len(digests):
            end = start
            if not start or known(digests[start - 1]):
                while end < len(digests) and pool.lookup(digests[end]) is not None and not known(digests[end]):
                    end += 1
            if end > start:
                parent = digests[start - 1] if start else None
                self._events.store(parent, digests[start:end], sequence.token_ids[start * size : end * size], size)
            start = max(end, start + 1)
