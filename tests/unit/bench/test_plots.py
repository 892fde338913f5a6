"""The plots show the measurements: what is drawn is compared with the raw records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed, see requirements-bench.txt")

from matplotlib.figure import Figure

from bench.load import plots
from bench.load.reference import VLLM_RUNS
from bench.load.stats import RequestRecord, ServingFigures, WireRun, gateway_figures, itls_ms, serving_figures

MS = 1_000_000
SECOND = 1_000_000_000


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The saved figures."""
    figures: list[Figure] = []
    close = plots.pyplot.close
    monkeypatch.setattr(plots.pyplot, "close", figures.append)
    yield figures
    for figure in figures:
        close(figure)


def records(count: int, itl_ms: int) -> list[RequestRecord]:
    """Requests sent every 0.1 s. The first token arrives after 20 ms; nine more follow."""
    made = []
    for index in range(count):
        send_ns = index * SECOND // 10
        chunk_ns = [send_ns + (20 + itl_ms * token) * MS for token in range(10)]
        made.append(RequestRecord(index, send_ns, send_ns, chunk_ns[-1], chunk_ns, [1] * 10, 5, 0, None))
    return made


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_a_run_plot_shows_each_latency_the_distribution_and_the_reference(tmp_path: Path, drawn: list[Figure]) -> None:
    run = records(20, itl_ms=7)
    plots.save_run_plot(run, "a run", tmp_path / "run.png", VLLM_RUNS[1])
    over_time, inter_token, first_token, throughput, _ = drawn[0].axes
    sent_s, latency = over_time.collections[0].get_offsets().T
    assert list(sent_s) == pytest.approx([index / 10 for index in range(20)])
    assert list(latency) == pytest.approx([83.0] * 20)
    for axes, value in ((inter_token, 7.0), (first_token, 20.0)):
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(100), "the bars are percentages"
        assert any(x == pytest.approx([value, value]) for x, _ in lines_of(axes).values()), "the median has a line"
    reference = "vLLM 0.25.1, Llama-2-7B, H200:\nmedian at 2 requests/s"
    assert lines_of(inter_token)[reference][0] == [VLLM_RUNS[1].itl_median] * 2
    assert len(itls_ms(run[0])) == 9
    [_, stairs] = throughput.patches
    rates, edges, _ = stairs.get_data()
    assert float(np.sum(rates * np.diff(edges))) == pytest.approx(200), "the area is the number of tokens"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_rates_are_drawn_with_the_reference_of_vllm(tmp_path: Path, drawn: list[Figure]) -> None:
    runs: list[tuple[float, ServingFigures]] = [
        (rate, serving_figures(records(20, itl_ms=itl_ms))) for rate, itl_ms in ((16.0, 9), (2.0, 4))
    ]
    plots.save_rate_plot(runs, "rates", tmp_path / "rates.png", has_reference=True)
    throughput, first_token, per_token = (lines_of(axes) for axes in drawn[0].axes)
    assert throughput["measured"] == ([2, 16], [figures.output_throughput for _, figures in reversed(runs)])
    assert throughput["vLLM 0.25.1, Llama-2-7B, H200"] == ([2, 16], [414, 3259])
    assert throughput["vLLM 0.25.1, Llama-2-7B, H200, at most"][1] == [8202, 8202]
    assert first_token["median"] == ([2, 16], pytest.approx([20.0, 20.0]))
    assert per_token["P99"] == ([2, 16], pytest.approx([4.0, 9.0]))


def test_gateway_plots_show_rates_and_the_latency_of_paced_runs(tmp_path: Path, drawn: list[Figure]) -> None:
    run = WireRun(
        start_ns=0,
        end_ns=SECOND,
        cpu_s={"gateway": 0.5, "client": 0.1, "stub": 0.1},
        step_ns=[index * SECOND // 10 for index in range(10)],
        first_step=[0, 0],
        chunk_ns=[[index * SECOND // 10 + late * MS for index in range(10)] for late in (1, 3)],
        chunk_num_tokens=[[1] * 10, [1] * 10],
        num_messages=20,
        is_paced=True,
    )
    plots.save_gateway_plot([("sse, 2", run, gateway_figures(run))], "a gateway", tmp_path / "gateway.png")
    rates, over_time, distribution = drawn[0].axes
    assert [bar.get_width() for bar in rates.patches] == [20 / 0.5]
    times_s, latest_ms = lines_of(over_time)["sse, 2"]
    assert times_s == pytest.approx([index / 10 for index in range(10)]) and latest_ms == [3.0] * 10
    values, percentages = lines_of(distribution)["sse, 2: P99 3.00 ms"]
    assert values == [1.0] * 10 + [3.0] * 10 and percentages[9] == 50


def test_repeated_measurements_are_drawn_in_their_order(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.save_samples_plot([3.0, 1.0, 2.0], "Round trip", "us", "the seam", tmp_path / "seam.png")
    plots.save_comparison_plot(
        [("One stream", [10.0, 12.0, 50.0], [9.0, 9.5, 9.25])], ("theirs", "ours"), "CPU", tmp_path / "cpu.png"
    )
    in_order, _ = drawn[0].axes
    assert list(in_order.get_lines()[0].get_ydata()) == [3.0, 1.0, 2.0]
    [axes] = drawn[1].axes
    assert [bar.get_height() for bar in axes.patches] == [12.0, 9.25], "the bars are medians"
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[10.0, 12.0, 50.0], [9.0, 9.5, 9.25]]


def test_a_context_plot_shows_rates_of_all_streams_and_of_each(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.save_context_plot({"1": [(128, 5.0)], "16": [(128, 8.0), (512, 10.0)]}, "a title", tmp_path / "context.png")
    together, each = drawn[0].axes
    assert lines_of(together) == {"1 at once": ([128], [200]), "16 at once": ([128, 512], [2000, 1600])}
    assert lines_of(each) == {"1 at once": ([128], [200]), "16 at once": ([128, 512], [125, 100])}
    assert (tmp_path / "context.png").stat().st_size
