"""`--processes=N`: pytest collects all tests once, and forks N processes that take files of tests from one queue.

Processes that are started instead (pytest-xdist's) each import torch and collect, which takes 6 to 12 seconds of
processor time for each. So no module of tests may start a thread or call gRPC when it is imported.

These tests measure waits, on a machine that they share. So if few of them have failed at the end, each of these runs
again, alone: see `tests.support.second_chance`.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _pytest._io import TerminalWriter

from tests.support.second_chance import MAX_SECOND_CHANCES, HeldFailures
from tests.support.warm_process import end_process

NUM_ALONE = 2  # processes: each has a core for its servers
Tests = deque[int]  # what is left of a file: indices in `session.items`
Forked = tuple[Connection, int]  # what a forked process needs: its end of a pipe, and its number
Location = tuple[str, int | None, str]  # as hooks of pytest have it


class FileQueue:
    """The plugin of the process that collects and reports."""

    def __init__(
        self, num_processes: int, max_second_chances: int = MAX_SECOND_CHANCES, alone: Path | None = None
    ) -> None:
        """`alone`: tests below this path run after all others, in NUM_ALONE processes."""
        self._num_processes, self._max_second_chances, self._alone = num_processes, max_second_chances, alone

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Also returns in every forked process, at its end. None: pytest's own loop shows what was collected."""
        config = session.config
        if session.testsfailed or config.option.collectonly:
            return None
        # Who wants to stop at a failure wants it to count at once.
        held = HeldFailures(session, 0 if config.getoption("maxfail") else self._max_second_chances)
        config.pluginmanager.register(held)
        together, alone = deque[Tests](), deque[Tests]()
        for path, tests in itertools.groupby(range(len(session.items)), lambda index: session.items[index].path):
            is_alone = self._alone is not None and path.is_relative_to(self._alone)
            (alone if is_alone else together).append(deque(tests))
        try:
            forked = self._run(session, together, self._num_processes, held.log)
            if not (forked or session.shouldfail or session.shouldstop):
                forked = self._run(session, alone, min(self._num_processes, NUM_ALONE), held.log)
            if not (forked or session.shouldfail or session.shouldstop):
                forked = self._run_again(session, held)
        except BaseException:
            held.fail_all()
            raise
        if forked:
            take_files(session, *forked)
            return True
        held.fail_all()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _run_again(self, session: pytest.Session, held: HeldFailures) -> Forked | None:
        for nodeid, tests in held.tests():
            reports: list[pytest.TestReport] = []
            if forked := self._run(session, deque([tests]), 1, reports.append):
                return forked
            held.judge(nodeid, reports)
        return None

    def _run(
        self, session: pytest.Session, files: deque[Tests], num_processes: int, log: Callable[[pytest.TestReport], None]
    ) -> Forked | None:
        """Returns None after the last test; in every forked process at once, with what it shall do."""
        takers: dict[Connection, _Taker] = {}
        while files or takers:
            while files and len(takers) < num_processes:
                number = min(set(range(num_processes)) - {taker.number for taker in takers.values()})
                ours, theirs = Pipe()
                _check_that_one_thread_runs()
                if not (pid := os.fork()):
                    for connection in (ours, *takers):
                        connection.close()
                    return theirs, number
                theirs.close()
                takers[ours] = _Taker(session, pid, number, ours, log)
            for connection in wait([*takers]):
                if not takers[connection].receive(files):
                    files.extendleft(takers.pop(connection).end())
            if session.shouldfail or session.shouldstop:
                files.clear()
        return None


class _Taker:
    """A forked process, as `FileQueue` sees it."""

    def __init__(
        self,
        session: pytest.Session,
        pid: int,
        number: int,
        connection: Connection,
        log: Callable[[pytest.TestReport], None],
    ) -> None:
        self._session, self._pid, self.number, self._connection, self._log = session, pid, number, connection, log
        self._files = deque[Tests]()  # that it has taken; the test that runs is no longer in them
        self._running: tuple[str, Location] | None = None
        self._is_told_to_end = False

    def receive(self, files: deque[Tests]) -> bool:
        """Answers a message, or passes it on to pytest. Returns False if the process has ended."""
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            return False
        hook = self._session.config.hook
        if kind == "next":
            file = files.popleft() if files else None
            self._connection.send(file)
            if file is None:
                self._is_told_to_end = True
            else:
                self._files.append(file)
        elif kind == "start":
            self._running = value
            while not self._files[0]:
                self._files.popleft()
            self._files[0].popleft()
            hook.pytest_runtest_logstart(nodeid=value[0], location=value[1])
        elif kind == "finish":
            self._running = None
            hook.pytest_runtest_logfinish(nodeid=value[0], location=value[1])
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=value)
            self._log(report)
        elif kind == "warning":
            message, when, nodeid, location = value
            warning = warnings.WarningMessage(**message)
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": warning, "when": when, "nodeid": nodeid, "location": location}
            )
        return True

    def end(self) -> list[Tests]:
        """Waits for its end; if that came too early, the test that ran has failed. Returns what it has not run."""
        self._connection.close()
        _, status = os.waitpid(self._pid, 0)
        status = os.waitstatus_to_exitcode(status)
        if self._running is not None:
            nodeid, location = self._running
            text = f"the process that ran it has ended with status {status}"
            report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
            self._log(report)
        elif not self._is_told_to_end:
            raise RuntimeError(f"a process of tests has ended between two tests, with status {status}")
        return [file for file in reversed(self._files) if file]


class _Reports:
    """The plugin of a forked process: sends what `_Taker` receives."""

    def __init__(self, config: pytest.Config, connection: Connection, number: int) -> None:
        self._config, self._connection, self.number = config, connection, number
        self._has_begun = False

    def next_file(self) -> Tests | None:
        self._has_begun = True
        self._connection.send(("next", None))
        return self._connection.recv()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Unloads nothing: onnxruntime would wait for a thread that has not survived the fork."""
        end_process(0)

    def pytest_runtest_logstart(self, nodeid: str, location: Location) -> None:
        self._connection.send(("start", (nodeid, location)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Location) -> None:
        self._connection.send(("finish", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if not self._has_begun:  # pytest repeats all that it knew before the fork
            return
        message = {name: getattr(warning_message, name) for name in ("category", "filename", "lineno")}
        message["message"] = str(warning_message.message)
        self._connection.send(("warning", (message, when, nodeid, location)))


def take_files(session: pytest.Session, connection: Connection, number: int) -> None:
    """Runs one file after the other, until there are no more."""
    # Torch makes its pool of threads anew at the first use after a fork: of two threads at once, one would find none.
    torch.set_num_threads(torch.get_num_threads())
    config = session.config
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # into files that this process shares with all others
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    writer = TerminalWriter(sys.__stderr__)  # for the stacks of a test that hangs, by pytest-timeout
    config.pluginmanager.register(SimpleNamespace(_tw=writer, write_line=writer.line), "terminalreporter")
    reports = _Reports(config, connection, number)
    config.pluginmanager.register(reports, "file_taker")
    tests = reports.next_file()
    while tests:
        item = session.items[tests.popleft()]
        tests = tests or reports.next_file()  # which test is next decides which fixtures live on
        nextitem = session.items[tests[0]] if tests else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)


def process_number(config: pytest.Config) -> int:
    """Of a forked process, from 0; 0 if there are none."""
    reports = config.pluginmanager.get_plugin("file_taker")
    return 0 if reports is None else reports.number


def _check_that_one_thread_runs() -> None:
    """Threads of OpenBLAS do not count: it ends them before a fork, and starts others."""
    if threads := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        raise RuntimeError(f"only the main thread survives a fork, and modules of tests have started {threads}")
