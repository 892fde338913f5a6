"""The file in vLLM's format, against figures that are computed by hand."""

from __future__ import annotations

import argparse
import json
import math
from unittest.mock import MagicMock

import pytest

from bench.load.grpc_transport import GrpcTransport
from bench.load.live_view import describe
from bench.load.load import Monitor, Progress
from bench.load.options import goodput_limit
from bench.load.stats import RequestRecord, request_goodput
from bench.load.vllm_result import vllm_result
from services.pb import gateway_pb2

S, MS = 1_000_000_000, 1_000_000
# What `vllm bench serve --save-result --save-detailed` writes, without the texts of answers.
VLLM_FIELDS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens",
    "ttfts", "itls", "errors", "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip


def record(index: int, send_ns: int, chunk_ns: list[int], error: str | None = None) -> RequestRecord:
    end_ns = chunk_ns[-1] if chunk_ns else send_ns
    return RequestRecord(index, send_ns, send_ns, end_ns, chunk_ns, [2] * len(chunk_ns), 10, 0, error)


RECORDS = [
    record(0, 0, [100 * MS, 300 * MS]),
    record(1, 50 * MS, [350 * MS, 950 * MS, 2 * S]),
    record(2, 3 * S, [], "RESOURCE_EXHAUSTED: no room"),
]


@pytest.mark.parametrize("rate", [4.0, math.inf])
def test_the_document_has_vllms_fields_and_units(rate: float) -> None:
    made = vllm_result(
        RECORDS, model="m", protocol="http", request_rate=rate, max_concurrency=None, is_poisson=True, limits_ms={}
    )
    document = json.loads(json.dumps(made, allow_nan=False))
    assert document.keys() == VLLM_FIELDS
    assert document["request_rate"] == ("inf" if math.isinf(rate) else 4.0)
    assert (document["completed"], document["failed"], document["num_prompts"]) == (2, 1, 3)
    assert document["duration"] == 3.0 and document["total_output_tokens"] == 10
    assert document["total_input_tokens"] == 20 and document["total_token_throughput"] == pytest.approx(10.0)
    assert document["ttfts"] == pytest.approx([0.1, 0.3, 0.0])
    assert document["itls"] == [pytest.approx([0.2]), pytest.approx([0.6, 1.05]), []]
    assert document["errors"] == ["", "", "RESOURCE_EXHAUSTED: no room"]
    assert document["mean_ttft_ms"] == pytest.approx(200.0) and document["std_ttft_ms"] == pytest.approx(100.0)
    assert document["median_e2el_ms"] == pytest.approx((300 + 1950) / 2)
    assert document["mean_tpot_ms"] == pytest.approx((200 / 3 + 1650 / 5) / 2)
    assert document["max_concurrent_requests"] == 2
    assert document["max_output_tokens_per_s"] == 8.0  # all but the two tokens after 2 s


@pytest.mark.parametrize(
    ("limits_ms", "num_good"),
    [({"ttft": 300.0}, 2), ({"ttft": 299.0}, 1), ({"tpot": 66.0}, 0), ({"e2el": 300.0, "tpot": 400.0}, 1)],
)
def test_goodput_counts_the_requests_that_keep_all_limits(limits_ms: dict[str, float], num_good: int) -> None:
    """TTFT: 100 and 300 ms; TPOT: 200 ms for 3 tokens and 1,650 ms for 5; to the end: 300 and 1,950 ms."""
    options = {"model": "m", "protocol": "http", "request_rate": 1.0, "max_concurrency": None, "is_poisson": True}
    assert vllm_result(RECORDS, **options, limits_ms=limits_ms)["request_goodput"] == pytest.approx(num_good / 3)


def test_a_single_token_keeps_every_limit_of_the_time_per_token() -> None:
    single = RequestRecord(0, 0, 0, S, [S], [1], 10, 0, None)
    assert request_goodput([single], {"tpot": 1.0}) == 1.0 and request_goodput([], {"tpot": 1.0}) == 0.0


@pytest.mark.parametrize("text", ["ttft", "ttft:0", "itl:5", "ttft:x", ":5"])
def test_other_limits_of_goodput_are_refused(text: str) -> None:
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        goodput_limit(text)


@pytest.mark.parametrize(("num_chunks", "counted"), [(10, 15), (640, 960)])
def test_the_live_view_counts_the_tokens_of_a_few_chunks(num_chunks: int, counted: int) -> None:
    """Chunks of one and of two tokens."""
    monitor = Monitor(GrpcTransport(MagicMock()))
    for index in range(num_chunks):
        monitor.add(gateway_pb2.GenerateChunk(token_ids=[1] * (1 + index % 2)).SerializeToString())
    assert monitor.report().num_tokens == counted
    assert monitor.report().num_tokens == counted, "no chunk counts twice"


def test_without_an_answer_statistics_are_zero() -> None:
    document = vllm_result(
        RECORDS[2:], model="m", protocol="grpc", request_rate=1.0, max_concurrency=3, is_poisson=False, limits_ms={}
    )
    assert (document["mean_ttft_ms"], document["p99_itl_ms"], document["completed"]) == (0.0, 0.0, 0)
    assert document["burstiness"] is None and document["backend"] == "grpc"


def test_the_live_view_shows_what_happened_since_it_last_did() -> None:
    before = Progress(num_sent=5, num_ended=1, num_tokens=100, num_first_chunks=4, first_chunk_ns=4 * S)
    now = Progress(9, 3, 1, 1300, num_first_chunks=6, first_chunk_ns=4 * S + 60 * MS)
    assert describe(now, before, 0.5) == "6 in flight, 2,400 tokens/s, TTFT 30 ms, 1 failed"
    assert describe(before, before, 0.0) == "4 in flight"
