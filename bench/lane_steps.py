"""What the steps of a server with lanes were like: reads a step log (`dense.step_log`) and prints half a second a line.

    python bench/lanes.py --gpus --only "two GPUs, two lanes" --set dense.step_log=steps.jsonl --load 8192x1024:128/128
    python bench/lane_steps.py steps.jsonl

For each lane: steps, their tokens and time, how many of them were planned too late, and by how much on average. Then
the same of all steps with more than three quarters of the most tokens, and of those that only decode. Last, tokens/s in
the middle half of the time in which most sequences run: without the beginning, when all requests come at once, and the
end, when fewer and fewer are left. A file has one load.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

WINDOW_S = 0.5
IDLE_MS = 1000  # a lane that does nothing for longer has no work


def main(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if line["num_seqs"]]
    windows = defaultdict[int, list[dict[str, Any]]](list)
    for line in lines:
        windows[int((line["timestamp"] - lines[0]["timestamp"]) / WINDOW_S)].append(line)
    print("     s   tok/s  running waiting | for each lane: steps, sequences, tokens, ms, late (ms), launch ms")
    for number, steps in windows.items():
        rate = sum(step["num_sampled"] for step in steps) / WINDOW_S
        running, waiting = (np.mean([step[name] for step in steps]) for name in ("num_running", "num_waiting"))
        lanes = [[step for step in steps if step["lane"] == lane] for lane in sorted({each["lane"] for each in steps})]
        print(f"{number * WINDOW_S:6.1f} {rate:7,.0f} {running:8.0f} {waiting:7.0f} | {' | '.join(map(_of, lanes))}")
    most = max(line["num_tokens"] for line in lines)
    _print_all("large steps", [line for line in lines if line["num_tokens"] > most * 3 / 4])
    _print_all("decode only", [line for line in lines if line["num_tokens"] == line["num_seqs"]])
    _print_middle(lines)


def _of(steps: list[dict[str, Any]]) -> str:
    sequences, tokens, ms, launch_ms = (
        np.mean([step[name] for step in steps]) for name in ("num_seqs", "num_tokens", "duration_ms", "launch_ms")
    )
    late = [step["gap_ms"] for step in steps if 0 < step["gap_ms"] < IDLE_MS]
    late_ms = np.mean(late) if late else 0.0
    return f"{len(steps):3} {sequences:4.0f} {tokens:5.0f} {ms:6.2f} {len(late):3} ({late_ms:5.2f}) {launch_ms:4.2f}"


def _print_all(what: str, steps: list[dict[str, Any]]) -> None:
    if steps:
        all_ms = [step["duration_ms"] + step["gap_ms"] for step in steps if step["gap_ms"] < IDLE_MS]
        percentiles = np.percentile(all_ms, (10, 50, 90))
        print(f"{what}: {_of(steps)}; ms with what they were late, P10, P50, P90: {percentiles.round(2)}")


def _print_middle(lines: list[dict[str, Any]]) -> None:
    most = max(line["num_running"] for line in lines)
    full = [line["timestamp"] for line in lines if line["num_running"] > most / 2]
    quarter_s = (full[-1] - full[0]) / 4
    begin_s, end_s = full[0] + quarter_s, full[-1] - quarter_s
    middle = [line for line in lines if begin_s < line["timestamp"] <= end_s]
    rate = sum(line["num_sampled"] for line in middle) / (end_s - begin_s)
    print(f"middle {end_s - begin_s:.1f} s: {rate:,.0f} tok/s")
    _print_all("middle", middle)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
