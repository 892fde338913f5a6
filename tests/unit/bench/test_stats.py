"""Every figure, compared with its definition: written out for a few requests, or by the standard library."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.load.stats import (
    RequestRecord,
    Summary,
    itls_ms,
    num_output_tokens,
    serving_figures,
    summarize,
    tpot_ms,
    ttft_ms,
)

MS = 1_000_000


def record(
    index: int = 0,
    send_ms: int = 0,
    chunks: list[tuple[int, int]] = [],  # noqa: B006  it is never changed
    end_ms: int | None = None,
    num_prompt_tokens: int = 7,
    error: str | None = None,
) -> RequestRecord:
    """A record of a request. `chunks`: (arrival in ms, number of tokens)."""
    last_ms = chunks[-1][0] if chunks else send_ms
    return RequestRecord(
        index=index,
        scheduled_ns=0,
        send_ns=send_ms * MS,
        end_ns=(last_ms if end_ms is None else end_ms) * MS,
        chunk_ns=[time * MS for time, _ in chunks],
        chunk_num_tokens=[count for _, count in chunks],
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        error=error,
    )


def test_ttft_counts_from_sending_to_the_first_chunk_with_a_token() -> None:
    assert ttft_ms(record(send_ms=100, chunks=[(110, 0), (125, 1), (130, 1)])) == 25.0
    assert ttft_ms(record(send_ms=100, chunks=[(110, 0)])) is None
    assert ttft_ms(record(send_ms=100)) is None


def test_tpot_ignores_the_first_token_and_chunks_without_tokens() -> None:
    assert tpot_ms(record(chunks=[(10, 1), (14, 1), (18, 1), (90, 0)])) == 4.0
    assert tpot_ms(record(chunks=[(10, 1), (40, 3)])) == 10.0
    assert tpot_ms(record(chunks=[(10, 1), (20, 0)])) is None
    assert tpot_ms(record()) is None


def test_itl_has_one_value_for_each_chunk_after_the_first() -> None:
    several = record(chunks=[(10, 1), (15, 3), (20, 0), (35, 2)])
    assert itls_ms(several) == [5.0, 20.0]
    assert num_output_tokens(several) == 6
    assert itls_ms(record(chunks=[(10, 4)])) == []


@pytest.mark.parametrize("count", [2, 3, 10, 101, 1234])
def test_percentiles_interpolate_linearly(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    summary = summarize(values)
    assert summary is not None
    assert summary.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert summary.median == pytest.approx(statistics.median(values), rel=1e-12)
    assert summary.p90 == pytest.approx(cuts[89], rel=1e-12)
    assert summary.p99 == pytest.approx(cuts[98], rel=1e-12)
    assert (summary.min, summary.max) == (min(values), max(values))


def test_a_single_value_has_a_summary_and_no_values_have_none() -> None:
    assert summarize([3.0]) == Summary(mean=3.0, median=3.0, p90=3.0, p99=3.0, min=3.0, max=3.0)
    assert summarize([]) is None


def test_throughput_counts_successful_requests_over_the_whole_run() -> None:
    figures = serving_figures(
        [
            record(0, 0, [(10, 1), (20, 1)], num_prompt_tokens=5),
            record(1, 500, [(600, 2), (1000, 4)], num_prompt_tokens=3),
            record(2, 100, [(200, 50)], end_ms=2000, error="later"),
            record(3, 100, end_ms=150, error="earlier"),
        ]
    )
    assert (figures.num_successful, figures.num_failed, figures.first_error) == (2, 2, "earlier")
    assert figures.duration_s == 2.0  # the failed request ended last
    assert (figures.total_input_tokens, figures.total_output_tokens) == (8, 8)
    assert (figures.request_throughput, figures.input_throughput, figures.output_throughput) == (1.0, 4.0, 4.0)
    assert figures.ttft_ms is not None and figures.tpot_ms is not None and figures.itl_ms is not None
    assert figures.ttft_ms.mean == (10 + 100) / 2
    assert figures.tpot_ms.mean == (10 / 1 + 400 / 5) / 2
    assert figures.itl_ms.mean == (10 + 400) / 2


def test_a_run_without_success_has_no_latencies() -> None:
    figures = serving_figures([record(error="no")])
    assert (figures.num_successful, figures.output_throughput) == (0, 0.0)
    assert (figures.ttft_ms, figures.tpot_ms, figures.itl_ms) == (None, None, None)
