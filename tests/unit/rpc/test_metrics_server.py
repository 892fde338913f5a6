"""The server of metrics: its address, its answers, and an address in use."""

from __future__ import annotations

import itertools
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from services import VERSION
from services.common.errors import ConfigError
from services.rpc.metrics import LATENCY_BUCKETS_S, STEP_BUCKETS_S, new_registry, serving_metrics
from tests.support.scrape import Scrape


def test_counters_are_served_with_the_process_and_its_version() -> None:
    registry = new_registry("gateway")
    counter = Counter("twostroke_things_total", "Things.", registry=registry)
    with serving_metrics("127.0.0.1:0", registry, "dense.metrics_address") as address:
        counter.inc(3)
        scrape = Scrape(str(address))
        assert scrape.value("twostroke_things_total") == 3
        assert scrape.value("twostroke_build_info", service="gateway", version=VERSION) == 1
        assert scrape.value("twostroke_process_resident_memory_bytes") > 1e6
        names = [sample.name for family in scrape.families for sample in family.samples]
        assert not [name for name in names if name.endswith("_created")], "one more series for every counter"
    with pytest.raises(urllib.error.URLError):
        Scrape(str(address))


# What scrapers send: Prometheus 2 and 3, an OpenMetrics client, and what no scraper should.
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; escaping=underscores", True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=one", False),
        ("application/openmetrics-text;version=1.0.0;q=0, */*", False),
        ("application/openmetrics-text; q=0.000", False),
        ("application/openmetrics-text; q=0.001", True),
        ("text/plain;version=0.0.4", False),
        ("*/*", False),
    ],
)
def test_names_are_the_same_in_each_format(accept: str, is_openmetrics: bool) -> None:
    registry = new_registry("gateway")
    Gauge("vllm:num_requests_running", "Some.", ["model_name"], registry=registry).labels("tiny").set(7)
    Histogram("vllm:e2e_request_latency_seconds", "Some.", registry=registry).observe(1)
    with serving_metrics("127.0.0.1:0", registry, "dense.metrics_address") as address:
        request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=20) as response:
            text, content_type = response.read().decode(), response.headers["Content-Type"]
    parse = parse_openmetrics if is_openmetrics else parse_text
    families = {family.name: family for family in parse(text)}
    assert content_type.startswith("application/openmetrics-text" if is_openmetrics else "text/plain")
    assert [sample[:3] for sample in families["vllm:num_requests_running"].samples] == [
        ("vllm:num_requests_running", {"model_name": "tiny"}, 7)
    ]
    assert "vllm:e2e_request_latency_seconds_count" in {
        sample.name for sample in families["vllm:e2e_request_latency_seconds"].samples
    }


def test_two_registries_share_nothing() -> None:
    first, second = new_registry("a"), new_registry("b")
    Counter("twostroke_things_total", "Things.", registry=first).inc()
    assert first.get_sample_value("twostroke_things_total") == 1
    assert second.get_sample_value("twostroke_things_total") is None


def test_the_error_names_an_address_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        setting = "dense.metrics_address"
        serving = serving_metrics(address, new_registry("dense"), setting)
        mend = f"choose another port by --set {setting}=127.0.0.1:PORT"
        with pytest.raises(ConfigError, match=f"{setting} {address}: port in use; .*{mend}$"), serving:
            pass


def test_without_an_address_nothing_is_started() -> None:
    num_threads = threading.active_count()
    with serving_metrics(None, new_registry("dense"), "dense.metrics_address") as address:
        assert address is None
        assert threading.active_count() == num_threads


@pytest.mark.parametrize("buckets", [LATENCY_BUCKETS_S, STEP_BUCKETS_S])
def test_bounds_of_buckets_grow_by_a_factor_of_two_to_two_and_a_half(buckets: tuple[float, ...]) -> None:
    assert all(1.9 < upper / lower < 2.6 for lower, upper in itertools.pairwise(buckets))
    Histogram("twostroke_some_seconds", "Some.", registry=new_registry("dense"), buckets=buckets)


def test_buckets_of_latencies_reach_from_1_ms_to_100_s() -> None:
    assert (LATENCY_BUCKETS_S[0], LATENCY_BUCKETS_S[-1]) == (0.001, 100)
