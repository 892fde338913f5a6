"""Draws where the server stands beside vLLM: `python bench/plot_standing.py docs/images/where-we-stand.svg`.

All figures come from bench/results/serving.json, which `bench/serving.py` has measured on one H200, and from
bench/load/reference.py. bench/results/serving.md says how to repeat the runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.load.reference import VLLM_RUNS, ReferenceRun

RESULTS = Path(__file__).parent / "results" / "serving.json"
RATES = (None, 16, float("inf"))  # as in `ReferenceRun`
LOADS = {None: "one at a time", 16: "16 requests/s", float("inf"): "1,000 at once"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench/plot_standing.py", description="Draws figures of serving.json.")
    parser.add_argument("file", type=Path, metavar="FILE.svg")
    file = parser.parse_args(argv).file
    document = json.loads(RESULTS.read_text())
    runs = [find_run(document, load) for load in LOADS.values()]
    references = [next(run for run in VLLM_RUNS if run.request_rate == rate) for rate in RATES]
    draw(document["environment"]["gpu"], runs, references, file)
    return 0


def find_run(document: dict[str, Any], load: str) -> dict[str, Any]:
    """The run over gRPC on one GPU with this load."""
    return next(
        run
        for run in document["runs"]
        if run["server"] == "one GPU" and run["load"] == load and run["config"]["protocol"] == "grpc"
    )


def draw(gpu: str, runs: Sequence[dict[str, Any]], references: Sequence[ReferenceRun], file: Path) -> None:
    """Bars of three figures for each load, of this server and of vLLM."""
    from bench.load.plots import BLUE, GREY, INK, STYLE, pyplot  # they need matplotlib

    panels = (
        ("Output tokens per second", [run["figures"]["output_throughput"] for run in runs],
         [each.output_throughput for each in references], False),
        ("Time to first token, mean, ms", [run["figures"]["ttft_ms"]["mean"] for run in runs],
         [each.ttft_mean for each in references], True),
        ("Time per output token, mean, ms", [run["figures"]["tpot_ms"]["mean"] for run in runs],
         [each.tpot_mean for each in references], True),
    )  # fmt: skip
    with pyplot.rc_context(STYLE | {"svg.hashsalt": "where-we-stand", "figure.facecolor": "white"}):
        figure, all_axes = pyplot.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
        for axes, (title, ours, theirs, is_log) in zip(all_axes, panels, strict=True):
            for shift, values, color, label in ((-0.2, ours, BLUE, "Twostroke"), (0.2, theirs, GREY, "vLLM 0.25.1")):
                places = [place + shift for place in range(len(values))]
                axes.bar(places, values, width=0.38, color=color, label=label)
                for place, value in zip(places, values, strict=True):
                    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                    axes.annotate(text, (place, value), ha="center", va="bottom", fontsize=8, color=INK)
            axes.set(title=title, xticks=range(len(LOADS)), xticklabels=LOADS.values())
            axes.set_yscale("log" if is_log else "linear")
            axes.margins(y=0.15)
            axes.grid(visible=False, axis="x")
        all_axes[0].legend(loc="upper left")
        days = " and ".join(sorted({run["date"][:10] for run in runs}))
        title = f"Llama-2-7B shape in bfloat16 on one {gpu.partition(' (')[0]}, {days}; vLLM: 2026-11-21"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
        figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
