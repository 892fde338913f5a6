"""Processes that are forked after the collection report as one process would, whatever becomes of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_process import REPOSITORY, RUN_TIMEOUT_S, run_warm

CONFTEST = """
import os
from pathlib import Path

from tests.support.file_queue import FileQueue

def pytest_configure(config):
    os.chdir(Path(__file__).parent)
    config.pluginmanager.register(FileQueue(2{}))
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

ALONE = """
from pathlib import Path

def test_comes_last(): assert Path("first").exists()
"""
BESIDE = """
import time
from pathlib import Path

def test_comes_first(): time.sleep(0.5); Path("first").touch()
"""

# All of it is well where a test runs alone, or for the second time.
SOMETIMES = """
import os, time
from pathlib import Path

def is_first(name):
    with Path(name).open("a") as runs:
        return runs.write("x") and runs.tell() == 1

def test_fails(): print("printed first"); assert not is_first("fails"), "once"
def test_ends_its_process(): is_first("exits") and os._exit(7)
def test_waits_too_long():
    if is_first("waits"):
        time.sleep(60)
    parent = os.getppid()
    assert Path(f"/proc/{parent}/task/{parent}/children").read_text().split() == [str(os.getpid())], "not alone"
def test_well(): is_first("well")
"""
MANY = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("number", range(4))
def test_fails_once(number):
    with Path("many").open("a") as runs:
        runs.write("x")
        assert runs.tell() > 4, "once more"
"""
TEARDOWN = """
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def counted():
    tests = []
    yield tests
    assert len(tests) < 2, "too many for a fixture"

def test_one(counted): counted.append(1)
def test_two(counted): counted.append(2)
"""

# Its thread does not survive the fork, and it waits for that when it is unloaded.
UNLOADED = """
import onnxruntime

def test_other(): pass
"""


def run_pytest(directory: Path, arguments: str = "", *, is_warm: bool = True, **files: str) -> str:
    """`arguments`: more of them for the queue. A warm process unloads nothing at its end."""
    directory.joinpath("conftest.py").write_text(CONFTEST.format(arguments))
    for name, text in files.items():
        directory.joinpath(f"test_{name}.py").write_text(text)
    command = ["pytest", str(directory), "-rsf", "-c", os.devnull, f"--rootdir={directory}", "--timeout=3"]
    command += ["--timeout-method=thread", "-ppytest_timeout", "-pno:cacheprovider"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # their imports take a second
    if is_warm:
        done = run_warm(*command, env=env)
    else:
        options = {"cwd": REPOSITORY, "env": env, "capture_output": True, "text": True, "timeout": RUN_TIMEOUT_S}
        done = subprocess.run([sys.executable, "-m", *command], **options)
    return f"{done.stdout}{done.stderr}\nstatus {done.returncode}"


def test_every_outcome_is_reported_and_who_fails_has_a_second_chance_alone(tmp_path: Path) -> None:
    files = {"outcomes": OUTCOMES, "collected": COLLECTED_ONCE, "sometimes": SOMETIMES, "teardown": TEARDOWN}
    said = run_pytest(tmp_path, ", 7", **files)
    assert re.search(r"\b3 failed, 9 passed, 1 skipped, 1 warning, 1 error, 7 failed beside others", said), said
    assert said.endswith("status 1"), said
    assert "mind this" in said and "a reason" in said
    assert "time.sleep(60)" in said, "no stack of the test that hangs"
    both = said.split("== failed beside others, passed alone ==")
    for shown, error in zip(both, ("assert 1 == 2", "AssertionError: once"), strict=True):
        assert error in shown and "printed first" in shown and "has ended with status 7" in shown, said
    assert "test_fails, alone: failed in call" in both[0] and "alone: failed in teardown" in both[0], said
    assert [(tmp_path / name).read_text() for name in ("fails", "exits", "waits", "well")] == ["xx", "xx", "xx", "x"]


@pytest.mark.parametrize(("arguments", "num_failures"), [("", 4), (", 4", 0)])
def test_more_failures_than_chances_all_count_at_once(tmp_path: Path, arguments: str, num_failures: int) -> None:
    said = run_pytest(tmp_path, arguments, many=MANY)
    expected = f"{num_failures} failed" if num_failures else "4 passed"
    assert re.search(rf"\b{expected}", said) and said.endswith(f"status {int(num_failures > 0)}"), said
    assert ("once more" in said) and ("passed alone" in said) == (num_failures == 0), said
    assert (tmp_path / "many").read_text() == "x" * (4 if num_failures else 8)


def test_fixtures_of_a_file_end_after_its_last_test(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, is_warm=False, fixtures=FIXTURES, other=UNLOADED)
    assert "3 passed" in said and said.endswith("status 0"), said
    assert "terminate called" not in said
    assert (tmp_path / "ends").read_text() == "x"


def test_tests_alone_come_after_all_others(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, ", 0, Path('test_alone.py').resolve()", alone=ALONE, beside=BESIDE)
    assert "2 passed" in said and said.endswith("status 0"), said


def test_a_thread_before_the_fork_is_an_error(tmp_path: Path) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, name='idle', daemon=True).start()\n"
    said = run_pytest(tmp_path, thread=f"{thread}def test_other(): pass")
    assert "have started ['idle']" in said and said.endswith("status 3"), said
