"""The attention worker's metrics of the KV cache and of steps."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from services.attn_worker.cache.build_cache import WindowBlocks, build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.tiers.tier import TierCounts
from services.attn_worker.metrics import AttentionMetrics
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan


class CountingEngine:
    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.num_steps, self.num_computed_tokens, self.num_cached_tokens = 5, 70, 8
        self.num_loaded_tokens, self.num_copied_tokens = 4, 4


def test_every_block_is_used_cached_or_free() -> None:
    cache, registry = build_cache(num_blocks=10, block_size=4, max_model_len=40), CollectorRegistry()
    cache.use_weights(b"w")
    AttentionMetrics(registry, lambda: CountingEngine(cache))

    def blocks() -> list[float | None]:
        name = "twostroke_attention_kv_blocks"
        return [registry.get_sample_value(name, {"state": state}) for state in ("used", "cached", "free")]

    assert blocks() == [0, 0, 10]
    open_sequence(cache, 1, list(range(9)), 9)
    cache.plan_step(make_plan([(1, 9, 0)]))
    cache.commit_step()
    assert blocks() == [3, 0, 7]
    assert registry.get_sample_value("twostroke_attention_sequences") == 1
    cache.close_sequences([1])
    assert blocks() == [0, 2, 8]  # two full blocks can be found again


def test_blocks_of_layers_with_a_window_are_counted_by_themselves() -> None:
    cache, registry = build_cache(10, 4, 40, window_blocks=WindowBlocks(6, 8)), CollectorRegistry()
    AttentionMetrics(registry, lambda: CountingEngine(cache))
    open_sequence(cache, 1, list(range(17)), 17)
    for entry in ((1, 17, 0), (1, 1, 17)):
        cache.plan_step(make_plan([entry]))
        cache.commit_step()
    name = "twostroke_attention_kv_window_blocks"
    blocks = [registry.get_sample_value(name, {"state": state}) for state in ("used", "cached", "free")]
    assert blocks == [3, 2, 3], "token 17 reads from token 12 on; one block before is kept, two can be found"
    assert registry.get_sample_value("twostroke_attention_kv_blocks", {"state": "used"}) == 5


def test_slots_of_states_are_counted() -> None:
    cache, registry = build_cache(10, 4, 40, num_state_slots=9), CollectorRegistry()
    AttentionMetrics(registry, lambda: CountingEngine(cache))
    open_sequence(cache, 1, list(range(9)), 9)
    for entry in ((1, 9, 0), (1, 1, 9)):
        cache.plan_step(make_plan([entry]))
        cache.commit_step()
    name = "twostroke_attention_state_slots"
    slots = [registry.get_sample_value(name, {"state": state}) for state in ("used", "cached", "free")]
    assert slots == [2, 1, 6], "the last two states, and that of the prompt's last full block"


def test_the_host_tier_is_counted() -> None:
    cache, registry = build_cache(10, 4, 40), CollectorRegistry()
    AttentionMetrics(registry, lambda: CountingEngine(cache))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"twostroke_attention_{name}", labels)

    assert value("host_kv_bytes") == value("host_kv_blocks", state="free") == value("host_kv_blocks", state="used") == 0
    cache.tier.counts = TierCounts(9000, 12, 5, 7, 6, 4, 3)
    assert value("host_kv_bytes") == 9000
    assert (value("host_kv_blocks", state="used"), value("host_kv_blocks", state="free")) == (5, 7)
    counters = [value(f"host_kv_{name}_blocks_total") for name in ("written", "read", "skipped", "corrupt")]
    assert counters == [7, 6, 4, 3]
    assert (value("cached_tokens_total"), value("loaded_tokens_total")) == (8, 4)


def test_a_recovered_sequence_is_counted_with_its_kept_tokens() -> None:
    cache, registry = build_cache(num_blocks=10, block_size=4, max_model_len=40), CollectorRegistry()
    cache.use_weights(b"w")
    AttentionMetrics(registry, lambda: CountingEngine(cache))
    open_sequence(cache, 1, list(range(9)), 9)
    cache.plan_step(make_plan([(1, 9, 0)]))
    cache.commit_step()
    open_sequence(cache, 1, [*range(9), 50], 9)
    open_sequence(cache, 2, [8, 9], 2)
    assert registry.get_sample_value("twostroke_attention_recovered_sequences_total") == 1
    assert registry.get_sample_value("twostroke_attention_recovered_tokens_total") == 9


def test_without_a_cache_there_are_no_cache_metrics() -> None:
    registry = CollectorRegistry()
    AttentionMetrics(registry, lambda: None)
    assert registry.get_sample_value("twostroke_attention_steps_total") is None
    assert registry.get_sample_value("twostroke_attention_step_seconds_count") == 0


def test_steps_plans_and_aborted_handoffs_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = AttentionMetrics(registry, lambda: None)
    metrics.on_plan(0.003)
    metrics.on_step(0.005, wait_s=0.002)
    metrics.on_handoff_abort()
    names = ("plan_lead", "step", "step_wait", "step_compute")
    sums = {name: registry.get_sample_value(f"twostroke_attention_{name}_seconds_sum") for name in names}
    assert sums == pytest.approx({"plan_lead": 0.003, "step": 0.005, "step_wait": 0.002, "step_compute": 0.003})
    assert registry.get_sample_value("twostroke_attention_handoff_aborts_total") == 1
