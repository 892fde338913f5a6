"""A kind of group that the cache has never seen: its verbs alone decide what sequences may do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest

from services.attn_worker.cache.block_group import BlockGroup
from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.cached_sequence import CachedSequence, PlannedStep, SequenceRows
from services.attn_worker.cache.group import Batch
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.step_metadata import StepMetadata
from services.common.errors import CapacityError, RequestAborted
from services.common.kv_cache.sliding_window import SlidingWindow
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan

BLOCK_SIZE, STRIDE = 4, 8
PROMPT = list(range(10, 30))  # five full blocks


class StrideGroup:
    """A slot for each sequence, whatever its length; a sequence can begin only at multiples of STRIDE tokens."""

    name = "strides"
    window = None
    needs_every_block = False

    def __init__(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots)
        self.slots: dict[int, int] = {}  # by row
        self.num_commits = self.num_aborts = 0

    def add_rows(self, num_new: int) -> None: ...

    def free_row(self, row: int) -> int:
        return self.pool.release([self.slots.pop(row)] if row in self.slots else [])

    def match(self, digests: Sequence[bytes]) -> int:
        return len(digests) * BLOCK_SIZE // STRIDE * STRIDE // BLOCK_SIZE

    def adopt(self, row: int, digests: Sequence[bytes], num_offered: int, num_tokens: int) -> int:
        return 0

    def register(self, row: int, digests: Sequence[bytes], first: int) -> None: ...

    def num_to_fork(self, position: int) -> int:
        return 1

    def fork(self, row: int, other_row: int, position: int) -> list[tuple[int, int]]:
        self.take(other_row, 1)
        return [(self.slots[row], self.slots[other_row])]

    def lack_at(self, row: int, position: int) -> str | None:
        return f"{position} is no multiple of {STRIDE}" if position % STRIDE else None

    def is_shared(self, row: int, position: int) -> bool:
        return False

    def kept_length(self, row: int, length: int, num_hashed_blocks: int) -> int | None:
        return length // STRIDE * STRIDE

    def go_back(self, row: int, position: int, num_hashed_blocks: int) -> None: ...

    def truncate(self, row: int, length: int, num_hashed_blocks: int) -> int:
        return 0 if length else self.free_row(row)

    def evict(self, rows: SequenceRows) -> None: ...

    def evict_before(self, row: int, position: int) -> int:
        return 0

    def lacking(self, batch_rows: np.ndarray, positions: np.ndarray) -> Iterable[int]:
        return ()

    def num_missing(self, batch_rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.array([row not in self.slots for row in batch_rows.tolist()], np.int64)

    def make_room(self, num_blocks: int, rows: SequenceRows, orphans: Iterable[int]) -> None:
        self.pool.check_room(num_blocks)

    def take(self, row: int, num_blocks: int) -> None:
        [self.slots[row]] = self.pool.allocate(num_blocks)

    def describe(self, batch: Batch, rows: SequenceRows, metadata: StepMetadata | None) -> StepMetadata:
        assert metadata is not None
        return metadata

    def commit(self, step_rows: Sequence[int], rows: SequenceRows, sequences: Mapping[int, CachedSequence]) -> None:
        self.num_commits += 1

    def abort(self) -> None:
        self.num_aborts += 1

    def check_integrity(self, sequences: Mapping[int, CachedSequence], rows: SequenceRows) -> None:
        assert self.slots.keys() <= sequences.keys()
        self.pool.check_integrity([list(self.slots.values()).count(slot) for slot in range(self.pool.num_blocks)])


@pytest.fixture
def strides() -> StrideGroup:
    return StrideGroup(num_slots=2)


@pytest.fixture
def cache(strides: StrideGroup) -> KVCache:
    return KVCache(BlockGroup(50, SlidingWindow(BLOCK_SIZE), 16), [strides], max_model_len=64)


def run(cache: KVCache, *entries: tuple[int, int, int], **parts: object) -> PlannedStep:
    planned = cache.plan_step(make_plan(entries, **parts))
    cache.commit_step()
    cache.check_integrity()
    return planned


def prefill(cache: KVCache, seq_id: int) -> int:
    """Opens and computes the prompt; returns how many of its tokens were cached."""
    num_cached = open_sequence(cache, seq_id, PROMPT, len(PROMPT)).num_cached_tokens
    assert not run(cache, (seq_id, len(PROMPT) - num_cached, num_cached)).errors
    return num_cached


def test_a_prefix_ends_where_the_new_group_can_begin(cache: KVCache) -> None:
    assert prefill(cache, 1) == 0
    open_sequence(cache, 2, [*PROMPT[:15], 99], 16)
    assert cache.orphaned_blocks[2] == 2, "three blocks agree, and 8 tokens are the last multiple before their end"
    assert prefill(cache, 3) == 16


def test_sequences_beyond_its_slots_take_no_blocks_of_other_groups(cache: KVCache, strides: StrideGroup) -> None:
    prefill(cache, 1)
    prefill(cache, 2)
    open_sequence(cache, 3, [7] * 9, 9)
    planned = run(cache, (3, 9, 0))
    assert isinstance(planned.errors[3], CapacityError) and cache.orphaned_blocks[3] == 0
    run(cache, close_seq_ids=[1])
    assert not run(cache, (3, 9, 0)).errors
    run(cache, close_seq_ids=[2, 3])
    assert strides.pool.num_used_blocks == cache.num_used_blocks == 0


def test_it_decides_where_sequences_are_forked_and_what_is_copied(cache: KVCache, strides: StrideGroup) -> None:
    prefill(cache, 1)
    error = run(cache, forks=[(1, 2, 12)]).errors[2]
    assert isinstance(error, RequestAborted) and "12 is no multiple of 8" in str(error)
    planned = run(cache, forks=[(1, 2, 16)])
    slots = strides.slots.values()
    assert not planned.errors and planned.block_copies == [[], [tuple(slots)]] and len(slots) == 2


def test_it_decides_where_a_sequence_goes_on_after_a_death(cache: KVCache, strides: StrideGroup) -> None:
    prefill(cache, 1)
    assert not cache.plan_step(make_plan([(1, 1, 20)])).errors
    cache.abort_steps()
    cache.check_integrity()
    assert (strides.num_commits, strides.num_aborts) == (1, 1)
    assert open_sequence(cache, 1, [*PROMPT, 5], len(PROMPT)).num_cached_tokens == 16
    assert not run(cache, (1, 5, 16)).errors
