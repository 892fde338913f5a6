"""The gateway's metrics count what clients receive."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from services.common.config import EMBEDDED_MODEL
from services.common.errors import CapacityError, Unauthenticated
from services.common.sampling_params import SamplingParams
from services.gateway.access.access import Access
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import FinishReason, JournalEntry
from services.gateway.metrics.gateway_metrics import GatewayMetrics
from services.gateway.text.tokenizer import load_tokenizer
from services.rpc.metrics import LATENCY_BUCKETS_S
from tests.support.clients.generation_requests import make_generation, make_request

TOKENIZER = load_tokenizer(EMBEDDED_MODEL)


class Watched:
    """A request for one answer, and its dense worker: the test itself delivers the tokens."""

    is_connected, num_resubmitted = True, 3

    def __init__(self, **fields: Any) -> None:
        self.registry = CollectorRegistry()
        self.entries: list[JournalEntry] = []
        request = make_request(**{"sampling": SamplingParams(seed=9), "max_tokens": 1000, **fields})
        metrics = GatewayMetrics(self.registry)
        journal = Journal()
        metrics.watch(journal, self)  # type: ignore[arg-type]
        self.generation = make_generation(request, TOKENIZER, journal, self, metrics)

    def submit(self, entry: JournalEntry) -> None:
        self.entries.append(entry)

    def cancel(self, entry: JournalEntry) -> None: ...

    def deliver(self, num_tokens: int, reason: FinishReason | None = None) -> None:
        for _ in range(num_tokens):
            self.entries[0].append(70, 0.0)
        if reason is not None:
            self.entries[0].finish(reason)
        asyncio.run(self.generation.next_chunk())

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"twostroke_gateway_{name}", labels)


def test_every_chunk_with_tokens_counts_as_one_latency() -> None:
    watched = Watched()
    assert (watched.value("answers_open"), watched.value("answers_waiting")) == (1, 1)
    watched.entries[0].start(0.0, 0)
    assert (watched.value("answers_open"), watched.value("answers_waiting")) == (1, 0)
    watched.deliver(1)
    assert watched.value("time_to_first_token_seconds_count") == 1
    assert watched.value("inter_token_latency_seconds_count") == 0
    watched.deliver(3)
    watched.deliver(2, FinishReason.LENGTH)
    assert watched.value("inter_token_latency_seconds_count") == 2
    assert watched.value("time_to_first_token_seconds_count") == 1
    assert watched.value("generated_tokens_total") == 6
    assert watched.value("answers_total", outcome="length") == 1
    assert watched.value("time_per_output_token_seconds_count") == 1
    assert watched.value("request_duration_seconds_count") == 1
    assert (watched.value("answers_open"), watched.value("connected")) == (0, 1)
    assert watched.value("recovered_sequences_total") == 3


def test_a_chunk_without_tokens_does_not_count_as_a_latency() -> None:
    watched = Watched()
    watched.deliver(1)
    watched.deliver(0, FinishReason.ABORT)
    assert watched.value("inter_token_latency_seconds_count") == 0
    assert watched.value("time_per_output_token_seconds_count") == 0
    assert watched.value("answers_total", outcome="abort") == 1


def test_a_cancelled_request_does_not_count_as_a_duration() -> None:
    watched = Watched()
    watched.deliver(2)
    watched.generation.close()
    watched.generation.close()
    assert watched.value("answers_total", outcome="cancelled") == 1
    assert watched.value("request_duration_seconds_count") == 0


@pytest.mark.parametrize(("num_tokens", "num_rejected"), [(0, 1), (2, None)])
def test_an_error_is_a_refusal_only_before_the_first_token(num_tokens: int, num_rejected: int | None) -> None:
    watched = Watched()
    if num_tokens:
        watched.deliver(num_tokens)
    watched.entries[0].fail(CapacityError("full"))
    with pytest.raises(CapacityError):
        asyncio.run(watched.generation.next_chunk())
    watched.generation.close()
    assert watched.value("answers_total", outcome="error") == 1
    assert watched.value("requests_rejected_total", reason="capacity") == num_rejected


def test_a_wrong_api_key_is_a_refusal(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    access = Access(None, "a=sk-aaaaaaaaaaaaaaaaaaaa", GatewayMetrics(registry).on_rejected)
    access.identify("Bearer sk-aaaaaaaaaaaaaaaaaaaa")
    for authorization in (None, "Bearer sk-bbbbbbbbbbbbbbbbbbbb"):
        with pytest.raises(Unauthenticated):
            access.identify(authorization)
    labels = {"reason": "invalid_api_key"}
    assert registry.get_sample_value("twostroke_gateway_requests_rejected_total", labels) == 2


@given(st.lists(st.sampled_from([*LATENCY_BUCKETS_S, math.nextafter(0.02, 1), 0.0, 1e9]) | st.floats(0, 200)))
def test_gaps_are_counted_as_by_the_histogram_of_prometheus(gaps_s: list[float]) -> None:
    registry = CollectorRegistry()
    wanted, metrics = Histogram("wanted", "", buckets=LATENCY_BUCKETS_S, registry=registry), GatewayMetrics(registry)
    for gap_s in gaps_s:
        wanted.observe(gap_s)
        metrics.on_more_tokens(1, gap_s)
    found = [
        {
            (sample.name.removeprefix(name), *sample.labels.values()): sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if metric.name == name and not sample.name.endswith("_created")
        }
        for name in ("wanted", "twostroke_gateway_inter_token_latency_seconds")
    ]
    assert found[0] == found[1]
    assert found[1]["_count",] == len(gaps_s)
