"""The command `twostroke`: its help, and how it finds a command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services import VERSION
from services.console.__main__ import COMMANDS, HELP, run
from tests.support.cluster import REPOSITORY

SCREEN_LINES, SCREEN_COLUMNS = 24, 80
TIMEOUT_S = 20.0


def test_the_help_fits_one_screen_and_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert printed == HELP and len(lines) < SCREEN_LINES and max(map(len, lines)) <= SCREEN_COLUMNS
    assert [name for name in COMMANDS if not any(line.startswith(f"  {name} ") for line in lines)] == []


def test_the_help_imports_nothing_that_takes_time() -> None:
    code = "import sys; from services.console.__main__ import run; run(['--help']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert not imported & {"asyncio", "grpc", "pydantic", "numpy", "torch", "transformers"}


def test_the_help_of_serve_needs_neither_torch_nor_the_services() -> None:
    code = "import sys; from services.console.__main__ import run\ntry: run(['serve', '--help'])\n"
    code += "except SystemExit as end: print(end.code, *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    status, *imported = done.stdout.splitlines()[-1].split()
    assert status == "0" and "usage: twostroke serve" in done.stdout
    assert not set(imported) & {"torch", "transformers", "services.launch.service"}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("server", "'server' is not a command: did you mean 'serve'?"),
        ("xyz", "there are serve, chat, bench, ctl, models, build-engines, completion, doctor"),
    ],
)
def test_an_unknown_command_names_the_nearest(name: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name]) == 2
    assert named in capsys.readouterr().err


def test_the_help_of_build_engines_needs_no_torch() -> None:
    code = "import sys; from services.console.__main__ import run\ntry: run(['build-engines', '--help'])\n"
    code += "except SystemExit as end: print(end.code, *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    status, *imported = done.stdout.splitlines()[-1].split()
    assert status == "0" and "usage: twostroke build-engines" in done.stdout
    assert "torch" not in imported


def test_flags_of_build_engines_may_have_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["build-engines", "--load_format=nothing"])
    assert "argument --load-format: invalid choice: 'nothing'" in capsys.readouterr().err


def test_without_a_command_the_help_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert capsys.readouterr().out == HELP


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"twostroke {VERSION}\n"


@pytest.mark.parametrize("command", ["--help", "doctor"])
def test_a_reader_that_has_gone_ends_it_without_a_traceback(command: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "services.console", command],
            cwd=REPOSITORY, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    finally:
        os.close(write_end)
    assert (done.stderr, done.returncode) == ("", 141)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_of_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: twostroke {name}" in capsys.readouterr().out


def test_the_module_runs_in_a_checkout() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.console", "--version"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (f"twostroke {VERSION}\n", 0)
