"""`SglangMetrics`: the gateway's metrics under SGLang's names as well, with `metrics.compat = "sglang"`.

What the gateway measures anyway is copied when a scraper asks. `deploy/prometheus/sglang.md` lists what corresponds to
what, and what has no counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.gateway.metrics.copied import copied
from services.gateway.metrics.gateway_metrics import GatewayMetrics
from services.gateway.metrics.pool_metrics import PoolMetrics

PREFIX = "sglang:"
# Names without the suffix _total of counters.
COPIES = {
    "vllm:num_requests_running": "num_running_reqs",
    "vllm:num_requests_waiting": "num_queue_reqs",
    "vllm:kv_cache_usage_perc": "token_usage",
    "twostroke_gateway_prompt_tokens": "prompt_tokens",
    "twostroke_gateway_cached_tokens": "cached_tokens",
    "twostroke_gateway_generated_tokens": "generation_tokens",
    "twostroke_gateway_answers": "num_requests",
    "twostroke_gateway_time_to_first_token_seconds": "time_to_first_token_seconds",
    "twostroke_gateway_inter_token_latency_seconds": "inter_token_latency_seconds",
    "twostroke_gateway_request_duration_seconds": "e2e_request_latency_seconds",
}
USED_TOKENS, ALL_TOKENS = f"{PREFIX}num_used_tokens", f"{PREFIX}max_total_num_tokens"
NAMES = frozenset({  # every gateway process tells the same of them
    USED_TOKENS,
    ALL_TOKENS,
    *(PREFIX + name for family, name in COPIES.items() if family.startswith("vllm:")),
})


class SglangMetrics(Collector):
    """Yields what `PoolMetrics` does, and the copies. Called on the scraper's thread."""

    def __init__(self, gateway: GatewayMetrics, pool: PoolMetrics, model_name: str) -> None:
        self._gateway = gateway
        self._pool = pool
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        pool = {family.name: family for family in self._pool.collect()}
        for family in chain(self._gateway.collect(), pool.values()):
            if family.name in pool:
                yield family
            if (name := COPIES.get(family.name)) is not None:
                yield copied(family, PREFIX + name, self._labels, lambda outcome: {})
        if (config := pool.get("vllm:cache_config_info")) is not None:
            labels = config.samples[0].labels
            num_tokens = int(labels["block_size"]) * int(labels["num_gpu_blocks"])
            num_used = round(num_tokens * pool["vllm:kv_cache_usage_perc"].samples[0].value)
            yield self._gauge(USED_TOKENS, "Tokens of the KV cache's blocks that sequences hold.", num_used)
            yield self._gauge(ALL_TOKENS, "Tokens that the KV cache has room for.", num_tokens)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge
