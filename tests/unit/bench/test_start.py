"""What a start's notes become: phases of processes, in order, indented by those around them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[3] / "bench" / "start"


def load_bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_start", BENCH / "start.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_phases_are_shown_by_process_and_within_each_other(tmp_path: Path) -> None:
    bench, notes = load_bench(), tmp_path / "notes"
    lines = [
        (7, 1.0, "process", "services.gateway"),
        (7, 1.5, "begin", "torch"),
        (8, 1.6, "process", "services.launch"),
        (7, 2.0, "begin", "numpy"),
        (7, 2.25, "end", "numpy"),
        (7, 3.5, "end", "torch"),
        (7, 4.0, "begin", "waits"),
        (7, 9.0, "end", "waits"),
    ]
    notes.write_text("".join(f"{pid} {int(at_s * 1e9)} {what} {name}\n" for pid, at_s, what, name in lines))
    notes.with_suffix(".begin").write_text(f"{10**9} {5 * 10**9}")
    phases = bench.phases_of(notes)
    assert [*phases] == ["services.gateway 7", "services.launch 8"]
    assert [row.split() for row in bench.rows(phases["services.gateway 7"])] == [
        ["0.00", "its", "interpreter", "runs"],
        ["0.50", "2.50", "2.00", "torch"],
        ["1.00", "1.25", "0.25", "numpy"],
        ["3.00", "waits"],
    ]
    indents = [len(row[26:]) - len(row[26:].lstrip()) for row in bench.rows(phases["services.gateway 7"])]
    assert indents == [0, 0, 2, 0]


def test_a_service_notes_imports_calls_and_coroutines(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    program = "import asyncio, services.work as work\nwork.run()\nasyncio.run(work.wait())\n"
    (tmp_path / "services" / "program.py").write_text(program)
    (tmp_path / "services" / "work.py").write_text("def run():\n    pass\nasync def wait():\n    run()\n")
    phases = "\n".join(["services.work", "services.work run", "services.work wait"])
    own = {"PYTHONPATH": f"{BENCH}:{tmp_path}", "START_FILE": str(tmp_path / "notes"), "START_PHASES": phases}
    subprocess.run([sys.executable, "-m", "services.program"], env=os.environ | own, cwd=tmp_path, check=True)
    noted = [line.split()[2:] for line in (tmp_path / "notes").read_text().splitlines()]
    run = [["begin", "services.work:run"], ["end", "services.work:run"]]
    assert noted == [
        ["process", "services.program"],
        ["begin", "services.work"],
        ["end", "services.work"],
        *run,
        ["begin", "services.work:wait"],
        *run,
        ["end", "services.work:wait"],
    ]
