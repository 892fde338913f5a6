"""One picture of a serving benchmark: distributions of TTFT and ITL, and output tokens per second over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from bench.stats import NS_PER_S, RequestRecord, itls_ms, ttft_ms

matplotlib.use("agg")  # no display

from matplotlib import pyplot
from matplotlib.axes import Axes


def save_plot(records: Sequence[RequestRecord], title: str, file: Path) -> None:
    """Writes a PNG, SVG or PDF, by the name of the file."""
    successful = [record for record in records if record.error is None]
    figure, (ttft, itl, throughput) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    figure.suptitle(title)
    _distribution(ttft, "TTFT (ms)", [value for record in successful if (value := ttft_ms(record)) is not None])
    _distribution(itl, "ITL (ms)", [value for record in successful for value in itls_ms(record)])
    times_s = np.array([time for record in successful for time in record.chunk_ns]) / NS_PER_S
    tokens = np.array([count for record in successful for count in record.chunk_num_tokens])
    throughput.stairs(np.bincount(times_s.astype(int), weights=tokens))
    throughput.set(xlabel="time (s)", ylabel="output tokens in each second", ylim=(0, None))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _distribution(axes: Axes, label: str, values: Sequence[float]) -> None:
    if values:
        axes.ecdf(values)
    axes.set(xlabel=label, ylabel="share of values at most this", ylim=(0, 1))
    axes.grid(alpha=0.3)
