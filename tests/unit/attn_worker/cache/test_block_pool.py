"""BlockPool, compared with a model made of plain lists, and examples of its guarantees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.attn_worker.cache.block_pool import BlockPool, block_digest, root_digest
from services.common.errors import CapacityError
from tests.support.examples import examples

NUM_BLOCKS = 7


def test_a_failed_allocation_takes_no_blocks() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(CapacityError, match="2 KV blocks are needed, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free_blocks == 1


def test_the_tail_of_a_released_sequence_is_evicted_before_its_prefix() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for index, block_id in enumerate(blocks):
        pool.register_hash(block_id, bytes([index]))
    pool.release(blocks)
    assert [pool.allocate(1)[0] for _ in range(3)] == blocks[::-1]


def test_the_least_recently_used_sequence_is_evicted_first_and_a_hit_counts_as_use() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(2)
    pool.register_hash(old, b"old")
    pool.register_hash(new, b"new")
    pool.release([old])
    pool.release([new])
    pool.pin(pool.lookup(b"old"))
    pool.release([old])
    assert pool.allocate(1) == [new]
    assert pool.lookup(b"new") is None and pool.lookup(b"old") == old


def test_blocks_without_a_hash_are_allocated_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, blank = pool.allocate(2)
    pool.register_hash(cached, b"x")
    pool.release([cached])
    pool.release([blank])
    assert cached not in pool.allocate(2)
    assert pool.num_cached_blocks == 1 and pool.lookup(b"x") == cached


def test_of_two_blocks_with_one_digest_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register_hash(first, b"x")
    pool.register_hash(second, b"x")
    pool.release([second])
    assert pool.lookup(b"x") == first and pool.num_cached_blocks == 0


def test_digests_depend_on_every_part_and_on_the_ends_of_parts() -> None:
    roots = [
        root_digest(b"ab", b"c"),
        root_digest(b"a", b"bc"),
        root_digest(b"abc", b""),
        root_digest(b"ab", b"c", 1),
        root_digest(b"ab", b"c", 2),
    ]
    assert len(set(roots)) == len(roots)
    assert len(set(map(len, roots))) == 1 and len(roots[0]) == 16
    assert block_digest(roots[0], b"1234") != block_digest(roots[1], b"1234")
    assert block_digest(roots[0], b"1234") != block_digest(roots[0], b"1235")


class BlockPoolMachine(RuleBasedStateMachine):
    """Makes calls in any order, and compares the pool with simple reference counts, a dict and an eviction list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.digests: dict[int, bytes] = {}
        self.evictable: list[int] = []  # the next one to be evicted comes first

    def used(self) -> list[int]:
        return [block for block, count in self.refs.items() if count]

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        num_free = NUM_BLOCKS - len(self.used())
        if num_blocks > num_free:
            with pytest.raises(CapacityError):
                self.pool.allocate(num_blocks)
            return
        blocks = self.pool.allocate(num_blocks)
        assert len(set(blocks)) == num_blocks
        for block in blocks:
            blank = {other for other, count in self.refs.items() if not count} - set(self.evictable)
            if blank:
                assert block in blank
            else:
                assert block == self.evictable.pop(0)
                del self.digests[block]
            self.refs[block] = 1

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.used()), min_size=1, unique=True))
        num_freed = self.pool.release(blocks)
        freed = [block for block in blocks[::-1] if self.refs[block] == 1]
        assert num_freed == len(freed)
        for block in blocks:
            self.refs[block] -= 1
        self.evictable.extend(block for block in freed if block in self.digests)

    @precondition(lambda self: set(self.used()) - set(self.digests))
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, digest: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.used()) - set(self.digests))))
        self.pool.register_hash(block, digest)
        if digest not in self.digests.values():
            self.digests[block] = digest

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used()))
        self.pool.unregister(block)
        self.digests.pop(block, None)

    @rule(digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def look_up_and_pin(self, digest: bytes) -> None:
        block = self.pool.lookup(digest)
        assert block == next((block for block, own in self.digests.items() if own == digest), None)
        if block is not None:
            assert self.pool.pin(block) == (self.refs[block] == 0)
            self.refs[block] += 1
            if block in self.evictable:
                self.evictable.remove(block)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity(list(self.refs.values()))
        assert self.pool.num_used_blocks == len(self.used())
        assert self.pool.num_free_blocks + self.pool.num_used_blocks == NUM_BLOCKS
        assert self.pool.num_cached_blocks == len(self.evictable)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8, unique=True), st.data())
def test_integrity_check_notices_any_wrong_count(counts: list[int], data: st.DataObject) -> None:
    pool = BlockPool(len(counts))
    taken = pool.allocate(data.draw(st.integers(0, len(counts))))
    expected = [int(block in taken) for block in range(len(counts))]
    pool.check_integrity(expected)
    wrong = data.draw(st.integers(0, len(counts) - 1))
    expected[wrong] += 1
    with pytest.raises(AssertionError):
        pool.check_integrity(expected)
