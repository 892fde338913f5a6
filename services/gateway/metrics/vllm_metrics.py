"""`VllmMetrics`: the gateway's metrics under vLLM's names as well, with `metrics.compat = "vllm"`.

Routers, autoscalers and dashboards made for vLLM find what they read. What the gateway measures anyway is copied when a
scraper asks, so tokens cost nothing more; an answer that ends costs a few observations. `deploy/prometheus/vllm.md`
lists what corresponds to what.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.gateway.metrics.copied import copied
from services.gateway.metrics.gateway_metrics import FINISHED, EndedAnswer, GatewayMetrics
from services.gateway.metrics.pool_metrics import WAIT_S, PoolMetrics
from services.rpc.metrics import LATENCY_BUCKETS_S

PREFIX = "vllm:"
# Names without the suffix _total of counters. Some have an older name, which routers and dashboards still read.
COPIES = {
    "twostroke_gateway_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "twostroke_gateway_inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "twostroke_gateway_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "twostroke_gateway_request_duration_seconds": ("e2e_request_latency_seconds",),
    "twostroke_gateway_prompt_tokens": ("prompt_tokens", "prefix_cache_queries", "gpu_prefix_cache_queries"),
    "twostroke_gateway_cached_tokens": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "twostroke_gateway_generated_tokens": ("generation_tokens",),
    "twostroke_gateway_answers": ("request_success",),
    "vllm:kv_cache_usage_perc": ("gpu_cache_usage_perc",),
}
FINISHED_REASONS = {"cancelled": "abort"}  # by outcome; all others have the same name
TOKEN_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class AdapterUse(NamedTuple):
    """Names of adapters that have sequences, by whether one of these takes part in steps."""

    running: set[str]
    waiting: set[str]


class VllmMetrics(Collector):
    """Yields what `PoolMetrics` does, the copies, and which adapters are in use. Called on the scraper's thread."""

    def __init__(
        self,
        registry: CollectorRegistry,
        gateway: GatewayMetrics,
        pool: PoolMetrics,
        model_name: str,
        max_loras: int,
        read_adapters: Callable[[], AdapterUse],
    ) -> None:
        """Created in the event loop, in which `read_adapters` is called; it is not if `max_loras` is 0."""
        self._gateway = gateway
        self._pool = pool
        self._labels = {"model_name": model_name}
        self._max_loras = max_loras
        self._read_adapters = read_adapters
        self._loop = asyncio.get_running_loop()
        self._requests = _RequestHistograms(registry, model_name)
        gateway.watch_ends(self._requests.observe)

    def collect(self) -> Iterator[Metric]:
        for family in chain(self._gateway.collect(), self._pool.collect()):
            if family.name.startswith(PREFIX):
                yield family
            for name in COPIES.get(family.name, ()):
                yield copied(family, PREFIX + name, self._labels, _finished_reason)
        if self._max_loras:
            yield from self._adapters()

    def _adapters(self) -> Iterator[Metric]:
        async def read() -> AdapterUse:
            return self._read_adapters()

        future = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            use = future.result(WAIT_S)
        except TimeoutError:  # the event loop is that busy
            future.cancel()
            return
        info = GaugeMetricFamily(
            f"{PREFIX}lora_requests_info",
            "The time of the scrape; the labels name the adapters that have sequences.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names = [",".join(sorted(each)) for each in (use.running, use.waiting)]
        info.add_metric([str(self._max_loras), *names], time.time())
        yield info


def _finished_reason(outcome: str) -> dict[str, str]:
    """The label of an outcome; several may have one reason there."""
    return {"finished_reason": FINISHED_REASONS.get(outcome, outcome)}


class _RequestHistograms:
    """What vLLM measures of a finished answer, and the gateway under no other name."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
            made = Histogram(f"{PREFIX}request_{name}", text, ["model_name"], registry=registry, buckets=buckets)
            return made.labels(model_name)

        self._prompt_tokens = histogram("prompt_tokens", "Prompt tokens of a finished answer.", TOKEN_BUCKETS)
        self._output_tokens = histogram("generation_tokens", "Output tokens of a finished answer.", TOKEN_BUCKETS)
        self._n = histogram("params_n", "Answers that the request of a finished answer asked for.", TOKEN_BUCKETS)
        self._max_tokens = histogram("params_max_tokens", "Tokens that a finished answer could have.", TOKEN_BUCKETS)
        self._queue = histogram("queue_time_seconds", "From a sequence's arrival until its first step began.")
        self._prefill = histogram("prefill_time_seconds", "From then until the answer's first token was here.")
        self._decode = histogram("decode_time_seconds", "From an answer's first token until its last.")
        self._inference = histogram("inference_time_seconds", "From a sequence's first step until its last token.")

    def observe(self, answer: EndedAnswer) -> None:
        """Called when an answer ends."""
        if answer.outcome not in FINISHED:
            return
        self._prompt_tokens.observe(answer.num_prompt_tokens)
        self._output_tokens.observe(answer.num_output_tokens)
        self._n.observe(answer.n)
        self._max_tokens.observe(answer.max_tokens)
        times = answer.timings
        if times.queue_s is None or times.first_token_s is None:
            return
        prefill_s = max(0.0, times.first_token_s - times.queue_s)
        decode_s = 0.0 if times.per_token_s is None else times.per_token_s * (answer.num_output_tokens - 1)
        self._queue.observe(times.queue_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(prefill_s + decode_s)
