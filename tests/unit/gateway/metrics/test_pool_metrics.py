"""The metrics for Kubernetes' inference gateway: the load of the workers under vLLM's names."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from services.gateway.link.worker_load import CacheLoad, Load, RequestLoad
from services.gateway.metrics.pool_metrics import PoolMetrics
from tests.support.running_gateway import run

LABELS = {"model_name": "tiny"}


class FixedLoad:
    def __init__(self, load: Load) -> None:
        self.load = load

    async def read(self) -> Load:
        return self.load


async def scrape(load: Load) -> CollectorRegistry:
    """A registry, to be read on another thread while the event loop runs."""
    registry = CollectorRegistry()
    registry.register(PoolMetrics(FixedLoad(load), "tiny"))  # type: ignore[arg-type]
    return registry


def test_the_load_of_the_workers_under_the_names_that_the_endpoint_picker_reads() -> None:
    async def test() -> None:
        registry = await scrape(Load(RequestLoad(num_running=3, num_waiting=2), CacheLoad(100, 60, 16)))

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {**LABELS, **labels})

        names = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
        found = [await asyncio.to_thread(value, name) for name in names]
        assert found == [2, 3, 0.4]
        info = {"block_size": "16", "num_gpu_blocks": "100"}
        assert await asyncio.to_thread(lambda: value("vllm:cache_config_info", **info)) == 1

    run(test())


def test_figures_of_a_worker_that_does_not_answer_are_left_out() -> None:
    async def test() -> None:
        registry = await scrape(Load(None, CacheLoad(100, 100, 16)))
        names = await asyncio.to_thread(lambda: {family.name for family in registry.collect()})
        assert names == {"vllm:kv_cache_usage_perc", "vllm:cache_config_info"}

    run(test())
