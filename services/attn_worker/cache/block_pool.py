"""Physical KV blocks by number: their reference counts, hashes and order of eviction.

Owned by `KVCache`, on the attention worker's engine thread. It touches no tensor.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from services.common.errors import CapacityError

DIGEST_SIZE_BYTES = 16


@functools.lru_cache(1024)
def root_digest(weights_hash: bytes, prefix_key: bytes, rope_len: int | None = None, generation: int = 0) -> bytes:
    """The parent digest of a sequence's first block: sequences with different roots never share a block.

    `rope_len` is given only if the keys depend on the length of the prompt. `generation`: of prefixes, 0 is the first.
    """
    digest = blake2b(digest_size=DIGEST_SIZE_BYTES)
    suffix = b"" if rope_len is None else rope_len.to_bytes(8, "little")
    later = (generation.to_bytes(8, "little"),) if generation else ()
    for part in (weights_hash, prefix_key, suffix, *later):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_digest(parent: bytes, content: bytes) -> bytes:
    """The content hash of a full block: of its parent's digest and of what it has.

    content: its token ids as little-endian uint32, then what some of them stand for, if they do.
    """
    return blake2b(parent + content, digest_size=DIGEST_SIZE_BYTES).digest()


class BlockPool:
    """Reference counts of blocks 0..num_blocks-1 and hashes of reusable ones; every call is O(1) per block.

    A block is used (ref count > 0) or free. A free block with a registered hash stays findable until it is
    evicted, least recently used first, after all free blocks without a hash are gone.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._blank = list(reversed(range(num_blocks)))  # free, no hash; lowest number on top at first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free, with a hash; next victim first
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._generations = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, evictable ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_cached_blocks(self) -> int:
        """Number of free blocks whose content can still be found by its hash."""
        return len(self._evictable)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes `num_blocks` blocks, each with ref count 1 and no hash. Raises CapacityError if there are too few."""
        self.check_room(num_blocks)
        first = max(0, len(self._blank) - num_blocks)
        taken = self._blank[first:]
        del self._blank[first:]
        taken.reverse()
        while len(taken) < num_blocks:
            taken.append(self._evict())
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def check_room(self, num_blocks: int) -> None:
        """Raises CapacityError if `num_blocks` blocks cannot be allocated."""
        if num_blocks > self.num_free_blocks:
            raise CapacityError(
                f"{num_blocks} KV blocks are needed, {self.num_free_blocks} of {self.num_blocks} are free"
            )

    def lookup(self, digest: bytes) -> int | None:
        """The block registered under `digest`; `pin` it before the next allocation. May be called from any thread."""
        return self._block_of.get(digest)

    def generation(self, block_id: int) -> int:
        """A number that changes before the content of a registered block may change. May be called from any thread."""
        return self._generations[block_id]

    def pin(self, block_id: int) -> bool:
        """Adds a reference to a block that `lookup` found; returns whether it was free."""
        was_free = self._ref_counts[block_id] == 0
        if was_free:
            del self._evictable[block_id]
        self._ref_counts[block_id] += 1
        return was_free

    def release(self, block_ids: Sequence[int]) -> int:
        """Drops one reference of each block, given in sequence order; returns how many became free.

        The tail goes first, so that it is evicted before the prefix that other sequences may share.
        """
        num_freed = 0
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} was released more often than taken"
            if self._ref_counts[block_id] == 0:
                num_freed += 1
                if block_id in self._digest_of:
                    self._evictable[block_id] = None
                else:
                    self._blank.append(block_id)
        return num_freed

    def register_hash(self, block_id: int, digest: bytes) -> None:
        """Makes a used, completely filled block findable. If the digest has a block already, that one stays.

        A block that forked sequences share is registered by each of them.
        """
        assert self._ref_counts[block_id] > 0 and self._digest_of.get(block_id, digest) == digest
        if digest not in self._block_of:
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def unregister(self, block_id: int) -> None:
        """Forgets the hash of a used block, if it has one, because its content is about to change."""
        assert self._ref_counts[block_id] > 0
        self._forget(block_id)

    def discard(self, digest: bytes) -> None:
        """Forgets a hash, if it is known; its block, if free, is among the first to be used again."""
        block_id = self._block_of.get(digest)
        if block_id is not None:
            self._forget(block_id)
            if block_id in self._evictable:
                del self._evictable[block_id]
                self._blank.append(block_id)

    def check_integrity(self, ref_counts: Sequence[int]) -> None:
        """Raises AssertionError unless all counts agree with `ref_counts`, which the caller has counted."""
        assert self._ref_counts == list(ref_counts), "ref counts differ from the block tables"
        free = sorted([*self._blank, *self._evictable])
        assert free == [block for block, count in enumerate(ref_counts) if count == 0], "free list is wrong"
        assert self._digest_of == {block: digest for digest, block in self._block_of.items()}
        assert all(block in self._digest_of for block in self._evictable)
        assert not any(block in self._digest_of for block in self._blank)

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        digest = self._digest_of.pop(block_id, None)
        if digest is not None:
            del self._block_of[digest]
            self._generations[block_id] += 1
