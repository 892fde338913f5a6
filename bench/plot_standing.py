"""Draws where the server stands beside vLLM: `python bench/plot_standing.py docs/images/where-we-stand.svg`.

The server's figures are those of bench/results/standing.json, which `python bench/gpu/table.py 7b --json FILE` has
measured on one H200. vLLM's are below.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu.table import value_at

RESULTS = Path(__file__).parent / "results" / "standing.json"


@dataclass(frozen=True, slots=True)
class Bar:
    """A load, which of its figures is drawn, and that figure of vLLM."""

    label: str
    load: Mapping[str, Any]  # settings that only the runs of this load have
    figure: str
    vllm: float


ALONE = {"max_concurrency": 1, "len_distribution": "uniform"}
RATE = {"request_rate": 16.0}
# vLLM 0.25.1 on one H200, 2026-11-24, over HTTP by a client that is not this project's.
PANELS = {
    "Output tokens per second": (
        Bar("1,000 at once\n235 in, 212 out", {"num_prompts": 1000}, "output_throughput", 8_572),
        Bar("64 at once\n512 in, 512 out", {"max_concurrency": 64}, "output_throughput", 4_971),
    ),
    "Time to first token, mean, ms": (
        Bar("one at a time", ALONE, "ttft_ms.mean", 14.6),
        Bar("16 requests/s", RATE, "ttft_ms.mean", 22.5),
    ),
    "Time per output token, mean, ms": (
        Bar("one at a time", ALONE, "tpot_ms.mean", 4.68),
        Bar("16 requests/s", RATE, "tpot_ms.mean", 5.94),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench/plot_standing.py", description="Draws figures of standing.json.")
    parser.add_argument("file", type=Path, metavar="FILE.svg")
    draw(json.loads(RESULTS.read_text()), parser.parse_args(argv).file)
    return 0


def measured(runs: Sequence[Mapping[str, Any]], bar: Bar) -> float:
    """The median over all runs of the load."""
    of_load = [run["figures"] for run in runs if bar.load.items() <= run.get("load", {}).items()]
    return statistics.median(value_at(figures, bar.figure) for figures in of_load)


def draw(document: Mapping[str, Any], file: Path) -> None:
    """Bars of the figures of each panel, of this server and of vLLM."""
    from bench.load.plots import BLUE, GREY, INK, STYLE, pyplot  # they need matplotlib

    with pyplot.rc_context(STYLE | {"svg.hashsalt": "where-we-stand", "figure.facecolor": "white"}):
        figure, all_axes = pyplot.subplots(1, len(PANELS), figsize=(13, 3.9), layout="constrained")
        for axes, (title, bars) in zip(all_axes, PANELS.items(), strict=True):
            ours, theirs = [measured(document["runs"], bar) for bar in bars], [bar.vllm for bar in bars]
            for shift, values, color, label in ((-0.2, ours, BLUE, "Twostroke"), (0.2, theirs, GREY, "vLLM 0.25.1")):
                places = [place + shift for place in range(len(values))]
                axes.bar(places, values, width=0.38, color=color, label=label)
                for place, value in zip(places, values, strict=True):
                    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                    axes.annotate(text, (place, value), ha="center", va="bottom", fontsize=8, color=INK)
            axes.set(title=title, xticks=range(len(bars)), xticklabels=[bar.label for bar in bars])
            axes.margins(y=0.15)
            axes.grid(visible=False, axis="x")
        all_axes[0].legend(loc="upper right")
        title = f"Llama-2-7B shape in bfloat16 on one NVIDIA H200, {document['note']}; vLLM: another one, 2026-11-24"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
        figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
