"""Which figures a soak test reports as flat or growing, for samples with a known slope."""

from __future__ import annotations

import random

import pytest

from bench.load.stats import trend
from bench.soak import ROLES, Sample, SoakRequest, _parser, format_report, judge, window_medians


def samples(memory_per_hour: float = 0.0, files_per_hour: float = 0.0, probe_per_hour: float = 0.0) -> list[Sample]:
    """Samples of half an hour, every 5 seconds: a steep rise in the first 3 minutes, the given slope, and noise."""
    rng = random.Random(1)
    made = []
    for time_s in range(0, 1800, 5):
        hours, settling = time_s / 3600, max(0.0, 180 - time_s)
        made.append(
            Sample(
                time_s=float(time_s),
                memory_mb=dict.fromkeys(ROLES, 400 - settling + memory_per_hour * hours + rng.gauss(0, 1)),
                num_files=dict.fromkeys(ROLES, round(30 + files_per_hour * hours + rng.random())),
                cpu_s=dict.fromkeys(ROLES, 0.5 * time_s),
                probe_ms={"gateway": 3 + probe_per_hour * hours + abs(rng.gauss(0, 1))},
            )
        )
    return made


def requests(ttft_per_hour: float = 0.0, error: str | None = None) -> list[SoakRequest]:
    rng = random.Random(2)
    return [
        SoakRequest(time_s, protocol, "stream", 50 + ttft_per_hour * time_s / 3600 + rng.expovariate(0.1), 200.0, error)
        for time_s in range(0, 1800, 2)
        for protocol in ("grpc", "http")
    ]


def grown(made: list[Sample], sent: list[SoakRequest]) -> set[str]:
    return {verdict.name for verdict in judge(made, sent, _parser().parse_args([])) if not verdict.is_flat}


def test_noise_and_the_first_minutes_count_as_flat() -> None:
    assert grown(samples(), requests()) == set()


@pytest.mark.parametrize(
    ("made", "sent", "names"),
    [
        (samples(memory_per_hour=40), requests(), {f"{role}: memory" for role in ROLES}),
        (samples(files_per_hour=20), requests(), {f"{role}: open files" for role in ROLES}),
        (samples(probe_per_hour=10), requests(), {"gateway: answer time"}),
        (samples(), requests(ttft_per_hour=100), {"grpc: time to first token", "http: time to first token"}),
    ],
)
def test_a_leak_is_reported_by_name(made: list[Sample], sent: list[SoakRequest], names: set[str]) -> None:
    assert grown(made, sent) == names


def test_a_trend_is_the_line_of_best_fit() -> None:
    line = trend([0.0, 1800.0, 3600.0], [10.0, 15.0, 20.0])
    assert (line.start, line.slope_per_hour, line.change) == pytest.approx((10, 10, 10))
    assert line.noise == pytest.approx(0, abs=1e-9)
    assert trend([0.0, 1.0, 2.0, 3.0], [1.0, -1.0, -1.0, 1.0]).noise == pytest.approx(1.0)


def test_a_window_has_one_median() -> None:
    points = [(float(time_s), value) for time_s, value in enumerate([1.0, 5.0, 900.0, 7.0, 8.0, 9.0])]
    assert window_medians(points, 2) == [(1.0, 5.0), (4.0, 8.0)]


def test_the_report_counts_errors_and_names_leftovers() -> None:
    made, sent = samples(), requests(error="status 500, expected 200")
    arguments = _parser().parse_args([])
    report = format_report(judge(made, sent, arguments), made, sent, ["3 running sequences"], arguments)
    assert "Wrong answers or unexpected errors: 1800; the first: status 500, expected 200" in report
    assert "Left behind after the load: 3 running sequences." in report
    assert "| grpc stream | 900 | 900 | 200.0 / 200.0 |" in report
    assert "Cores used: gateway 0.50" in report
