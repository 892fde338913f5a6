"""GPU benchmarks on a machine without a GPU: --help works, and a run ends with a one-line message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.gpu.device_rates import require_gpu

BENCH = Path(__file__).parents[3] / "bench"
PROGRAMS = [file.name for file in sorted(BENCH.glob("*.py")) if "argparse.ArgumentParser(" in file.read_text()]
MEASURING = ["attention.py", "dense.py", "gpu/quantized_products.py", "seam.py", "handoff.py --device cuda"]
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
# Here the import of a package set to None fails. One process runs all programs, because importing torch takes seconds.
RUN_ALL = """
import contextlib, io, json, runpy, sys
sys.modules.update(dict.fromkeys(("triton", "cuda"), None))
answers = []
for sys.argv in json.loads(sys.argv[1]):
    status = None
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as exit:
            status = exit.code
        except ImportError as error:
            status = repr(error)
    answers.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The exit status and output of a program. A status that is a text is written to stderr."""

    status: int | str | None
    out: str
    err: str


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """The results by command line, on a machine where neither triton nor cuda-bindings can be imported."""
    commands = [f"{program} --help" for program in PROGRAMS] + MEASURING
    argvs = [[str(BENCH / program), *options] for program, *options in map(str.split, commands)]
    process = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(argvs)],
        env=NO_GPU,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    found = [Answer(*answer) for answer in json.loads(process.stdout)]
    return dict(zip(commands, found, strict=True))


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_needs_neither_a_gpu_nor_its_packages(program: str, answers: dict[str, Answer]) -> None:
    answer = answers[f"{program} --help"]
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("usage: ")


@pytest.mark.parametrize("command", MEASURING)
def test_a_run_without_a_gpu_ends_with_one_line(command: str, answers: dict[str, Answer]) -> None:
    message = "this machine has no CUDA device, or torch cannot use it"
    assert answers[command] == Answer(message, "", "")


def test_the_error_names_a_missing_benchmark_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_gpu("torch", "torch.cuda")
    for package in ("no_such_package", "no_such_package.at_all"):
        with pytest.raises(SystemExit, match=f"the package {package} is not installed"):
            require_gpu("torch", package)
