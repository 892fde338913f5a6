"""Settings of every test process."""

from __future__ import annotations

import functools
import gc
import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

from tests.support.examples import MAX_QUICK_EXAMPLES, QUICK
from tests.support.file_queue import FileQueue
from tests.support.rewriting import RewritingProcess
from tests.support.second_chance import MAX_SECOND_CHANCES

# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No test may depend on how fast the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
# The same examples in every run.
hypothesis.settings.register_profile(QUICK, hypothesis.settings.get_profile("ci"), max_examples=MAX_QUICK_EXAMPLES)

SEED = 0  # of the generators that a test shares with all others of its process

# What is imported lives as long as this process. To look for garbage in it again and again takes a tenth of the time.
gc.disable()


DURATIONS = Path(__file__).with_name("durations.json")  # seconds, by file; `make durations` writes it
LONG_TESTS = Path(__file__).with_name("long_tests.txt")  # `make test-long` runs them
_seconds = Counter[str]()  # of this run, by file


def pytest_configure(config: pytest.Config) -> None:
    if num_processes := config.getoption("--processes"):
        max_second_chances = 0 if config.getoption("--no-second-chance") else MAX_SECOND_CHANCES
        alone = config.getoption("--alone")
        config.pluginmanager.register(FileQueue(num_processes, max_second_chances, alone and config.rootpath / alone))
        if not sys.dont_write_bytecode:
            config.pluginmanager.register(RewritingProcess(Path(__file__).parent.rglob("test_*.py"), config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that took longer than `--files-up-to`, where unknown ones count as short; with `--only-long`,
    those without long tests, which take seconds to import.
    """
    if not collection_path.name.startswith("test_"):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    if config.getoption("--only-long") and file not in {each.partition("::")[0] for each in long_tests()}:
        return True
    limit_s = config.getoption("--files-up-to")
    if limit_s is None:
        return None
    return True if json.loads(DURATIONS.read_text()).get(file, 0.0) > limit_s else None


@functools.cache
def long_tests() -> frozenset[str]:
    return frozenset(LONG_TESTS.read_text().splitlines())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts files that take long first, so that no process is left with one at the end; unknown ones count as long.

    Before all others come those of tests/integration: the clusters that they share end with the last of them, and an
    idle one takes 1.6 % of a core.
    """
    select_by_length(config, items)
    known = json.loads(DURATIONS.read_text())

    def place(item: pytest.Item) -> tuple[bool, float]:
        file = file_of(item)
        return not file.startswith("tests/integration/"), -known.get(file, float("inf"))

    items.sort(key=place)  # a stable sort: files stay together


def file_of(item: pytest.Item) -> str:
    """Its `location` also has a line, which takes longer to find than all else here."""
    return item.nodeid.partition("::")[0]


def select_by_length(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long tests out of `make test`; with `--only-long`, all others."""
    is_only_long = config.getoption("--only-long")
    if not is_only_long and config.getoption("--hypothesis-profile") != QUICK:
        return
    long = long_tests()
    whole_files = {*map(file_of, items)} if not any("::" in each for each in config.args) else set()
    if unknown := {each for each in long if each.split("::")[0] in whole_files} - {item.nodeid for item in items}:
        raise pytest.UsageError(f"{LONG_TESTS} names tests that do not exist: {sorted(unknown)}")
    left_out = [item for item in items if (item.nodeid in long) != is_only_long]
    items[:] = [item for item in items if (item.nodeid in long) == is_only_long]
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.location[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--save-durations")
    if path is not None:
        seconds = {file: round(_seconds[file], 1) for file in sorted(_seconds)}
        Path(path).write_text(json.dumps(seconds, indent=0) + "\n")


def pytest_collection_finish() -> None:
    import torch

    torch.set_num_threads(1)  # the services under test need the other cores
    gc.freeze()
    gc.set_threshold(20_000)  # objects; by default 700, and to look for garbage takes a twentieth of the time
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Lets every test, and the fixtures made for it, draw the same numbers, whatever ran before in its process."""
    import numpy as np
    import structlog
    import torch

    structlog.reset_defaults()  # a service that ran in this process may have set up its logs
    random.seed(SEED)
    np.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # that of the CPU; `torch.manual_seed` takes 0.2 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(SEED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, metavar="N", help="so many processes take files of tests from one queue")
    parser.addoption("--alone", metavar="PATH", help="with --processes: tests that run after all others")
    parser.addoption(
        "--no-second-chance", action="store_true", help="with --processes: no test that failed runs again alone"
    )
    parser.addoption("--save-durations", metavar="FILE", help="write how long each file of tests took")
    parser.addoption("--files-up-to", type=float, metavar="SECONDS", help="no files of tests that took longer")
    parser.addoption("--only-long", action="store_true", help="only the tests that `make test` leaves out")
    parser.addoption("--all-families", action="store_true", help="not only the families that together have all parts")
