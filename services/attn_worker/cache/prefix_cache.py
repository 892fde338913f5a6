"""`PrefixCache`: finds blocks that new sequences can reuse, by the hash of all tokens up to them."""

from __future__ import annotations

import numpy as np

from services.attn_worker.cache.block_pool import BlockPool, block_digest
from services.attn_worker.cache.block_tables import BlockTables
from services.attn_worker.cache.cached_sequence import CachedSequence
from services.common.kv_cache.retention import Retention

_TOKEN_BYTES = 4


class PrefixCache:
    """Works on the pool and the tables of a `KVCache`. If it is not enabled, it finds and registers nothing."""

    def __init__(self, pool: BlockPool, tables: BlockTables, retention: Retention, *, is_enabled: bool) -> None:
        self._pool = pool
        self._tables = tables
        self._retention = retention
        self._block_size = retention.block_size
        self._num_sink_blocks = retention.num_sink_blocks
        self._is_enabled = is_enabled

    def pin_longest(self, sequence: CachedSequence) -> int:
        """Gives a new sequence the blocks of its longest cached prefix; returns how many of them were free.

        At least its last token remains to be computed. With a window, only the blocks that the next token reads must be
        there, and only these are pinned: those of sinks, and those of the window.
        """
        num_blocks = (len(sequence.token_ids) - 1) // self._block_size
        if not self._is_enabled or not num_blocks:
            return 0
        if self._retention.window is None:
            self._add_digests(sequence, num_blocks, stops_at_miss=True)
        else:
            self._add_digests(sequence, num_blocks)
            del sequence.digests[self._last_hit(sequence.digests) :]
        end = len(sequence.digests)
        num_dropped, num_sinks = self._retention.num_unread_blocks(end * self._block_size), self._num_sink_blocks
        row, tables, num_pinned = sequence.row, self._tables, 0
        kept = sequence.digests[:num_sinks] + sequence.digests[num_sinks + num_dropped :]
        for place, digest in enumerate(kept):
            block_id = self._pool.lookup(digest)
            assert block_id is not None, "it was found before"
            num_pinned += self._pool.pin(block_id)
            tables.block_ids[row, place] = block_id
        tables.num_dropped_blocks[row], tables.num_held_blocks[row] = num_dropped, len(kept)
        tables.num_hashed_blocks[row] = end
        tables.num_computed[row] = tables.num_committed[row] = end * self._block_size
        return num_pinned

    def register(self, sequence: CachedSequence) -> None:
        """Makes full blocks findable if all their tokens are committed and known."""
        if not self._is_enabled:
            return
        row, tables = sequence.row, self._tables
        num_known = min(int(tables.num_committed[row]), len(sequence.token_ids))
        num_dropped = int(tables.num_dropped_blocks[row])
        for index in range(len(sequence.digests), num_known // self._block_size):
            digest = self.digest(sequence, index)
            if index < self._num_sink_blocks:
                self._pool.register_hash(int(tables.block_ids[row, index]), digest)
            elif index >= self._num_sink_blocks + num_dropped:
                self._pool.register_hash(int(tables.block_ids[row, index - num_dropped]), digest)
            sequence.digests.append(digest)
        tables.num_hashed_blocks[row] = len(sequence.digests)

    def digest(self, sequence: CachedSequence, index: int) -> bytes:
        """The digest of block `index`; the digest of its parent must be known."""
        parent = sequence.digests[index - 1] if index else sequence.root
        token_ids = sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]
        return block_digest(parent, np.array(token_ids, "<u4").tobytes())

    def _add_digests(self, sequence: CachedSequence, num_blocks: int, *, stops_at_miss: bool = False) -> None:
        tokens = np.array(sequence.token_ids, "<u4").tobytes()
        size, digest = self._block_size * _TOKEN_BYTES, sequence.root
        for start in range(0, num_blocks * size, size):
            digest = block_digest(digest, tokens[start : start + size])
            if stops_at_miss and self._pool.lookup(digest) is None:
                return
            sequence.digests.append(digest)

    def _last_hit(self, digests: list[bytes]) -> int:
        """The greatest number of leading blocks after which all blocks that the next token reads are findable."""
        num_sinks = 0  # leading blocks that are findable, up to those of all sinks
        while num_sinks < self._num_sink_blocks and num_sinks < len(digests):
            if self._pool.lookup(digests[num_sinks]) is None:
                return num_sinks
            num_sinks += 1
        end = len(digests)
        first = num_sinks + self._retention.num_unread_blocks(end * self._block_size)
        for index in range(len(digests) - 1, num_sinks - 1, -1):
            if self._pool.lookup(digests[index]) is None:
                end = index
                first = num_sinks + self._retention.num_unread_blocks(end * self._block_size)
            elif index <= first:
                return end
        return num_sinks
