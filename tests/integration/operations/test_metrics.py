"""Metrics, the step log and traces of the services agree with what their clients saw."""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.cluster import Cluster, request
from tests.support.monitoring.otlp_collector import ReceivedSpan
from tests.support.observed import Observed, running_observed, until
from tests.support.scrape import Scrape, read_table, read_units

TIMEOUT_S = 30.0
CLIENT_TIMEOUT_S = 100.0  # with a start of a worker, on a busy machine
MAX_ROUNDS = 5  # on a busy machine a stream may end before the next line of a test runs
SPAN_NAMES = ["decode", "open_sequence", "prefill", "queue", "request", "sequence"]


def test_the_table_lists_exactly_what_is_served(observed: Observed) -> None:
    served: dict[str, Any] = {}
    for service, scrape in observed.scrape().items():
        for row in scrape.rows(service):
            known = served.get(row.name)
            same = known and (known.type, known.labels, known.meaning) == (row.type, row.labels, row.meaning)
            assert known is None or same, f"{row.name} differs between services"
            services = row.services | (known.services if known else frozenset())
            served[row.name] = type(row)(row.name, row.type, row.labels, services, row.meaning)
    table = read_table()
    assert len({row.name for row in table}) == len(table), "a metric is listed twice"
    # These need experts, an encoder or several attention workers; see tests/unit/dense_worker/test_dense_metrics.py.
    others = ("twostroke_dense_expert_", "twostroke_dense_encoder_", "twostroke_dense_attention_worker_")
    assert {row.name: row for row in table if not row.name.startswith(others)} == served


def test_names_follow_the_conventions_of_prometheus() -> None:
    units = read_units()
    for row in read_table():
        assert row.name.startswith(("twostroke_", "vllm:"))
        assert row.name.endswith("_total") == (row.type == "counter")
        bare, unit = row.name.removesuffix("_total"), units[row.name]
        assert bare.endswith("_seconds") == (unit == "seconds"), "the names of times, and only these, end in _seconds"
        assert bare.endswith("_bytes") == (unit == "bytes")
        assert bare.endswith("_tokens") == (unit == "tokens")
        assert row.type != "histogram" or unit == "seconds"


def test_the_http_port_serves_the_gateways_metrics_too(observed: Observed) -> None:
    assert {row.name for row in Scrape(observed.http_address).rows("gateway")} == {
        row.name for row in Scrape(observed.addresses["gateway"]).rows("gateway")
    }


@dataclass
class Seen:
    """What a client counted of one answer."""

    num_chunks: int  # chunks with tokens
    ttft_s: float
    total_s: float
    usage: Any


def watch(cluster: Cluster, prompt: str, max_tokens: int) -> Seen:
    start, first, num_chunks, usage = time.monotonic(), 0.0, 0, None
    for chunk in cluster.gateway.GenerateStream(request(prompt, max_tokens, ignore_eos=True), timeout=TIMEOUT_S):
        if chunk.token_ids:
            first = first or time.monotonic()
            num_chunks += 1
        if chunk.HasField("finish"):
            usage = chunk.finish.usage
    return Seen(num_chunks, first - start, time.monotonic() - start, usage)


def settled(observed: Observed) -> dict[str, Scrape]:
    """The metrics when nothing runs any more: services count the end of an answer, or a step, after it was sent.

    For the dense worker that started with the attention worker: both count the same steps.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        observed.cluster.wait_idle()
        now = observed.scrape()
        num_steps = {now[name].value(f"twostroke_{name}_steps_total") for name in ("dense", "attention")}
        num_running = now["dense"].value("twostroke_dense_sequences_running")
        if now["gateway"].value("twostroke_gateway_answers_open") == num_running == 0 and len(num_steps) == 1:
            return now
        assert time.monotonic() < deadline, "something still runs"
        time.sleep(0.05)


def test_metrics_under_load_equal_the_counts_of_the_clients(observed: Observed) -> None:
    cluster = observed.cluster
    before = settled(observed)
    prompts = [f"{'Count from one. ' * 8}{i}" for i in range(12)]  # long enough to share blocks of their prefix
    with ThreadPoolExecutor(6) as threads:
        seen = list(threads.map(lambda i: watch(cluster, prompts[i], 20 + i), range(12)))
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                cluster.generate("a", 5, temperature=-1.0)
    after = settled(observed)

    def delta(service: str, name: str, **labels: str) -> float:
        full_name = f"twostroke_{service}_{name}"
        return after[service].value(full_name, **labels) - before[service].value(full_name, **labels)

    num_prompt = sum(each.usage.num_prompt_tokens for each in seen)
    num_cached = sum(each.usage.num_cached_tokens for each in seen)
    num_output = sum(each.usage.num_output_tokens for each in seen)
    assert num_output == sum(range(20, 32)) and num_cached > 0
    # Tokens
    assert delta("gateway", "prompt_tokens_total") == num_prompt
    assert delta("gateway", "cached_tokens_total") == num_cached
    assert delta("gateway", "generated_tokens_total") == num_output
    assert delta("dense", "generated_tokens_total") == num_output  # the scheduler knows the lengths: no token is wasted
    # The last token of an answer is never computed.
    num_computed = num_prompt - num_cached + num_output - len(seen)
    assert delta("dense", "computed_tokens_total") == num_computed
    assert delta("attention", "computed_tokens_total") == num_computed
    assert delta("attention", "cached_tokens_total") == num_cached
    # Answers and their times: the server's times are above zero and within the client's.
    assert delta("gateway", "answers_total", outcome="length") == len(seen)
    assert delta("gateway", "requests_rejected_total", reason="invalid_request") == 3
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert delta("gateway", f"{name}_seconds_count") == len(seen)
    assert delta("gateway", "inter_token_latency_seconds_count") == sum(each.num_chunks - 1 for each in seen)
    ttft_s, total_s = (sum(getattr(each, name) for each in seen) for name in ("ttft_s", "total_s"))
    assert 0 < delta("gateway", "time_to_first_token_seconds_sum") <= ttft_s
    assert delta("gateway", "request_duration_seconds_sum") <= total_s
    gaps_s = delta("gateway", "inter_token_latency_seconds_sum")
    assert gaps_s <= delta("gateway", "request_duration_seconds_sum")
    per_token_s = delta("gateway", "time_per_output_token_seconds_sum")
    assert 0 < per_token_s <= sum(each.total_s / (each.usage.num_output_tokens - 1) for each in seen)
    parts_s = [delta("dense", f"{name}_seconds_sum") for name in ("queue", "prefill", "decode")]
    assert [delta("dense", f"{name}_seconds_count") for name in ("queue", "prefill", "decode")] == [len(seen)] * 3
    assert all(part_s > 0 for part_s in parts_s) and sum(parts_s) <= total_s
    # Steps
    num_steps = delta("dense", "step_seconds_count")
    assert 31 <= num_steps <= num_output and delta("attention", "step_seconds_count") == num_steps
    assert delta("dense", "steps_total") == delta("attention", "steps_total") >= num_steps  # some only close sequences
    assert delta("dense", "step_sequences_total") >= num_output
    for service in ("dense", "attention"):
        step_s, compute_s, wait_s = (
            delta(service, f"{name}_seconds_sum") for name in ("step", "step_compute", "step_wait")
        )
        assert compute_s > 0 and wait_s > 0 and step_s == pytest.approx(compute_s + wait_s)
    assert delta("attention", "step_compute_seconds_sum") <= delta("dense", "step_seconds_sum")
    assert delta("attention", "plan_lead_seconds_count") == delta("attention", "steps_total")
    # Gauges: nothing runs any more
    status = cluster.attention_status()
    blocks = {
        state: after["attention"].value("twostroke_attention_kv_blocks", state=state)
        for state in ("used", "cached", "free")
    }
    assert sum(blocks.values()) == status.num_blocks
    assert blocks["used"] == 0 and blocks["cached"] == status.num_cached_blocks > 0
    assert after["dense"].value("twostroke_dense_sequences_running") == 0
    assert after["gateway"].value("twostroke_gateway_answers_open") == 0


def test_gauges_follow_a_running_stream(observed: Observed) -> None:
    cluster = observed.cluster

    def num_cancelled(scrape: Scrape) -> float:
        return scrape.value("twostroke_gateway_answers_total", outcome="cancelled")

    for _ in range(MAX_ROUNDS):
        before = settled(observed)["gateway"]
        stream = cluster.gateway.GenerateStream(request("Count", 1500, ignore_eos=True), timeout=CLIENT_TIMEOUT_S)
        next(stream)
        now = observed.scrape()
        stream.cancel()
        if num_cancelled(settled(observed)["gateway"]) == num_cancelled(before) + 1:
            break  # so it ran while the metrics were read
    else:
        raise AssertionError(f"in each of {MAX_ROUNDS} rounds the stream ended before it was cancelled")
    assert now["gateway"].value("twostroke_gateway_answers_open") == 1
    assert now["gateway"].value("twostroke_gateway_answers_waiting") == 0
    assert now["dense"].value("twostroke_dense_sequences_running") == 1
    assert now["attention"].value("twostroke_attention_sequences") == 1
    assert now["attention"].value("twostroke_attention_kv_blocks", state="used") >= 1


def test_the_step_log_has_a_line_for_every_step(observed: Observed) -> None:
    cluster = observed.cluster

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in observed.step_log.read_text().splitlines()]

    num_before = settled(observed)["dense"].value("twostroke_dense_steps_total")
    until(lambda: len(lines()) == num_before)
    answer = cluster.generate("Count from 1", 9, ignore_eos=True)
    num_after = settled(observed)["dense"].value("twostroke_dense_steps_total")
    until(lambda: len(lines()) == num_after)
    new = lines()[int(num_before) :]
    assert [line["step_id"] for line in new] == list(range(int(num_before) + 1, int(num_after) + 1))
    assert sum(line["num_sampled"] for line in new) == 9
    usage = answer.finish.usage
    assert sum(line["num_tokens"] for line in new) == usage.num_prompt_tokens - usage.num_cached_tokens + 8
    for line in new:
        assert 0 <= line["wait_ms"] <= line["duration_ms"]
        assert line["num_free_blocks"] <= line["num_blocks"] == cluster.attention_status().num_blocks


def is_whole(spans: list[ReceivedSpan]) -> bool:
    return sorted(span.name for span in spans) == SPAN_NAMES


def ask_over_grpc(observed: Observed, traceparent: str) -> None:
    message = request("San Francisco is a", 7)
    list(observed.cluster.gateway.GenerateStream(message, metadata=(("traceparent", traceparent),)))


def ask_over_http(observed: Observed, traceparent: str) -> None:
    body = json.dumps({"model": "tiny-llama", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0})
    ask = urllib.request.Request(
        f"http://{observed.http_address}/v1/completions",
        body.encode(),
        {"content-type": "application/json", "traceparent": traceparent},
    )
    with urllib.request.urlopen(ask, timeout=TIMEOUT_S) as response:
        assert response.status == 200


@pytest.mark.parametrize("ask", [ask_over_grpc, ask_over_http])
def test_one_trace_goes_through_all_three_services(observed: Observed, ask: Callable[[Observed, str], None]) -> None:
    trace_id, client_span_id = secrets.token_hex(16), secrets.token_hex(8)
    start_ns = time.time_ns()
    ask(observed, f"00-{trace_id}-{client_span_id}-01")
    end_ns = time.time_ns()
    spans = {span.name: span for span in observed.collector.wait_for(trace_id, is_whole)}
    assert {name: span.service for name, span in spans.items()} == {
        "request": "twostroke-gateway",
        "sequence": "twostroke-dense",
        "queue": "twostroke-dense",
        "prefill": "twostroke-dense",
        "decode": "twostroke-dense",
        "open_sequence": "twostroke-attention",
    }
    assert spans["request"].parent_span_id == client_span_id
    assert spans["sequence"].parent_span_id == spans["request"].span_id
    for name in ("queue", "prefill", "decode", "open_sequence"):
        assert spans[name].parent_span_id == spans["sequence"].span_id
    slack_ns = 50_000_000  # the system clock may be set between the starts of two processes
    for span in spans.values():
        assert start_ns - slack_ns <= span.start_ns <= span.end_ns <= end_ns + slack_ns
    assert spans["queue"].end_ns == spans["prefill"].start_ns and spans["prefill"].end_ns == spans["decode"].start_ns
    assert spans["sequence"].attributes["twostroke.num_output_tokens"] == 7
    assert not any(span.is_error for span in spans.values())


def test_a_trace_that_the_client_does_not_want_is_not_sent(observed: Observed) -> None:
    unwanted, wanted = secrets.token_hex(16), secrets.token_hex(16)
    ask_over_grpc(observed, f"00-{unwanted}-{secrets.token_hex(8)}-00")
    ask_over_grpc(observed, f"00-{wanted}-{secrets.token_hex(8)}-01")
    observed.collector.wait_for(wanted, is_whole)
    assert observed.collector.spans_of(unwanted) == []


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Observed]:
    """A cluster for one test: after it the workers do not count the same steps, see `settled`."""
    with running_observed(tmp_path) as observed:
        yield observed


def test_a_killed_dense_worker_shows_in_every_service(own: Observed) -> None:
    """The counters must change in the round in which the kill comes before the end of the stream."""
    cluster = own.cluster
    recovered = "twostroke_gateway_recovered_sequences_total"
    after = settled(own)
    for _ in range(MAX_ROUNDS):
        before = after
        stream = cluster.gateway.GenerateStream(
            request("Count from 1", 200, ignore_eos=True), timeout=CLIENT_TIMEOUT_S
        )
        next(stream)
        cluster.kill("dense_worker")
        list(stream)
        cluster.generate("Count", 1)  # the new worker serves now
        cluster.wait_idle()
        after = own.scrape()
        if after["gateway"].value(recovered) > before["gateway"].value(recovered):
            break
    for service, name, labels in (
        ("launch", "restarts_total", {"role": "dense_worker"}),
        ("gateway", "recovered_sequences_total", {}),
        ("attention", "handoff_aborts_total", {}),
        ("attention", "recovered_sequences_total", {}),
    ):
        full_name = f"twostroke_{service}_{name}"
        assert after[service].value(full_name, **labels) == before[service].value(full_name, **labels) + 1
    assert after["dense"].value("twostroke_dense_recovered_sequences_total") == 1  # the new process counts from zero
    kept = after["attention"].value("twostroke_attention_recovered_tokens_total")
    assert kept > before["attention"].value("twostroke_attention_recovered_tokens_total")
    start = "twostroke_process_start_time_seconds"
    assert after["dense"].value(start) > before["dense"].value(start)
    assert after["gateway"].value(start) == before["gateway"].value(start)
