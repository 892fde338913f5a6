"""With `metrics.compat = "sglang"`, what reads SGLang's metrics finds them, and their values are what was counted."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.common.config import load_config
from services.common.errors import ConfigError
from services.gateway.link.journal import Journal
from services.gateway.link.worker_load import CacheLoad, Load, RequestLoad
from services.gateway.metrics.all_processes import AllProcesses
from services.gateway.metrics.gateway_metrics import GatewayMetrics
from services.gateway.metrics.pool_metrics import PoolMetrics
from services.gateway.metrics.sglang_metrics import SglangMetrics
from services.pb import gateway_peers_pb2
from services.rpc.metrics import new_registry
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_gateway import COMPLETIONS, with_client
from tests.support.cluster import REPOSITORY
from tests.support.running_gateway import RunningGateway, run
from tests.support.workers.fake_dense import FakeDense

PAGE = REPOSITORY / "deploy" / "prometheus" / "sglang.md"


class FixedLoad:
    async def read(self) -> Load:
        return Load(RequestLoad(7, num_waiting=2), CacheLoad(100, 60, 16))


def registry_of(num_tokens: int) -> Any:
    """The metrics of a process that has generated so many tokens."""
    registry = new_registry("gateway")
    gateway = GatewayMetrics(registry)
    gateway.watch(Journal(), SimpleNamespace(is_connected=True, num_resubmitted=0))  # type: ignore[arg-type]
    gateway.on_first_tokens(num_tokens, 0.5)
    registry.register(SglangMetrics(gateway, PoolMetrics(FixedLoad(), "tiny"), "tiny"))  # type: ignore[arg-type]
    return registry


def test_the_page_lists_exactly_what_is_served_and_the_workers_figures_are_told_once() -> None:
    async def body() -> None:
        text = await asyncio.to_thread(generate_latest, registry_of(4))
        answers = [gateway_peers_pb2.MeasureResponse(process_index=1, metrics=text)]

        async def measure(*, has_metrics: bool) -> Any:
            return answers

        peers = SimpleNamespace(has_any=True, measure=measure)
        measured = AllProcesses(registry_of(3), lambda: 0, peers, 0)  # type: ignore[arg-type]
        found, _ = await measured.metrics("")
        await measured.close()
        families = [each for each in text_string_to_metric_families(found.decode()) if "sglang:" in each.name]
        served = {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}
        rows = re.findall(r"^\| `(sglang:\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
        assert dict(rows) == served and len(rows) == len(served)
        assert all(sample.labels["model_name"] == "tiny" for each in families for sample in each.samples)
        values = {sample.name: sample.value for each in families for sample in each.samples if each.type == "gauge"}
        assert values == {
            "sglang:num_running_reqs": 7,
            "sglang:num_queue_reqs": 2,
            "sglang:token_usage": 0.4,
            "sglang:num_used_tokens": 640,
            "sglang:max_total_num_tokens": 1600,
        }
        assert sum(len(each.samples) for each in families if each.type == "gauge") == len(values)
        [tokens] = [each.samples for each in families if each.name == "sglang:generation_tokens"]
        assert {each.labels["process"]: each.value for each in tokens} == {"0": 3, "1": 4}

    run(body())


def test_values_are_what_the_client_counted(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        usages = []
        for fields in ({}, {"max_tokens": 1}, {"n": 2}):
            usages.append((await client.post(COMPLETIONS, json={"prompt": "a city"} | fields)).json()["usage"])
        text = (await client.get("/metrics")).text
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        found = {each.name: each.value for each in samples if each.name.startswith("sglang:")}
        assert found["sglang:num_requests_total"] == 4
        assert found["sglang:prompt_tokens_total"] == sum(
            each["prompt_tokens"] * count for each, count in zip(usages, (1, 1, 2), strict=True)
        )
        assert found["sglang:generation_tokens_total"] == sum(each["completion_tokens"] for each in usages)
        assert found["sglang:time_to_first_token_seconds_count"] == 4
        assert found["sglang:e2e_request_latency_seconds_count"] == 4

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one two"), EOS]), test, compat="sglang")


def test_an_unknown_value_is_refused_with_one_sentence() -> None:
    wanted = r"^metrics\.compat = 'other': Input should be 'none', 'vllm' or 'sglang'$"
    with pytest.raises(ConfigError, match=wanted):
        load_config(None, ["metrics.compat=other"])
