"""What is told of the gateway processes together: see also `tests/unit/gateway/link/test_gateway_peers.py`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.gateway.link.journal import Journal
from services.gateway.link.worker_load import CacheLoad, Load, RequestLoad
from services.gateway.metrics.all_processes import AllProcesses
from services.gateway.metrics.gateway_metrics import GatewayMetrics
from services.gateway.metrics.pool_metrics import PoolMetrics
from services.gateway.metrics.vllm_metrics import AdapterUse, VllmMetrics
from services.pb import gateway_peers_pb2
from services.rpc.metrics import new_registry
from tests.support.running_gateway import run, until


class FixedLoad:
    def __init__(self, num_running: int) -> None:
        self.num_running = num_running

    async def read(self) -> Load:
        return Load(RequestLoad(self.num_running, num_waiting=2), CacheLoad(100, 60, 16))


class Peers:
    """Other processes with these metrics."""

    def __init__(self, *texts: bytes) -> None:
        self.has_any = bool(texts)
        self._answers = [
            gateway_peers_pb2.MeasureResponse(process_index=index, metrics=text)
            for index, text in enumerate(texts, start=1)
        ]

    async def measure(self, *, has_metrics: bool) -> list[gateway_peers_pb2.MeasureResponse]:
        return self._answers


def vllm_registry(num_tokens: int, num_running: int) -> CollectorRegistry:
    """The metrics of a process with `metrics.compat = "vllm"` that has generated `num_tokens`."""
    registry = new_registry("gateway")
    gateway = GatewayMetrics(registry)
    gateway.watch(Journal(), SimpleNamespace(is_connected=True, num_resubmitted=0))  # type: ignore[arg-type]
    gateway.on_first_tokens(num_tokens, 0.5)
    pool = PoolMetrics(FixedLoad(num_running), "tiny")  # type: ignore[arg-type]
    registry.register(VllmMetrics(registry, gateway, pool, "tiny", 1, lambda: AdapterUse({"x"}, set())))
    return registry


@pytest.mark.parametrize(
    ("accept", "parse"),
    [("", text_string_to_metric_families), ("application/openmetrics-text;version=1.0.0", parse_openmetrics)],
)
def test_the_workers_figures_are_told_once_and_all_others_by_process(
    accept: str, parse: Callable[[str], Iterator[Metric]]
) -> None:
    async def body() -> None:
        first, second = vllm_registry(3, num_running=7), vllm_registry(4, num_running=8)
        text = await asyncio.to_thread(generate_latest, second)
        measured = AllProcesses(first, lambda: 0, Peers(text), 0)  # type: ignore[arg-type]
        answer, _ = await measured.metrics(accept)
        await measured.close()
        found = {}
        for sample in (each for family in parse(answer.decode()) for each in family.samples):
            if sample.name.startswith("vllm:") and "finished_reason" not in sample.labels:
                key = sample.name, sample.labels.get("process"), sample.labels.get("le")
                assert key not in found, "each sample is there once"
                found[key] = sample.value
        counts = [found["vllm:generation_tokens_total", str(index), None] for index in range(2)]
        times = [found["vllm:time_to_first_token_seconds_bucket", str(index), "0.5"] for index in range(2)]
        assert counts == [3, 4] and times == [1, 1]
        assert {process for name, process, _ in found if name == "vllm:lora_requests_info"} == {"0", "1"}
        assert {name: value for (name, process, _), value in found.items() if process is None} == {
            "vllm:num_requests_waiting": 2,
            "vllm:num_requests_running": 7,
            "vllm:kv_cache_usage_perc": 0.4,
            "vllm:gpu_cache_usage_perc": 0.4,
            "vllm:cache_config_info": 1,
        }

    run(body())


class SlowCollector(Collector):
    """Counts how often it is collected; each time takes until `release`."""

    def __init__(self) -> None:
        self.num_collected = 0
        self.release = threading.Event()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self.num_collected += 1
        self.release.wait(60)
        yield GaugeMetricFamily("collected", "How often.", self.num_collected)


def test_scrapes_of_one_process_share_a_running_collection_and_later_ones_see_later_values() -> None:
    async def body() -> None:
        registry, slow = CollectorRegistry(), SlowCollector()
        registry.register(slow)
        measured = AllProcesses(registry, lambda: 0, Peers(), 0)  # type: ignore[arg-type]
        scrapes = [asyncio.create_task(measured.metrics("")) for _ in range(20)]
        await until(lambda: slow.num_collected == 1)
        slow.release.set()
        assert {text.splitlines()[-1] for text, _ in await asyncio.gather(*scrapes)} == {b"collected 1.0"}
        text, _ = await measured.metrics("")
        assert text.splitlines()[-1] == b"collected 2.0"
        await measured.close()

    run(body())
