"""Processes that are forked after the collection report as one process would, whatever becomes of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.cluster import REPOSITORY

CONFTEST = """
from tests.support.file_queue import FileQueue

def pytest_configure(config):
    config.pluginmanager.register(FileQueue(2))
"""
COLLECTED_ONCE = """
from pathlib import Path

Path("collected").open("a").write("x")

def test_collected(): assert Path("collected").read_text() == "x"
"""
OUTCOMES = """
import os, sys, time, warnings
import pytest

def test_fails(): print("printed first"); assert 1 == 2
def test_ends_its_process(): os._exit(7)
def test_after_it(): pass
def test_skipped(): pytest.skip("a reason")
def test_warns(): warnings.warn("mind this", UserWarning)
def test_hangs(): time.sleep(60)
"""
FIXTURES = """
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def once():
    yield
    Path("ends").open("a").write("x")

def test_one(once): pass
def test_two(once): assert not Path("ends").exists()
"""


# Its thread does not survive the fork, and it waits for that when it is unloaded.
UNLOADED = """
import onnxruntime

def test_other(): pass
"""


def run_pytest(directory: Path, **files: str) -> str:
    directory.joinpath("conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        directory.joinpath(f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-rsf", "-c", os.devnull, "--rootdir=.", "--timeout=3"]
    command += ["--timeout-method=thread", *(f"-pno:{name}" for name in ("cacheprovider", "schemathesis", "anyio"))]
    options = {"cwd": directory, "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}, "timeout": 60.0}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    return f"{done.stdout}\nstatus {done.returncode}"


def test_every_outcome_is_reported_and_a_process_that_ends_has_a_successor(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, outcomes=OUTCOMES, collected=COLLECTED_ONCE)
    assert re.search(r"3 failed, 3 passed, 1 skipped, 1 warning", said) and said.endswith("status 1"), said
    assert "assert 1 == 2" in said and "printed first" in said and "mind this" in said and "a reason" in said
    assert "has ended with status 7" in said
    assert "time.sleep(60)" in said, "no stack of the test that hangs"


def test_fixtures_of_a_file_end_after_its_last_test(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, fixtures=FIXTURES, other=UNLOADED)
    assert "3 passed" in said and said.endswith("status 0"), said
    assert "terminate called" not in said
    assert (tmp_path / "ends").read_text() == "x"


def test_a_thread_before_the_fork_is_an_error(tmp_path: Path) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, name='idle', daemon=True).start()\n"
    said = run_pytest(tmp_path, thread=f"{thread}def test_other(): pass")
    assert "have started ['idle']" in said and said.endswith("status 3"), said
