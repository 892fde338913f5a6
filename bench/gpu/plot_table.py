"""Pictures of the runs that `bench/gpu/table.py --json` kept: latencies over the load, tokens per second over contexts.

    python bench/gpu/plot_table.py bench/results/table.json --load load.png --context context.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.load.plots import save_context_plot, save_rate_plot
from bench.load.stats import ServingFigures, Summary

_SUMMARIES = ("ttft_ms", "tpot_ms", "itl_ms")


def read_figures(values: Mapping[str, Any]) -> ServingFigures:
    """The figures that a run's file has."""
    summaries = {name: Summary(**values[name]) for name in _SUMMARIES}
    return ServingFigures(**{**values, **summaries})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="of bench/gpu/table.py")
    parser.add_argument("--load", type=Path, metavar="PNG")
    parser.add_argument("--context", type=Path, metavar="PNG")
    options = parser.parse_args()
    runs = [run for file in options.files for run in json.loads(file.read_text())["runs"] if "figures" in run]
    if options.load is not None:
        of_load = [run for run in runs if run["group"] == "load"]
        points = [(float(run["load"]["request_rate"]), read_figures(run["figures"])) for run in of_load]
        save_rate_plot(points, "Llama-2-7B, bfloat16, over HTTP, one H200", options.load, has_reference=True)
    if options.context is not None:
        lines = defaultdict[str, list[tuple[int, float]]](list)
        for run in runs:
            if run["group"] == "context":
                step_ms = run["figures"]["itl_ms"]["median"]
                lines[str(run["load"]["max_concurrency"])].append((run["load"]["input_mean"], step_ms))
        save_context_plot(lines, "Llama-3.1-8B, bfloat16, into the dense worker, one H200", options.context)


if __name__ == "__main__":
    main()
