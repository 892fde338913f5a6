"""`SeenPrefixes`: tells which sequences the prefix cache has nothing of, so that the plan that opens them can run them.

Part of the session. No torch, no gRPC, no asyncio; one engine thread.
"""

from __future__ import annotations

from collections import OrderedDict

from services.dense_worker.engine.sequence import Sequence


class SeenPrefixes:
    """The first blocks of sequences that have been in the KV caches, by hash.

    No more than the caches have blocks together: each sequence with another first block has taken a block since, so
    what is forgotten here has mostly been evicted there. What has not been is missed, and computed as a whole: blocks
    of a sequence that still runs, of a cache that others have passed by, of rows that were given up. While one of the
    caches was not empty at first, anything may be in it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._caches: dict[int, tuple[int, bool]] = {}  # by cache_id: blocks, and whether it was empty
        self._most = 0
        self._is_complete = True  # whether all caches were empty before
        self._seen: OrderedDict[int, None] = OrderedDict()

    def set_cache(self, cache_id: int, num_blocks: int, *, is_empty: bool) -> None:
        """A KV cache is used from now on."""
        self._caches[cache_id] = num_blocks, is_empty
        self._count()

    def remove_cache(self, cache_id: int) -> None:
        """A KV cache is gone."""
        del self._caches[cache_id]
        self._count()

    def _count(self) -> None:
        self._most = sum(num_blocks for num_blocks, _ in self._caches.values())
        self._is_complete = all(is_empty for _, is_empty in self._caches.values())
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def note(self, sequence: Sequence) -> None:
        """A sequence enters or leaves a KV cache."""
        if (key := self._key(sequence)) is not None:
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)

    def may_have(self, sequence: Sequence) -> bool:
        """Whether blocks of a sequence may be cached."""
        key = self._key(sequence)
        return not self._is_complete or (key is not None and key in self._seen)

    def _key(self, sequence: Sequence) -> int | None:
        """Sequences with the same first block have the same key; None: it has none that is full."""
        prompt, size = sequence.spec.prompt_token_ids, self._block_size
        token_ids = (*prompt[:size], *sequence.output_token_ids[: max(0, size - len(prompt))])
        return hash((sequence.spec.prefix_key, token_ids)) if len(token_ids) == size else None
