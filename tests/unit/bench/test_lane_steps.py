"""`bench/lane_steps.py` on a log of two lanes: what it prints of each half second, and of the middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.lane_steps import main


def test_each_lane_has_its_own_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 10 and 20 ms for 5 s, and at first one that waited for work; every second one of lane 1 is late."""
    lines = []
    for lane, ms in ((0, 10), (1, 20)):
        for index in range(5000 // ms):
            gap_ms = (60_000.0 if not lane else 0.0) if not index else 3.0 * lane * (index % 2)
            step = {"lane": lane, "num_seqs": 8, "num_tokens": 8 + 56 * lane, "num_sampled": 8, "num_running": 16}
            times = {"timestamp": 100 + index * ms / 1000, "duration_ms": ms, "gap_ms": gap_ms, "launch_ms": 1.5}
            lines.append(step | times | {"num_waiting": 2})
    lines.sort(key=lambda line: line["timestamp"])
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(path)
    printed = capsys.readouterr().out.splitlines()
    half = "  0.5   1,200       16       2 |  50    8     8  10.00   0 ( 0.00) 1.50 |  25    8    64  20.00"
    assert printed[2].strip().startswith(half.strip())
    assert len(printed) == 1 + 10 + 2 + 2
    assert printed[11].startswith("large steps: 250    8    64  20.00 125 ( 3.00)"), "those of lane 1, half are late"
    assert printed[12].startswith("decode only: 500    8     8  10.00   0 "), "waiting for work is not late"
    rate = float(printed[13].split()[-2].replace(",", ""))
    assert rate == pytest.approx(1200, rel=0.01)  # its ends may lie within steps
