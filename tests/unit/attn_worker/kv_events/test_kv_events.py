"""What a router that follows the events believes is what the prefix cache has, whatever happens to sequences."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from services.attn_worker.cache.block_pool import block_digest, root_digest
from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.tiers.tier import NoTier
from services.attn_worker.kv_events.kv_events import (
    Cleared,
    KVEvents,
    Removed,
    ReportedPool,
    ReportedPrefixCache,
    Stored,
)
from services.attn_worker.kv_events.publisher import MAX_BATCH_BYTES, BlockStored, Publisher, _batches
from tests.support.attention.open_now import open_sequence
from tests.support.examples import examples
from tests.support.plans import make_plan
from tests.unit.attn_worker.cache.test_kv_cache_properties import KVCacheMachine

WEIGHTS = b"weights"
Prefix = tuple[int, ...]


class Router:
    """Knows the token ids of each reported block, with all before it, and nothing of how digests are made."""

    def __init__(self, events: KVEvents) -> None:
        self._events = events
        self.prefixes: dict[bytes, Prefix] = {}  # by digest

    def follow(self) -> None:
        for event in self._events.take():
            match event:
                case Stored(parent, digests, token_ids, size):
                    prefix = () if parent is None else self.prefixes[parent]
                    assert len(token_ids) == len(digests) * size
                    for index, digest in enumerate(digests):
                        assert digest not in self.prefixes, "it is reported already"
                        prefix += tuple(token_ids[index * size : (index + 1) * size])
                        self.prefixes[digest] = prefix
                case Removed(digest):
                    del self.prefixes[digest]
                case Cleared():
                    self.prefixes.clear()


def reported_cache(events: KVEvents, *arguments: Any, **options: Any) -> KVCache:
    make_pool, make_prefix_cache = partial(ReportedPool, events), partial(ReportedPrefixCache, events)
    cache = build_cache(*arguments, **options, make_pool=make_pool, make_prefix_cache=make_prefix_cache)
    cache.use_weights(WEIGHTS)
    return cache


def digest_of(prefix: Prefix, block_size: int) -> bytes:
    digest = root_digest(WEIGHTS, b"")
    for start in range(0, len(prefix), block_size):
        digest = block_digest(digest, np.array(prefix[start : start + block_size], "<u4").tobytes())
    return digest


class ReportedCacheMachine(KVCacheMachine):
    """The same cache with events, which are sometimes more than the queue holds."""

    @initialize(max_queued=st.sampled_from([1000, 1000, 3]))
    def watch(self, max_queued: int) -> None:
        self.is_complete = max_queued == 1000
        self.seen: set[Prefix] = set()

    def make_cache(self, *arguments: Any, **options: Any) -> KVCache:
        self.events = KVEvents(1000)
        self.router = Router(self.events)
        return reported_cache(self.events, *arguments, **options)

    @invariant()
    def the_router_is_right(self) -> None:
        if not hasattr(self, "cache") or not hasattr(self, "seen"):
            return
        if not self.is_complete:
            self.events._max_queued = 3
        self.router.follow()
        pool, size = self.cache.pools["blocks"], self.block_size
        for digest, prefix in self.router.prefixes.items():
            assert digest == digest_of(prefix, size) and pool.lookup(digest) is not None, "no block that is not there"
        if self.window is not None or not self.is_complete:
            return  # blocks whose predecessors are not there are not reported
        for sequence in self.sequences.values():
            is_long = self.beyond is not None and sequence.num_prompt > self.beyond
            if not sequence.salt and not is_long:
                tokens = tuple(sequence.tokens)
                self.seen |= {tokens[:end] for end in range(size, len(tokens) + 1, size)}
        findable = {prefix for prefix in self.seen if pool.lookup(digest_of(prefix, size)) is not None}
        assert findable <= set(self.router.prefixes.values()), "every block that is there"


TestReportedCacheMachine = ReportedCacheMachine.TestCase
TestReportedCacheMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


def run_sequence(cache: KVCache, seq_id: int, tokens: list[int], prefix_key: bytes = b"") -> int:
    """Computes all tokens and closes the sequence; returns how many were cached."""
    cached = open_sequence(cache, seq_id, tokens, len(tokens), prefix_key).num_cached_tokens
    assert not cache.plan_step(make_plan([(seq_id, len(tokens) - cached, cached)])).errors
    cache.commit_step()
    cache.close_sequences([seq_id])
    return cached


def test_what_prefix_keys_separate_is_not_reported() -> None:
    events = KVEvents()
    cache = reported_cache(events, 20, 4, 40)
    run_sequence(cache, 1, list(range(12)), b"salt")
    assert events.take() == [Cleared()]
    run_sequence(cache, 2, list(range(12)))
    [stored] = events.take()
    assert isinstance(stored, Stored) and stored.parent is None and len(stored.digests) == 3
    assert stored.token_ids == array("I", range(12)) and stored.block_size == 4


def test_other_weights_clear_all_blocks_and_old_ones_are_not_removed_twice() -> None:
    events = KVEvents()
    cache = reported_cache(events, 3, 4, 12)
    run_sequence(cache, 1, list(range(12)))
    cache.use_weights(b"others")
    run_sequence(cache, 2, list(range(12)))  # in the old one's blocks
    first, old, cleared, new = events.take()
    assert (first, cleared) == (Cleared(), Cleared())
    assert isinstance(old, Stored) and isinstance(new, Stored) and not set(old.digests) & set(new.digests)


def test_a_new_generation_clears_all_blocks_and_its_own_are_reported() -> None:
    events = KVEvents()
    cache = reported_cache(events, 8, 4, 12)
    run_sequence(cache, 1, list(range(12)))
    assert len(events.take()) == 2
    open_sequence(cache, 2, list(range(12)), 12, prefix_generation=1)
    assert not cache.plan_step(make_plan([(2, 12, 0)])).errors
    cache.commit_step()
    cleared, new = events.take()
    assert cleared == Cleared() and isinstance(new, Stored) and new.parent is None and len(new.digests) == 3
    assert all(cache.pools["blocks"].lookup(each) is not None for each in new.digests)


def test_a_full_queue_becomes_one_event_and_later_blocks_are_reported_again() -> None:
    events = KVEvents(max_queued=2)
    router = Router(events)
    cache = reported_cache(events, 3, 4, 12)
    for seq_id in range(5):
        run_sequence(cache, seq_id, [seq_id] * 12)  # each takes the blocks of the one before
        assert events.num_queued <= 2
    router.follow()
    run_sequence(cache, 9, [9] * 12)
    taken = events.take()
    assert isinstance(taken[-1], Stored) and taken[-1].token_ids == array("I", [9] * 12)
    assert {digest_of((4,) * 4 * n, 4) for n in (1, 2, 3)} >= set(router.prefixes)


def test_few_long_events_are_bounded_by_their_bytes() -> None:
    events = KVEvents(max_queued_bytes=4000)
    for number in range(20):
        events.store(None, [bytes([number]) * 32], array("I", range(400)), 400)
        stored = [each for each in events._queue if isinstance(each, Stored)]
        assert sum(each.token_ids.itemsize * len(each.token_ids) for each in stored) <= 4000
    assert isinstance(events.take()[0], Cleared) and not events.is_reported(bytes(32))
    events.store(None, [b"new" * 10], array("I", [1]), 1)
    assert events.num_queued == 1


def test_no_batch_has_more_bytes_than_a_subscribers_queue_is_made_for() -> None:
    digests = [bytes([255, 255, *number.to_bytes(2, "big")]) * 8 for number in range(10_000)]
    removed = [Removed(digest) for digest in digests]
    single = [Stored(digest, [digest], array("I", [2**31]), 1) for digest in digests]
    for events in ([Stored(digests[0], digests, array("I", [2**31] * 10_000), 1)], removed, single):
        for batch in _batches(events):
            assert len(msgspec.msgpack.encode([0.0, batch, 0])) <= MAX_BATCH_BYTES


def test_a_long_history_is_sent_again_as_a_whole_to_a_slow_peer(tmp_path: Path) -> None:
    """More batches than a socket queues, of which each but the last ones must wait until the peer reads."""
    num_batches, ends = 10_000, (-1).to_bytes(8, "big", signed=True)
    publisher = Publisher(KVEvents(), f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", "")
    message = BlockStored([2**63], None, [2**31] * 100, 100, None, "GPU", None)
    publisher._open()
    for _ in range(num_batches):
        publisher._publish([message])
    with zmq.Context() as context, context.socket(zmq.DEALER) as slow, context.socket(zmq.DEALER) as gone:
        for peer, first in ((gone, 0), (slow, 0)):
            peer.set_hwm(1)
            peer.connect(f"ipc://{tmp_path}/replay")
            peer.send_multipart([b"", first.to_bytes(8, "big")])
        publisher._thread.start()
        time.sleep(0.1)  # it sends as much as there is room for
        gone.close(linger=0)
        for first in (0, num_batches - 2, 2**64 - 1):
            if first:
                slow.send_multipart([b"", first.to_bytes(8, "big")])
            numbers = []
            while slow.poll(5000) and (number := slow.recv_multipart()[1]) != ends:
                numbers.append(int.from_bytes(number, "big"))
            assert numbers == list(range(first, num_batches))
    publisher.close()
    assert not publisher._replays, "a peer that has gone is forgotten"


def test_blocks_that_stay_cached_are_reported_again_after_a_full_queue() -> None:
    events = KVEvents(max_queued=2)
    router = Router(events)
    cache = reported_cache(events, 20, 4, 40)
    shared = list(range(8))
    for seq_id in range(5):  # nobody reads what they report
        run_sequence(cache, seq_id, [*shared, *[50 + seq_id] * 4])
    router.follow()
    assert run_sequence(cache, 9, [*shared, *[90] * 4]) == 8, "they stay cached"
    router.follow()
    assert {tuple([*shared, *[90] * 4][:end]) for end in (4, 8, 12)} <= set(router.prefixes.values())


def test_without_events_the_cache_has_none_of_it() -> None:
    cache = build_cache(4, 4, 16)
    assert type(cache.pools["blocks"]).__name__ == "BlockPool" and type(cache._prefixes).__name__ == "PrefixCache"


class FullTier(NoTier):
    """Has every block that was ever offered."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: set[bytes] = set()

    def has(self, digest: bytes) -> bool:
        return digest in self.digests

    def offer(self, digests: Iterable[bytes], *, is_urgent: bool = False) -> None:
        self.digests.update(digests)


def test_blocks_from_a_tier_are_reported_once_they_are_there() -> None:
    events = KVEvents()
    router = Router(events)
    cache = reported_cache(events, 4, 4, 16)
    cache.use_tier(FullTier())
    run_sequence(cache, 1, list(range(13)))
    run_sequence(cache, 2, [99] * 16)  # evicts all of it
    router.follow()
    assert {prefix[0] for prefix in router.prefixes.values()} == {99}
    result = open_sequence(cache, 3, list(range(13)), 13)
    assert result.num_cached_tokens == 12 and len(result.missing) == 3
    router.follow()
    assert not any(prefix[0] == 0 for prefix in router.prefixes.values()), "they are not there yet"
    cache.register_loaded(result.missing)
    cache.plan_step(make_plan([(3, 1, 12)]))
    cache.commit_step()
    cache.close_sequences([3])
    router.follow()
    assert {tuple(range(end)) for end in (4, 8, 12)} <= set(router.prefixes.values())
