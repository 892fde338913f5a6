"""With `metrics.compat = "vllm"`, what reads vLLM's metrics finds them, and their values are what the clients did."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.adapters import make_adapter
from tests.support.cluster import REPOSITORY, REQUEST_TIMEOUT_S, Cluster, running_cluster
from tests.support.observed import free_address, until
from tests.support.scrape import Scrape

MODEL, ADAPTER, MAX_LORAS = EMBEDDED_MODEL.name, "poet", 3
MAX_ROUNDS = 5  # on a busy machine a stream may end before its client leaves
PAGE = REPOSITORY / "deploy" / "prometheus" / "vllm.md"
# Names and types that vLLM registers (vllm/v1/metrics/loggers.py), as the text format shows them.
VLLM_TYPES = {
    "gauge": {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "cache_config_info",
        "lora_requests_info",
    },
    "counter": {
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "gpu_prefix_cache_queries",
        "gpu_prefix_cache_hits",
        "request_success",
    },
    "histogram": {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
    },
}
# Of the Gateway API Inference Extension's proposal 003, "Model Server Protocol": gauges with these labels at least.
PROTOCOL = {
    "vllm:num_requests_waiting": set(),
    "vllm:num_requests_running": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}


@dataclass
class Server:
    cluster: Cluster
    url: str

    def scrape(self) -> Scrape:
        return Scrape(self.cluster.http_address)

    def complete(self, prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """One answer; returns its object."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
        response = httpx2.post(f"{self.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", timeout=REQUEST_TIMEOUT_S)

    def settled(self) -> Scrape:
        """The metrics once no answer is open."""
        until(lambda: self.scrape().value("twostroke_gateway_answers_open") == 0)
        self.get("/load")  # the event loop answers, and has counted the end of the last one before
        return self.scrape()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("vllm-metrics")
    adapter = make_adapter(directory / "adapter", EMBEDDED_MODEL, rank=4, std=0.01)
    address = free_address()
    settings = [
        f"gateway.http_address={address}",
        "metrics.compat=vllm",
        f"dense.max_loras={MAX_LORAS}",
        f'gateway.lora_modules=["{ADAPTER}={adapter}"]',
    ]
    with running_cluster(directory, *settings, is_warm=True) as cluster:
        yield Server(cluster, f"http://{address}")


def vllm_families(scrape: Scrape) -> dict[str, Any]:
    return {family.name: family for family in scrape.families if family.name.startswith("vllm:")}


def test_all_names_are_vllms_with_its_types_and_the_name_of_the_model(server: Server) -> None:
    server.complete("San Francisco is a", 3)
    families = vllm_families(server.settled())
    for kind, names in VLLM_TYPES.items():
        assert {name for name, each in families.items() if each.type == kind} == {f"vllm:{name}" for name in names}
    for name, family in families.items():
        assert family.samples
        for sample in family.samples:
            assert name == "vllm:lora_requests_info" or sample.labels["model_name"] == MODEL, sample


def test_the_page_lists_exactly_what_is_served(server: Server) -> None:
    rows = re.findall(r"^\| `(vllm:\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    families = vllm_families(server.settled())
    totals = {f"{name}_total" if each.type == "counter" else name: each.type for name, each in families.items()}
    assert dict(rows) == totals and len(rows) == len(totals)


def test_the_protocol_of_model_servers_is_kept(server: Server) -> None:
    families = vllm_families(server.scrape())
    for name, labels in PROTOCOL.items():
        assert families[name].type == "gauge"
        for sample in families[name].samples:
            assert labels <= sample.labels.keys()
    assert server.get("/health").status_code == 200
    assert {MODEL, ADAPTER} <= {each["id"] for each in server.get("/v1/models").json()["data"]}


def test_values_are_what_the_clients_counted(server: Server) -> None:
    before = server.settled()
    prompt = "Count from one to nine. " * 4  # so long that the next request finds blocks of it
    answers = [server.complete(prompt, 10 + i, ignore_eos=True) for i in range(4)]
    stopped = server.complete("San Francisco is a", 20, stop=["o"])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    after = server.settled()

    def delta(name: str, **labels: str) -> float:
        return after.value(f"vllm:{name}", **labels) - before.value(f"vllm:{name}", **labels)

    usages = [each["usage"] for each in (*answers, stopped)]
    num_prompt = sum(each["prompt_tokens"] for each in usages)
    num_output = sum(each["completion_tokens"] for each in usages)
    num_cached = sum((each["prompt_tokens_details"] or {}).get("cached_tokens", 0) for each in usages)
    assert num_cached > 0
    assert delta("prompt_tokens_total", model_name=MODEL) == num_prompt
    assert delta("generation_tokens_total", model_name=MODEL) == num_output
    for prefix in ("", "gpu_"):
        assert delta(f"{prefix}prefix_cache_queries_total") == num_prompt
        assert delta(f"{prefix}prefix_cache_hits_total") == num_cached
    assert delta("request_success_total", finished_reason="length") == 4
    assert delta("request_success_total", finished_reason="stop") == 1
    of_each_answer = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds")
    for name in (*of_each_answer, "request_prefill_time_seconds", "request_decode_time_seconds"):
        assert delta(f"{name}_count") == delta(f"{name}_bucket", le="+Inf") == 5
    assert delta("request_prompt_tokens_sum") == num_prompt and delta("request_prompt_tokens_count") == 5
    assert delta("request_generation_tokens_sum") == num_output
    assert delta("request_params_n_sum") == delta("request_params_n_count") == 5
    assert delta("request_params_max_tokens_sum") == 10 + 11 + 12 + 13 + 20
    inference_s = delta("request_inference_time_seconds_sum")
    parts_s = delta("request_prefill_time_seconds_sum") + delta("request_decode_time_seconds_sum")
    assert inference_s == pytest.approx(parts_s)
    assert 0 < inference_s <= delta("e2e_request_latency_seconds_sum")
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        until(lambda name=name: server.scrape().value(name) == 0)  # the workers are asked twice a second at most


def test_a_client_that_leaves_is_an_abort_and_its_adapter_was_in_use(server: Server) -> None:
    def num_aborts() -> float:
        return server.settled().value("vllm:request_success_total", finished_reason="abort")

    idle = vllm_families(server.scrape())["vllm:lora_requests_info"].samples[0]
    assert idle.labels == {"max_lora": str(MAX_LORAS), "running_lora_adapters": "", "waiting_lora_adapters": ""}
    body = {"model": ADAPTER, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    host, _, port = server.cluster.http_address.partition(":")
    for _ in range(MAX_ROUNDS):
        before = num_aborts()
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.readline()  # it runs
        info = vllm_families(server.scrape())["vllm:lora_requests_info"].samples[0]
        response.close()
        connection.close()
        if (after := num_aborts()) > before:
            break  # so it ran while the metrics were read
    assert info.labels["running_lora_adapters"] == ADAPTER and info.labels["waiting_lora_adapters"] == ""
    assert idle.value <= info.value <= time.time()
    assert after == before + 1
