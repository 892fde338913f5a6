"""`PoolMetrics`: the load under the names that Kubernetes' inference gateway reads to choose among servers.

They are vLLM's names, which its Gateway API Inference Extension reads by default ("Model Server Protocol"). The workers
are asked when a scraper asks; figures of a worker that does not answer are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.gateway.link.worker_load import ANSWER_TIMEOUT_S, Load, WorkerLoad

WAIT_S = ANSWER_TIMEOUT_S + 1.0  # for the event loop, which asks the workers
NAMES = frozenset({  # every gateway process tells the same of them
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
})


class PoolMetrics(Collector):
    """A collector, called on the scraper's thread. Created in the event loop that reads the load."""

    def __init__(self, worker_load: WorkerLoad, model_name: str) -> None:
        self._worker_load = worker_load
        self._model_name = model_name
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        load = self._read()
        if load.requests is not None:
            yield self._gauge(
                "vllm:num_requests_waiting", "Sequences in the waiting queue.", load.requests.num_waiting
            )
            yield self._gauge(
                "vllm:num_requests_running", "Sequences that take part in steps.", load.requests.num_running
            )
        if load.kv_cache is not None:
            cache = load.kv_cache
            yield self._gauge(
                "vllm:kv_cache_usage_perc",
                "Fraction of the KV cache that sequences hold, from 0 to 1.",
                1 - cache.num_free_blocks / cache.num_blocks,
            )
            info = GaugeMetricFamily(
                "vllm:cache_config_info",
                "Always 1; the labels tell the size of the KV cache.",
                labels=["model_name", "block_size", "num_gpu_blocks"],
            )
            info.add_metric([self._model_name, str(cache.block_size), str(cache.num_blocks)], 1)
            yield info

    def _read(self) -> Load:
        future = asyncio.run_coroutine_threadsafe(self._worker_load.read(), self._loop)
        try:
            return future.result(WAIT_S)
        except TimeoutError:  # the event loop is that busy
            future.cancel()
            return Load(None, None)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge

