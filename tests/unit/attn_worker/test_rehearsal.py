"""The attention worker rehearses an old plan in a KV cache of its own, and keeps nothing of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.attn_worker.attachment import Attachment
from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.rehearsal import Rehearsal
from services.step import NewSequence, PlanEntry, StepPlan
from services.step.codec import encode_plan
from tests.support.attention.open_now import open_sequence
from tests.support.plans import plan_of

BLOCK_SIZE, MAX_LEN = 4, 400
CHANNEL: Any = SimpleNamespace(abort=lambda: None, close=lambda: None)


def opening(num_tokens: int, seq_id: int = 5) -> StepPlan:
    new = NewSequence(seq_id, "r", tuple(range(num_tokens)), num_tokens, starts_empty=True)
    return plan_of(1, PlanEntry(seq_id, 0, num_tokens, 1), new_sequences=(new,))


def note(rehearsal: Rehearsal, plan: StepPlan) -> None:
    rehearsal.note(encode_plan(plan).SerializeToString(), plan)


def new_cache() -> KVCache:
    return build_cache(MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, MAX_LEN, enable_prefix_cache=False)


def test_a_plan_is_rehearsed_as_it_would_be_run_and_leaves_its_cache_empty() -> None:
    cache, runner = new_cache(), Mock()
    rehearsal = Rehearsal(cache, runner)
    for num_tokens in (30, 7, 399):
        plan = opening(num_tokens)
        other = new_cache()
        open_sequence(other, 5, range(num_tokens), num_tokens)
        expected = other.plan_step(plan).metadata
        note(rehearsal, plan)
        read = rehearsal.read()
        assert read is not None
        rehearsal.run(read, CHANNEL)
        step, channel = runner.rehearse.call_args.args
        assert channel is CHANNEL
        for name in ("num_tokens", "context_lens", "positions", "rope_lens"):
            assert np.array_equal(getattr(step, name), getattr(expected, name)), name
        assert cache.num_sequences == 0
        assert cache.num_free_blocks == cache.num_blocks
        cache.check_integrity()


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(1, PlanEntry(5, 3, 1, 1)),
        plan_of(1, PlanEntry(6, 3, 1, 1), *opening(4).entries, new_sequences=opening(4).new_sequences),
        plan_of(1, PlanEntry(6, 3, 1, 1), new_sequences=opening(4).new_sequences),
        opening(3000),
    ],
    ids=["without-a-new-sequence", "of-several-sequences", "of-another-sequence", "long"],
)
def test_other_plans_are_not_kept(plan: StepPlan) -> None:
    rehearsal = Rehearsal(new_cache(), Mock())
    note(rehearsal, plan)
    assert rehearsal.read() is None
    note(rehearsal, opening(4))
    note(rehearsal, plan)
    read = rehearsal.read()
    assert read is not None
    assert read.entries == opening(4).entries


def test_its_cache_is_empty_again_after_an_error() -> None:
    cache, runner = new_cache(), Mock()
    runner.rehearse.side_effect = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        Rehearsal(cache, runner).run(opening(9), CHANNEL)
    assert cache.num_sequences == 0
    assert cache.num_free_blocks == cache.num_blocks


def test_an_error_is_logged_and_ends_rehearsing() -> None:
    rehearsal = Mock(**{"run.side_effect": ValueError("no")})
    engine = AttentionEngine(new_cache(), Mock(), AttentionMetrics(CollectorRegistry(), lambda: None), None, rehearsal)
    engine._attachment = Attachment(1, {0: CHANNEL}, 100)
    with capture_logs() as logs:
        for _ in range(2):
            engine.rehearse(engine._attachment, replace(opening(3), lane=0))
    [entry] = logs
    assert entry["log_level"] == "error" and str(entry["exc_info"]) == "no"
    assert rehearsal.run.call_count == 1 and engine.rehearsal is None


def test_the_engine_rehearses_only_for_the_present_attachment_without_sequences() -> None:
    rehearsal = Mock()
    metrics = AttentionMetrics(CollectorRegistry(), lambda: None)
    engine = AttentionEngine(new_cache(), Mock(), metrics, rehearsal=rehearsal)
    old, present = (Attachment(number, {0: CHANNEL}, 100) for number in (1, 2))
    engine._attachment = present
    engine.rehearse(old, opening(3))
    present.request_ids[5] = "r"
    engine.rehearse(present, opening(3))
    present.request_ids.clear()
    under_way = Mock()
    under_way.is_done.return_value = False
    present.running.append((under_way, opening(3)))
    engine.rehearse(present, opening(3))
    assert not rehearsal.run.called
    present.running.clear()
    plan = replace(opening(3), lane=0)
    engine.rehearse(present, plan)
    rehearsal.run.assert_called_once_with(plan, CHANNEL)
