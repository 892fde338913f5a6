"""`SpreadPlacement`: spreads sequences over the KV caches of several attention workers.

A prompt goes where its first blocks have been computed before, if that cache has room and has not been promised much
more blocks than others; the longest such prefix counts. Otherwise it goes to the cache that has the largest part of its
blocks available after it, so that long prompts do not meet in one, and a worker that has just come gets the next ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.placement import Placement
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session

CHUNK_TOKENS = 64  # prefixes are compared in steps of as many tokens
# A prefix counts as long as its cache has promised no more blocks than as many times those of another one and those of
# this sequence: beyond that, steps would wait for this worker.
MOST_TIMES = 2
MAX_PREFIXES = 65_536  # that are remembered, the most recently used ones


class SpreadPlacement(Placement):
    """A `Placement`."""

    def __init__(self) -> None:
        self._cache_of_prefix = OrderedDict[int, int]()  # by hash; a collision costs a cached prefix, nothing else

    def choose(self, sequence: Sequence, fitting: SequenceOf[int], session: Session) -> int:
        """The cache with the longest prefix of a sequence, or the one with the largest free part."""
        found = None
        for prefix in _prefixes(sequence):
            cache_id = self._cache_of_prefix.get(prefix)
            if cache_id is None:
                break
            found = cache_id if cache_id in fitting else found
        if found is not None:
            ledger = session.ledgers[found]
            least = min(_num_promised(each, session) for each in fitting)
            most = MOST_TIMES * least + ledger.blocks_for(sequence.max_num_cached_tokens)
            if _num_promised(found, session) <= most:
                return found
        return max(fitting, key=lambda each: (_free_part(sequence, each, session), -each))

    def note(self, sequence: Sequence) -> None:
        """Its prefixes are, or will be, in the cache that it names."""
        for prefix in _prefixes(sequence):
            self._cache_of_prefix[prefix] = sequence.cache_id
            self._cache_of_prefix.move_to_end(prefix)
        while len(self._cache_of_prefix) > MAX_PREFIXES:
            self._cache_of_prefix.popitem(last=False)

    def forget(self, cache_id: int) -> None:
        """Nothing is in a cache that is gone."""
        for prefix in [each for each, found in self._cache_of_prefix.items() if found == cache_id]:
            del self._cache_of_prefix[prefix]


def _prefixes(sequence: Sequence) -> Iterator[int]:
    """A hash of each prefix of its tokens that consists of whole chunks, the shortest first."""
    token_ids = [*sequence.spec.prompt_token_ids, *sequence.output_token_ids]
    digest = hash(sequence.spec.prefix_key)
    for start in range(0, len(token_ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        digest = hash((digest, *token_ids[start : start + CHUNK_TOKENS]))
        yield digest


def _num_promised(cache_id: int, session: Session) -> int:
    ledger = session.ledgers[cache_id]
    return ledger.num_blocks - ledger.num_available_blocks


def _free_part(sequence: Sequence, cache_id: int, session: Session) -> float:
    """Which part of a cache would still be available if the sequence had all blocks that it may need."""
    ledger = session.ledgers[cache_id]
    num_blocks = ledger.blocks_for(sequence.max_num_cached_tokens)
    return (ledger.num_available_blocks - num_blocks) / ledger.num_blocks
