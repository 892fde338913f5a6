"""Slots for the outputs of encoders under random events; after each call everything is counted again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.attn_worker.cache.build_cache import SourceSlots, build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.source_group import StepSources
from services.common.errors import InvalidRequest
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan

NUM_SLOTS, MAX_LEN = 3, 20


def make_cache() -> KVCache:
    return build_cache(64, 4, 64, sources=SourceSlots(NUM_SLOTS, MAX_LEN))


@pytest.mark.parametrize("seed", range(8))
def test_random_events(seed: int) -> None:
    """A simulated memory: what a slot holds when a step reads it is what its sequence asked for."""
    rng, cache = random.Random(seed), make_cache()
    content: dict[int, int] = {}  # by slot, of all steps so far in order
    source_of: dict[int, int] = {}  # by open sequence
    needs, lengths = set[int](), dict[int, int]()
    pending = list[dict[int, int]]()  # what steps that are not committed have written
    next_id = 1
    for _ in range(300):
        event = rng.choice(("open", "step", "step", "close", "commit", "die"))
        distinct = {source_of[each] for each in source_of}
        if event == "open" and len(source_of) < NUM_SLOTS:
            source = rng.randrange(6)
            opened = open_sequence(cache, next_id, [1, 2], 2, b"%d" % source, num_extra_rows=1 + source)
            source_of[next_id], lengths[next_id] = source, 0
            if not opened.has_extra_rows:
                needs.add(next_id)
            next_id += 1
        elif event == "step" and source_of:
            chosen = rng.sample(sorted(source_of), rng.randint(1, len(source_of)))
            written, writes = set[int](), list[tuple[int, int]]()
            running = {source_of[each] for each in source_of if each not in needs}
            for each in chosen:
                source = source_of[each]
                if each in needs and source not in running | written:
                    writes.append((each, 1 + source))
                    written.add(source)
            entries = [(each, 1, lengths[each]) for each in chosen if lengths[each] < 60]
            if not entries:
                continue
            plan = replace(make_plan(entries), extra_rows=tuple(writes))
            planned = cache.plan_step(plan)
            assert planned.errors == {}
            sources = planned.metadata.of(StepSources)
            for (seq_id, num_rows), (slot, length) in zip(writes, sources.writes, strict=True):
                assert num_rows == length and slot < NUM_SLOTS
                content[slot] = source_of[seq_id]
            for (seq_id, _, _), slot, length in zip(
                entries, sources.slots.tolist(), sources.lengths.tolist(), strict=True
            ):
                assert content[slot] == source_of[seq_id] and length == 1 + source_of[seq_id]
                lengths[seq_id] += 1
                needs.discard(seq_id)
            needs -= {each for each in chosen if each in needs and source_of[each] in written}
            pending.append({})
        elif event == "close" and source_of:
            seq_id = rng.choice(sorted(source_of))
            cache.plan_step(make_plan(close_seq_ids=[seq_id]))
            pending.append({})
            del source_of[seq_id], lengths[seq_id]
            needs.discard(seq_id)
        elif event == "commit" and pending:
            cache.commit_step()
            pending.pop(0)
        elif event == "die":
            cache.abort_steps()
            pending.clear()
            for seq_id, source in list(source_of.items()):
                opened = open_sequence(cache, seq_id, [1, 2], 2, b"%d" % source, num_extra_rows=1 + source)
                lengths[seq_id] = opened.num_cached_tokens
                needs.discard(seq_id)
                if not opened.has_extra_rows:
                    needs.add(seq_id)
        cache.check_integrity()
        assert cache.pools["sources"].num_used_blocks <= max(len(distinct), len({*source_of.values()}))


def test_orphans_give_up_their_slots() -> None:
    cache = make_cache()
    for seq_id in range(NUM_SLOTS):
        open_sequence(cache, seq_id, [1], 1, b"%d" % seq_id, num_extra_rows=4)
        cache.plan_step(replace(make_plan([(seq_id, 1, 0)]), extra_rows=((seq_id, 4),)))
        cache.commit_step()
    cache.abort_steps()  # the dense worker has died
    open_sequence(cache, 9, [1], 1, b"other", num_extra_rows=4)
    assert cache.plan_step(replace(make_plan([(9, 1, 0)]), extra_rows=((9, 4),))).errors == {}
    cache.commit_step()
    assert not open_sequence(cache, 0, [1], 1, b"0", num_extra_rows=4).has_extra_rows
    assert open_sequence(cache, 1, [1], 1, b"1", num_extra_rows=4).has_extra_rows
    cache.check_integrity()


def test_rows_of_a_sequence_that_is_not_there_are_written_for_nobody() -> None:
    """They cross the seam all the same: both workers must agree on the handoffs of a step."""
    cache = make_cache()
    open_sequence(cache, 1, [1], 1, b"1", num_extra_rows=4)
    planned = cache.plan_step(replace(make_plan([(1, 1, 0), (7, 1, 0)]), extra_rows=((7, 6), (1, 4))))
    assert planned.errors.keys() == {7}
    assert planned.metadata.of(StepSources).writes == ((NUM_SLOTS, 6), (planned.metadata.of(StepSources).slots[0], 4))
    assert planned.metadata.of(StepSources).slots[1] == NUM_SLOTS


def test_a_sequence_whose_source_nobody_writes_is_an_error_of_its_own() -> None:
    cache = make_cache()
    open_sequence(cache, 1, [1], 1, b"1", num_extra_rows=4)
    planned = cache.plan_step(make_plan([(1, 1, 0)]))
    assert "has not been written" in str(planned.errors[1])
    with pytest.raises(InvalidRequest, match="has 21 rows, 1 to 20 are possible"):
        open_sequence(cache, 2, [1], 1, b"2", num_extra_rows=21)
    cache.check_integrity()
