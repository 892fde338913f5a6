"""`AttentionMetrics`: the Prometheus metrics of the attention worker; see `deploy/prometheus/metrics.md`.

Histograms are observed on the engine thread, a few times per step. Counts that engine and cache keep anyway are read
when a scraper asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.kv_cache import KVCache
from services.rpc.metrics import STEP_BUCKETS_S


class EngineCounts(Protocol):
    """Counts of the `AttentionEngine`; totals since its start.

    They are read from another thread, so numbers may belong to two neighbouring steps.
    """

    cache: KVCache
    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_copied_tokens: int


class AttentionMetrics:
    """`read_engine` gives the engine, or None before the first dense worker attached; any thread may call it."""

    def __init__(self, registry: CollectorRegistry, read_engine: Callable[[], EngineCounts | None]) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"twostroke_attention_{name}", text, registry=registry, buckets=STEP_BUCKETS_S)

        self._step = histogram("step_seconds", "One step, from its plan's turn to its end. Empty on CUDA.")
        self._step_compute = histogram(
            "step_compute_seconds", "The attention worker's own part of a step. Empty on CUDA."
        )
        self._step_wait = histogram(
            "step_wait_seconds", "The part of a step spent waiting for the dense worker. Empty on CUDA."
        )
        self._plan_lead = histogram("plan_lead_seconds", "From a plan's arrival until its turn.")
        self._handoff_aborts = Counter(
            "twostroke_attention_handoff_aborts_total", "Times the dense worker was lost or left.", registry=registry
        )
        registry.register(_CountsCollector(read_engine))

    def on_plan(self, lead_s: float) -> None:
        """Called on the engine thread when the step of a plan begins."""
        self._plan_lead.observe(lead_s)

    def on_step(self, duration_s: float, wait_s: float) -> None:
        """Called on the engine thread after a step, if the host sees its end."""
        self._step.observe(duration_s)
        self._step_compute.observe(duration_s - wait_s)
        self._step_wait.observe(wait_s)

    def on_handoff_abort(self) -> None:
        """Called when the dense worker was lost or left."""
        self._handoff_aborts.inc()


class _CountsCollector:
    """Reads the engine's counts when a scraper asks."""

    def __init__(self, read_engine: Callable[[], EngineCounts | None]) -> None:
        self._read_engine = read_engine

    def collect(self) -> Iterator[Metric]:
        engine = self._read_engine()
        if engine is None:
            return  # an unknown cache size is not zero
        cache = engine.cache
        yield _count_blocks(
            "kv_blocks",
            "Blocks of the KV cache: used by a sequence, cached (unused, content may be found again), or free.",
            cache.pools["blocks"],
        )
        yield _count_blocks(
            "kv_window_blocks",
            "The same for the layers with a window, if they have blocks of their own; otherwise 0.",
            cache.pools.get("windows"),
        )
        yield _count_blocks(
            "state_slots",
            "Slots for the states of recurrent layers, which a sequence needs whatever its length; otherwise 0.",
            cache.pools.get("states"),
        )
        tier = cache.tier.counts
        text = "Memory of the host tier; 0: none."
        yield GaugeMetricFamily("twostroke_attention_host_kv_bytes", text, tier.num_bytes)
        slots = GaugeMetricFamily(
            "twostroke_attention_host_kv_blocks",
            "Blocks of the host tier: used, by keys and values that may be found again, or free.",
            labels=["state"],
        )
        slots.add_metric(["used"], tier.num_used_slots)
        slots.add_metric(["free"], tier.num_slots - tier.num_used_slots)
        yield slots
        yield GaugeMetricFamily("twostroke_attention_sequences", "Open sequences.", cache.num_sequences)
        counters = {
            "steps": ("Steps completed.", engine.num_steps),
            "computed_tokens": ("Tokens that went through attention.", engine.num_computed_tokens),
            "cached_tokens": ("Tokens that were found in the KV cache.", engine.num_cached_tokens),
            "loaded_tokens": (
                "Tokens of these whose keys and values came from the host tier.",
                engine.num_loaded_tokens,
            ),
            "copied_tokens": (
                "Tokens of these whose keys and values came from another attention worker.",
                engine.num_copied_tokens,
            ),
            "host_kv_written_blocks": ("Blocks copied to the host tier.", tier.num_written_blocks),
            "host_kv_read_blocks": ("Blocks copied from the host tier.", tier.num_read_blocks),
            "host_kv_skipped_blocks": (
                "Full blocks that were not copied to the host tier: too many waited, or they were evicted before.",
                tier.num_skipped_blocks,
            ),
            "host_kv_corrupt_blocks": (
                "Blocks in the host tier whose checksum was wrong, and which were computed again.",
                tier.num_corrupt_blocks,
            ),
            "recovered_sequences": (
                "Sequences that a new dense worker took up where the old one left them.",
                cache.num_recovered_sequences,
            ),
            "recovered_tokens": ("Tokens of these that were not computed again.", cache.num_recovered_tokens),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"twostroke_attention_{name}", text, value)


def _count_blocks(name: str, text: str, pool: BlockPool | None) -> GaugeMetricFamily:
    num_blocks = num_free = num_cached = 0
    if pool is not None:
        num_blocks, num_free, num_cached = pool.num_blocks, pool.num_free_blocks, pool.num_cached_blocks
    blocks = GaugeMetricFamily(f"twostroke_attention_{name}", text, labels=["state"])
    blocks.add_metric(["used"], num_blocks - num_free)
    blocks.add_metric(["cached"], min(num_cached, num_free))
    blocks.add_metric(["free"], max(0, num_free - num_cached))
    return blocks
