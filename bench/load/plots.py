"""Pictures of benchmark runs, drawn from raw records: latencies over time, their distribution, throughput.

All plots have one style, so that results can be compared. Figures of other servers are grey dashed lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from bench.load.reference import VLLM_NAME, VLLM_RUNS, ReferenceRun
from bench.load.stats import (
    NS_PER_S,
    GatewayFigures,
    RequestRecord,
    ServingFigures,
    WireRun,
    added_latencies_ms,
    itls_ms,
    latency_ms,
    summarize,
    ttft_ms,
)

matplotlib.use("agg")  # no display

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, GREY, INK = "#2563a8", "#d9730d", "#2e8b57", "#8a8f98", "#24292f"
STYLE = {
    "figure.dpi": 130,
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#c4c8ce",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": True,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.fontsize": 8.5,
}
NUM_BINS = 60
MAX_TIME_BINS = 60
MAX_SHOWN_P99S = 1.5  # distributions leave out values beyond this many times the 99th percentile


def save_run_plot(
    records: Sequence[RequestRecord], title: str, file: Path, reference: ReferenceRun | None = None
) -> None:
    """One run in four panels. Writes a PNG, SVG or PDF, by the name of the file."""
    successful = [record for record in records if record.error is None]
    with pyplot.rc_context(STYLE):
        figure, ((over_time, inter_token), (first_token, throughput)) = pyplot.subplots(
            2, 2, figsize=(11, 7), layout="constrained"
        )
        _latency_over_time(over_time, successful)
        itls = [value for record in successful for value in itls_ms(record)]
        _histogram(inter_token, "Inter-token latency", itls, BLUE)
        ttfts = [value for record in successful if (value := ttft_ms(record)) is not None]
        _histogram(first_token, "Time to first token", ttfts, GREEN)
        if reference is not None:
            _reference_line(inter_token, reference.itl_median, f"{VLLM_NAME}:\nmedian at {reference.label}")
            _reference_line(first_token, reference.ttft_median, f"{VLLM_NAME}:\nmedian at {reference.label}")
        _throughput_over_time(throughput, successful)
        _finish(figure, title, file)


def save_rate_plot(runs: Sequence[tuple[float, ServingFigures]], title: str, file: Path, has_reference: bool) -> None:
    """Throughput and latencies of runs at several request rates, in requests/s."""
    runs = sorted(runs, key=lambda run: run[0])
    rates = [rate for rate, _ in runs]
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
        throughput, first_token, per_token = axes
        throughput.plot(rates, [run.output_throughput for _, run in runs], "o-", color=BLUE, label="measured")
        offered = [
            run.output_throughput / run.request_throughput * rate for rate, run in runs if run.request_throughput
        ]
        throughput.plot(rates[: len(offered)], offered, ":", color=INK, linewidth=1, label="offered")
        throughput.set(title="Output tokens per second")
        for axis, name, summaries in (
            (first_token, "Time to first token, ms", [run.ttft_ms for _, run in runs]),
            (per_token, "Time per output token, ms", [run.tpot_ms for _, run in runs]),
        ):
            for label, style, color in (("median", "o-", BLUE), ("p99", "o--", ORANGE)):
                values = [float("nan") if each is None else getattr(each, label) for each in summaries]
                axis.plot(rates, values, style, color=color, label=label.replace("p99", "P99"))
            axis.set(title=name, yscale="log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        if has_reference:
            _reference_rates(axes)
        throughput.set_ylim(0, None)  # now that everything is drawn
        for axis in axes:
            axis.set(xlabel="requests per second")
            axis.legend()
        _finish(figure, title, file)


def save_context_plot(lines: Mapping[str, Sequence[tuple[int, float]]], title: str, file: Path) -> None:
    """Tokens per second over the length of the contexts before them, of all streams and of each; a line for each name.

    lines: pairs of a length in tokens and the time of a step in ms, by the number of streams as text.
    """
    with pyplot.rc_context(STYLE):
        figure, (together, each) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for (num_streams, points), color in zip(lines.items(), (BLUE, ORANGE, GREEN, GREY), strict=False):
            lengths, label = [length for length, _ in points], f"{num_streams} at once"
            rates = [1000 / step_ms for _, step_ms in points]
            together.plot(lengths, [int(num_streams) * rate for rate in rates], "o-", color=color, label=label)
            each.plot(lengths, rates, "o-", color=color, label=label)
        together.set(title="Output tokens per second, all streams", yscale="log")
        each.set(title="Output tokens per second of a stream", ylim=(0, None))
        for axis in (together, each):
            axis.set(xlabel="tokens before", xscale="log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
            axis.legend()
        together.yaxis.set_major_formatter("{x:g}")
        together.yaxis.set_minor_formatter("{x:g}")
        _finish(figure, title, file)


def save_trend_plot(
    times_min: Sequence[float],
    panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[float]]]]],
    title: str,
    file: Path,
) -> None:
    """Samples over minutes. Each panel has a title and several named lines."""
    with pyplot.rc_context(STYLE):
        num_rows = (len(panels) + 1) // 2
        figure, grid = pyplot.subplots(
            num_rows, 2, figsize=(11, 2.8 * num_rows), layout="constrained", squeeze=False, sharex=True
        )
        for axis, (name, lines) in zip(grid.flat, panels, strict=False):
            for (label, values), color in zip(lines, (BLUE, ORANGE, GREEN, GREY), strict=False):
                axis.plot(times_min, values, color=color, label=label, linewidth=1.2)
            axis.set(title=name, ylim=(0, None))
            axis.legend(loc="best", ncols=2)
        for axis in list(grid.flat)[len(panels) :]:
            axis.set_visible(False)
        for axis in grid[-1]:
            axis.set_xlabel("minutes")
        _finish(figure, title, file)


def save_gateway_plot(runs: Sequence[tuple[str, WireRun, GatewayFigures]], title: str, file: Path) -> None:
    """Named runs of `bench/gateway.py`: the rates of all runs, and the latencies of paced ones."""
    paced = [(label, added_latencies_ms(run), run) for label, run, _ in runs if run.is_paced]
    p99s: list[float] = []
    with pyplot.rc_context(STYLE):
        figure, (rates, over_time, distribution) = pyplot.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
        labels = [label for label, _, _ in runs]
        rates.barh(labels, [figures.tokens_per_cpu_s for _, _, figures in runs], color=BLUE, alpha=0.75)
        rates.invert_yaxis()
        rates.set(title="Tokens per second of the gateway's CPU time")
        rates.xaxis.set_major_formatter("{x:,.0f}")
        rates.xaxis.set_major_locator(MaxNLocator(4))
        for (label, by_step, run), color in zip(paced, itertools.cycle((BLUE, ORANGE, GREEN, GREY))):
            steps = sorted(by_step)
            times_s = [(run.step_ns[step] - run.start_ns) / NS_PER_S for step in steps]
            over_time.plot(times_s, [max(by_step[step]) for step in steps], color=color, linewidth=1, label=label)
            values = np.sort([value for step in steps for value in by_step[step]])
            if len(values):
                shares = 100 * np.arange(1, len(values) + 1) / len(values)
                p99s.append(float(np.percentile(values, 99)))
                distribution.plot(values, shares, color=color, linewidth=1.5, label=f"{label}: P99 {p99s[-1]:.2f} ms")
        over_time.set(title="Added latency of each step's last token, ms", xlabel="s", ylim=(0, None))
        distribution.set(title="Added latency, tokens within it, %", xlabel="ms", ylim=(0, 101))
        distribution.set_xlim(0, max([MAX_SHOWN_P99S * p99 for p99 in p99s], default=1))
        for axes in (over_time, distribution):
            if paced:
                axes.legend(loc="best")
            else:
                axes.text(0.5, 0.5, "no paced run", transform=axes.transAxes, ha="center", color=GREY)
        _finish(figure, title, file)


def save_samples_plot(values: Sequence[float], name: str, unit: str, title: str, file: Path) -> None:
    """Repeated measurements in order, and their distribution."""
    with pyplot.rc_context(STYLE):
        figure, (in_order, distribution) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
        in_order.plot(values, ".", color=BLUE, markersize=4)
        in_order.set(title=f"{name}, {unit}", xlabel="measurement", ylim=(0, None))
        _histogram(distribution, name, values, BLUE, unit)
        _finish(figure, title, file)


def save_comparison_plot(
    groups: Sequence[tuple[str, Sequence[float], Sequence[float]]], names: tuple[str, str], title: str, file: Path
) -> None:
    """Two servers side by side, by group: the median of the runs as a bar, every run as a dot."""
    with pyplot.rc_context(STYLE):
        figure, all_axes = pyplot.subplots(1, len(groups), figsize=(4 * len(groups), 4), layout="constrained")
        for axes, (label, *both) in zip(np.atleast_1d(all_axes), groups, strict=True):
            for place, (name, runs, color) in enumerate(zip(names, both, (GREY, BLUE), strict=True)):
                median = float(np.median(runs))
                axes.bar(place, median, width=0.6, color=color, alpha=0.75, label=f"{name}: {median:,.0f}")
                axes.plot([place] * len(runs), runs, "o", color=INK, markersize=3)
            axes.set(title=label, xticks=range(len(names)), xticklabels=names)
            axes.margins(y=0.3)
            axes.grid(visible=False, axis="x")
            axes.legend(loc="upper left")
        _finish(figure, title, file)


def _latency_over_time(axes: Axes, records: Sequence[RequestRecord]) -> None:
    sent_s = [record.send_ns / NS_PER_S for record in records]
    axes.scatter(sent_s, [latency_ms(each) for each in records], s=9, color=BLUE, alpha=0.6, label="whole answer")
    first = [(sent, value) for sent, each in zip(sent_s, records, strict=True) if (value := ttft_ms(each)) is not None]
    if first:
        axes.scatter(*zip(*first, strict=True), s=9, color=ORANGE, alpha=0.6, label="first token")
    axes.set(title="Latency of each request, ms", xlabel="sent at, s", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="upper left", ncols=2, bbox_to_anchor=(0, 1.02))
    axes.margins(y=0.15)


def _histogram(axes: Axes, name: str, values: Sequence[float], color: str, unit: str = "ms") -> None:
    axes.set(title=f"{name}, {unit}", xlabel=unit, ylabel="share of all, %")
    summary = summarize(values)
    if summary is None:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=GREY)
        return
    low, high = max(summary.min, 1e-3), max(summary.max, 1.001 * max(summary.min, 1e-3))
    is_wide = high / low > 30
    bins = np.geomspace(low, high, NUM_BINS) if is_wide else np.linspace(low, high, NUM_BINS)
    weights = np.full(len(values), 100 / len(values))
    axes.hist(values, bins=bins, weights=weights, color=color, alpha=0.75)
    if is_wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    for value, label, style in ((summary.median, "median", "-"), (summary.p99, "P99", "--")):
        axes.axvline(value, color=INK, linewidth=1, linestyle=style, label=f"{label} {value:.3g}")
    axes.legend(loc="upper right")


def _throughput_over_time(axes: Axes, records: Sequence[RequestRecord]) -> None:
    axes.set(title="Output tokens per second, and requests in flight", xlabel="s")
    if not records:
        return
    times_s = np.array([time for record in records for time in record.chunk_ns]) / NS_PER_S
    tokens = np.array([count for record in records for count in record.chunk_num_tokens])
    end_s = max(record.end_ns for record in records) / NS_PER_S
    bins = np.linspace(0, end_s, max(10, min(MAX_TIME_BINS, round(end_s))) + 1)
    counts, _ = np.histogram(times_s, bins=bins, weights=tokens)
    axes.stairs(counts / np.diff(bins), bins, color=BLUE, fill=True, alpha=0.25)
    axes.stairs(counts / np.diff(bins), bins, color=BLUE, linewidth=1.3)
    axes.set_ylim(0, None)
    axes.tick_params(axis="y", colors=BLUE)
    changes = sorted([(each.send_ns, 1) for each in records] + [(each.end_ns, -1) for each in records])
    in_flight = axes.twinx()
    running = np.cumsum([change for _, change in changes])
    in_flight.step([time / NS_PER_S for time, _ in changes], running, where="post", color=ORANGE, linewidth=1)
    in_flight.set(ylim=(0, 1.3 * max(running)))
    in_flight.set_ylabel("in flight", color=ORANGE)
    in_flight.tick_params(axis="y", colors=ORANGE)
    in_flight.grid(False)


def _reference_line(axes: Axes, value: float, label: str) -> None:
    axes.axvline(value, color=GREY, linewidth=1.5, linestyle=":", label=label)
    axes.legend(loc="upper right")


def _reference_rates(axes: Sequence[Axes]) -> None:
    throughput, first_token, per_token = axes
    runs = [run for run in VLLM_RUNS if run.request_rate not in (None, float("inf"))]
    rates = [run.request_rate for run in runs]
    peak = max(run.output_throughput for run in VLLM_RUNS)
    throughput.axhline(peak, color=GREY, linestyle=":", label=f"{VLLM_NAME}, at most")
    throughput.plot(rates, [run.output_throughput for run in runs], "s--", color=GREY, label=VLLM_NAME)
    first_token.plot(rates, [run.ttft_median for run in runs], "s--", color=GREY, label=f"{VLLM_NAME}, median")
    first_token.plot(rates, [run.ttft_p99 for run in runs], "s:", color=GREY, label=f"{VLLM_NAME}, P99")
    per_token.plot(rates, [run.tpot_mean for run in runs], "s--", color=GREY, label=f"{VLLM_NAME}, mean")


def _finish(figure: Figure, title: str, file: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    figure.savefig(file)
    pyplot.close(figure)
