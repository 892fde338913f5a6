"""`PrefixCache`: finds blocks that new sequences can reuse, by the hash of all tokens up to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.attn_worker.cache.block_group import BlockGroup
from services.attn_worker.cache.block_pool import block_digest, root_digest
from services.attn_worker.cache.cached_sequence import CachedSequence, SequenceRows
from services.attn_worker.cache.group import CacheGroup
from services.attn_worker.cache.tiers.tier import BlockSupplier, MissingBlock, NoTier, Tier

_TOKEN_BYTES = 4


class PrefixCache:
    """Works on the rows and groups of a `KVCache`. If it is not enabled, it finds and registers nothing.

    `length_dependent_beyond`: the keys of longer prompts depend on the prompt's length (see
    `rope.length_dependent_beyond`), so that these share blocks only with prompts of equal length.
    """

    def __init__(
        self,
        rows: SequenceRows,
        groups: Sequence[CacheGroup],
        block_size: int,
        *,
        is_enabled: bool = True,
        length_dependent_beyond: int | None = None,
    ) -> None:
        self._rows = rows
        self._groups = groups
        self._every_block = [group for group in groups if group.needs_every_block]
        self._block_size = block_size
        self._is_enabled = is_enabled
        self._length_dependent_beyond = length_dependent_beyond
        self._weights_hash = b""
        self.generation = 0  # of prefixes: the highest so far
        self.tier: Tier = NoTier()  # another one only if there is one group, without a window
        self._copies_full_blocks = True

    def use_weights(self, weights_hash: bytes) -> None:
        """Sets the weights that keys and values of all later sequences are computed with."""
        self._weights_hash = weights_hash

    def use_generation(self, generation: int) -> None:
        """From a higher one than before on, no block of earlier sequences is found; they make room as others come."""
        if generation > self.generation:
            self.generation = generation
            self.tier.keep_generation(generation)

    def use_tier(self, tier: Tier, *, copies_full_blocks: bool) -> None:
        """Called once, before any sequence. `copies_full_blocks`: whether all that can be found shall be there, too."""
        self.use_generation(tier.generation)
        self.tier, self._copies_full_blocks = tier, copies_full_blocks

    def root(self, num_prompt_tokens: int, prefix_key: bytes, generation: int) -> bytes:
        """The parent digest of the first block of a sequence of this generation."""
        beyond = self._length_dependent_beyond
        rope_len = num_prompt_tokens if beyond is not None and num_prompt_tokens > beyond else None
        return root_digest(self._weights_hash, prefix_key, rope_len, generation)

    def pin_longest(self, sequence: CachedSequence, most: int) -> int:
        """Gives a new sequence the blocks of its longest cached prefix; returns how many of the first group were free.

        At most `most` tokens need not be computed. The prefix ends where all groups can continue. Without one, too, the
        groups are told what others may find later.
        """
        if not self._is_enabled:
            return 0
        num_tokens, digests = len(sequence.token_ids), sequence.digests
        if num_blocks := most // self._block_size:
            self._add_digests(sequence, num_blocks)
        num_offered = []
        for group in self._groups:
            num_offered.append(len(digests))
            del digests[group.match(digests) :]
        while digests and any((num_matching := group.match(digests)) < len(digests) for group in self._groups):
            del digests[num_matching:]  # what ends earlier because of a later group may not do for an earlier one
        rows, row = self._rows, sequence.row
        rows.num_hashed_blocks[row] = len(digests)
        rows.num_computed[row] = rows.num_committed[row] = len(digests) * self._block_size
        pairs = zip(self._groups, num_offered, strict=True)
        num_pinned, *_ = [group.adopt(row, digests, offered, num_tokens) for group, offered in pairs]
        if self._copies_full_blocks:
            self.tier.offer(digests)
        return num_pinned

    def extend_from(
        self, supplier: BlockSupplier, sequence: CachedSequence, most_tokens: int, main: BlockGroup
    ) -> tuple[int, tuple[MissingBlock, ...]]:
        """Continues the prefix of a new sequence by blocks of `supplier`, up to `most_tokens`, as far as there is room.

        Returns how many blocks left the free ones, and those whose content must be loaded.
        """
        digests, first = sequence.digests, len(sequence.digests)
        if most_tokens // self._block_size <= first:
            return 0, ()
        most = min(most_tokens // self._block_size, first + main.pool.num_free_blocks)
        while len(digests) < most:
            digest = self.digest(sequence, len(digests))
            # Blocks behind one that is there may be findable on the device.
            if not supplier.has(digest) and (len(digests) == first or main.pool.lookup(digest) is None):
                break
            digests.append(digest)
        if len(digests) == first:
            return 0, ()
        row, rows = sequence.row, self._rows
        num_taken, missing = main.extend(row, digests[first:])
        rows.num_hashed_blocks[row] = len(digests)
        rows.num_computed[row] = rows.num_committed[row] = len(digests) * self._block_size
        return num_taken, missing

    def register(self, sequence: CachedSequence) -> None:
        """Makes full blocks, and states at their ends, findable if all their tokens are committed and known."""
        if not self._is_enabled:
            return
        row = sequence.row
        num_known = min(int(self._rows.num_committed[row]), len(sequence.token_ids))
        first = len(sequence.digests)
        for index in range(first, num_known // self._block_size):
            sequence.digests.append(self.digest(sequence, index))
        for group in self._groups:
            group.register(row, sequence.digests, first)
        if self._copies_full_blocks:
            self.tier.offer(sequence.digests[first:])
        self._rows.num_hashed_blocks[row] = len(sequence.digests)

    def digest(self, sequence: CachedSequence, index: int) -> bytes:
        """The digest of block `index`; the digest of its parent must be known."""
        parent = sequence.digests[index - 1] if index else sequence.root
        token_ids = sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]
        content = np.array(token_ids, "<u4").tobytes()
        return block_digest(parent, content + self._span_key(sequence, index) if sequence.spans else content)

    def _span_key(self, sequence: CachedSequence, index: int) -> bytes:
        """What the spans that have tokens in a block stand for, and where they begin.

        All of it has a fixed length, and a block without spans has none: equal keys mean equal spans.
        """
        start, end = index * self._block_size, (index + 1) * self._block_size
        inside = [span for span in sequence.spans if span.start < end and start < span.end]
        return b"".join(
            bytes.fromhex(span.hash) + (span.start - start).to_bytes(_TOKEN_BYTES, "little", signed=True)
            for span in inside
        )

    def _add_digests(self, sequence: CachedSequence, num_blocks: int) -> None:
        """Adds the digests of the first blocks, up to the first one that a group needs and does not find."""
        tokens = np.array(sequence.token_ids, "<u4").tobytes()
        size, digest = self._block_size * _TOKEN_BYTES, sequence.root
        for index in range(num_blocks):
            content = tokens[index * size : (index + 1) * size]
            digest = block_digest(digest, content + self._span_key(sequence, index) if sequence.spans else content)
            if any(group.pool.lookup(digest) is None for group in self._every_block):
                return
            sequence.digests.append(digest)
