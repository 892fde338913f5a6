"""Which KV cache a sequence goes to: that of its prefix, unless it is busy; else the one with the most room."""

from __future__ import annotations

from services.common.sampling_params import SamplingParams
from services.dense_worker.attention_workers.spread_placement import CHUNK_TOKENS, SpreadPlacement
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session
from tests.support.dense.sequences import new_sequence

LIMITS = SchedulerLimits(8, 512, 1600, 8, "max_utilization")
SHARED = list(range(3 * CHUNK_TOKENS))


def make_session(*num_free: int, num_blocks: int = 100) -> Session:
    caches = tuple(AttachedCache(index, num_blocks, free, {}) for index, free in enumerate(num_free))
    return Scheduler(LIMITS).begin(Attachment(1, 1, {}, 16, caches, 1600))


def make(seq_id: int, prompt: list[int]) -> Sequence:
    return new_sequence(seq_id, f"r{seq_id}", prompt, SamplingParams(), max_tokens=8)


def put(placement: SpreadPlacement, sequence: Sequence, cache_id: int) -> None:
    sequence.cache_id = cache_id
    placement.note(sequence)


def test_without_a_prefix_the_cache_with_the_most_room_is_chosen() -> None:
    assert SpreadPlacement().choose(make(1, SHARED), [0, 1, 2], make_session(40, 90, 60)) == 1


def test_only_caches_that_have_room_are_chosen() -> None:
    assert SpreadPlacement().choose(make(1, SHARED), [0, 2], make_session(40, 90, 60)) == 2


def test_a_prompt_goes_where_its_prefix_is() -> None:
    placement = SpreadPlacement()
    put(placement, make(1, [*SHARED, 1]), 0)
    assert placement.choose(make(2, [*SHARED, 2]), [0, 1], make_session(80, 90)) == 0


def test_of_several_prefixes_the_longest_counts() -> None:
    placement = SpreadPlacement()
    put(placement, make(1, SHARED), 0)
    put(placement, make(2, [*SHARED[:CHUNK_TOKENS], *[7] * CHUNK_TOKENS]), 1)  # the first chunk is in both
    assert placement.choose(make(3, [*SHARED, 2]), [0, 1], make_session(80, 80)) == 0


def test_a_prefix_does_not_count_in_a_cache_that_has_promised_much_more_than_others() -> None:
    placement = SpreadPlacement()
    put(placement, make(1, SHARED), 0)
    assert placement.choose(make(2, SHARED), [0, 1], make_session(87, 100)) == 0  # its 13 blocks
    assert placement.choose(make(2, SHARED), [0, 1], make_session(86, 100)) == 1
    assert placement.choose(make(2, SHARED), [0, 1], make_session(67, 90)) == 0  # and twice those of the other one
    assert placement.choose(make(2, SHARED), [0, 1], make_session(66, 90)) == 1


def test_a_prefix_of_a_cache_that_is_gone_does_not_count() -> None:
    placement = SpreadPlacement()
    put(placement, make(1, SHARED), 0)
    placement.forget(0)
    assert placement.choose(make(2, SHARED), [0, 1], make_session(80, 90)) == 1


def test_other_prefix_keys_are_other_prefixes() -> None:
    placement = SpreadPlacement()
    put(placement, make(1, SHARED), 0)
    salted = new_sequence(2, "r2", SHARED, SamplingParams(), max_tokens=8, cache_salt="other")
    assert placement.choose(salted, [0, 1], make_session(80, 90)) == 1
