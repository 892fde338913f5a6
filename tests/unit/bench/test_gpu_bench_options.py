"""What benchmarks of a GPU say where there is none: their options, and one line that nothing can be measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.device_rates import require_gpu

BENCH = Path(__file__).parents[3] / "bench"
PROGRAMS = [file.name for file in sorted(BENCH.glob("*.py")) if "argparse.ArgumentParser(" in file.read_text()]
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
# Stand in for packages: whatever imports them has failed.
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(("triton", "cuda"), None))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_without_packages(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Where neither triton nor cuda-bindings can be imported, installed or not."""
    command = [sys.executable, "-c", WITHOUT, str(BENCH / program), *options]
    return subprocess.run(command, env=NO_GPU, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_needs_no_gpu_nor_its_packages(program: str) -> None:
    answer = run_without_packages(program, "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("usage: ")


@pytest.mark.parametrize(
    "options",
    [["attention.py"], ["dense.py"], ["seam.py"], ["handoff.py", "--device", "cuda"]],
    ids=lambda each: each[0],
)
def test_a_run_without_a_gpu_ends_with_one_line(options: list[str]) -> None:
    answer = run_without_packages(*options)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.splitlines() == ["this machine has no CUDA device, or torch cannot use it"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_gpu("torch", "torch.cuda")
    for package in ("no_such_package", "no_such_package.at_all"):
        with pytest.raises(SystemExit, match=f"the package {package} is not installed"):
            require_gpu("torch", package)
