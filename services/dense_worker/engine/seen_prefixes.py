"""`SeenPrefixes`: tells which sequences the prefix cache has nothing of, so that the plan that opens them can run them.

Part of the session. No torch, no gRPC, no asyncio; one engine thread.
"""

from __future__ import annotations

from collections import OrderedDict

from services.dense_worker.engine.sequence import Sequence


class SeenPrefixes:
    """The first blocks of all sequences that have been in the KV caches, by hash.

    No more than the caches have blocks: each sequence with another first block has taken a block since, so what is
    forgotten here has been evicted there. Blocks are missed only where a sequence begins with the text of one that
    still runs, and whose prompt is shorter than a block: then it is computed as a whole.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._most = 0
        self._is_complete = True  # whether the caches were empty before
        self._seen: OrderedDict[int, None] = OrderedDict()

    def add_cache(self, num_blocks: int, *, is_empty: bool) -> None:
        """A KV cache is used from now on; if it is not empty, anything may be in it."""
        self._most += num_blocks
        self._is_complete &= is_empty

    def note(self, sequence: Sequence) -> None:
        """A sequence enters or leaves a KV cache."""
        if self._is_complete and (key := self._key(sequence)) is not None:
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
