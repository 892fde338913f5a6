"""`PrefixCache`: finds blocks that new sequences can reuse, by the hash of all tokens up to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.attn_worker.cache.block_pool import block_digest
from services.attn_worker.cache.block_tables import BlockTables
from services.attn_worker.cache.cached_sequence import CachedSequence
from services.attn_worker.cache.sequence_rows import SequenceRows
from services.attn_worker.cache.sequence_states import SequenceStates

_TOKEN_BYTES = 4


class PrefixCache:
    """Works on the rows and tables of a `KVCache`. If it is not enabled, it finds and registers nothing."""

    def __init__(
        self,
        rows: SequenceRows,
        groups: Sequence[BlockTables],
        states: SequenceStates | None,
        block_size: int,
        *,
        is_enabled: bool,
    ) -> None:
        self._rows = rows
        self._states = states
        self._groups = groups
        self._block_size = block_size
        self._is_enabled = is_enabled

    def pin_longest(self, sequence: CachedSequence) -> int:
        """Gives a new sequence the blocks of its longest cached prefix; returns how many of the first group were free.

        At least its last token remains to be computed. A prefix must be there in all groups. With a window, only the
        blocks that the next token reads must be there, and only these are pinned: those of sinks, and those of the
        window. With gated delta layers it ends at a checkpoint of them.
        """
        num_blocks = (len(sequence.token_ids) - 1) // self._block_size
        if not self._is_enabled or not num_blocks:
            return 0
        first, *_ = self._groups
        if first.retention.window is None:
            self._add_digests(sequence, num_blocks, found_in=first)
        else:
            self._add_digests(sequence, num_blocks)
        for tables in self._groups:
            if tables.retention.window is not None:
                del sequence.digests[self._last_hit(tables, sequence.digests) :]
        if self._states is not None:
            num_kept = self._states.open(sequence.row, len(sequence.token_ids), sequence.digests)
            del sequence.digests[num_kept:]
        rows, row, end = self._rows, sequence.row, len(sequence.digests)
        rows.num_hashed_blocks[row] = end
        rows.num_computed[row] = rows.num_committed[row] = end * self._block_size
        num_pinned, *_ = [self._pin(tables, sequence) for tables in self._groups]
        return num_pinned

    def register(self, sequence: CachedSequence) -> None:
        """Makes full blocks, and states at their ends, findable if all their tokens are committed and known."""
        if not self._is_enabled:
            return
        row = sequence.row
        num_known = min(int(self._rows.num_committed[row]), len(sequence.token_ids))
        first = len(sequence.digests)
        for index in range(first, num_known // self._block_size):
            sequence.digests.append(self.digest(sequence, index))
        for tables in self._groups:
            tables.register_blocks(row, sequence.digests, first)
        if self._states is not None:
            self._states.register(row, sequence.digests)
        self._rows.num_hashed_blocks[row] = len(sequence.digests)

    def digest(self, sequence: CachedSequence, index: int) -> bytes:
        """The digest of block `index`; the digest of its parent must be known."""
        parent = sequence.digests[index - 1] if index else sequence.root
        token_ids = sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]
        return block_digest(parent, np.array(token_ids, "<u4").tobytes())

    def _add_digests(self, sequence: CachedSequence, num_blocks: int, *, found_in: BlockTables | None = None) -> None:
        """Adds the digests of the first blocks; with `found_in`, up to the first one that is not found there."""
        tokens = np.array(sequence.token_ids, "<u4").tobytes()
        size, digest = self._block_size * _TOKEN_BYTES, sequence.root
        for start in range(0, num_blocks * size, size):
            digest = block_digest(digest, tokens[start : start + size])
            if found_in is not None and found_in.pool.lookup(digest) is None:
                return
            sequence.digests.append(digest)

    def _pin(self, tables: BlockTables, sequence: CachedSequence) -> int:
        """Gives a sequence the blocks of its digests that the next token reads; returns how many of them were free."""
        row, digests, num_pinned = sequence.row, sequence.digests, 0
        num_sinks = tables.retention.num_sink_blocks
        num_dropped = tables.retention.num_unread_blocks(len(digests) * self._block_size)
        kept = digests[:num_sinks] + digests[num_sinks + num_dropped :]
        for place, digest in enumerate(kept):
            block_id = tables.pool.lookup(digest)
            assert block_id is not None, "it was found before"
            num_pinned += tables.pool.pin(block_id)
            tables.block_ids[row, place] = block_id
        tables.num_dropped_blocks[row], tables.num_held_blocks[row] = num_dropped, len(kept)
        return num_pinned

    def _last_hit(self, tables: BlockTables, digests: list[bytes]) -> int:
        """The greatest number of leading blocks after which all blocks that the next token reads are findable."""
        pool, retention = tables.pool, tables.retention
        num_sinks = 0  # leading blocks that are findable, up to those of all sinks
        while num_sinks < retention.num_sink_blocks and num_sinks < len(digests):
            if pool.lookup(digests[num_sinks]) is None:
                return num_sinks
            num_sinks += 1
        end = len(digests)
        first = num_sinks + retention.num_unread_blocks(end * self._block_size)
        for index in range(len(digests) - 1, num_sinks - 1, -1):
            if pool.lookup(digests[index]) is None:
                end = index
                first = num_sinks + retention.num_unread_blocks(end * self._block_size)
            elif index <= first:
                return end
        return num_sinks
