"""`--processes=N`: pytest collects all tests once, and forks N processes that take files of tests from one queue.

Processes that are started instead (pytest-xdist's) each import torch and collect, which takes 6 to 12 seconds of
processor time for each. So no module of tests may start a thread or call gRPC when it is imported.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import warnings
from collections import deque
from multiprocessing.connection import Connection, Pipe, wait
from types import SimpleNamespace

import pytest
import torch
from _pytest._io import TerminalWriter

from tests.support.warm_process import end_process

Tests = deque[int]  # what is left of a file: indices in `session.items`
Location = tuple[str, int | None, str]  # as hooks of pytest have it


class FileQueue:
    """The plugin of the process that collects and reports."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Also returns in every forked process, at its end. None: pytest's own loop shows what was collected."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        by_file = itertools.groupby(range(len(session.items)), lambda index: session.items[index].path)
        files = deque(deque(tests) for _, tests in by_file)
        takers: dict[Connection, _Taker] = {}
        while files or takers:
            while files and len(takers) < self._num_processes:
                number = min(set(range(self._num_processes)) - {taker.number for taker in takers.values()})
                ours, theirs = Pipe()
                _check_that_one_thread_runs()
                if not (pid := os.fork()):
                    for connection in (ours, *takers):
                        connection.close()
                    take_files(session, theirs, number)
                    return True
                theirs.close()
                takers[ours] = _Taker(session, pid, number, ours)
            for connection in wait([*takers]):
                if not takers[connection].receive(files):
                    files.extendleft(takers.pop(connection).end())
            if session.shouldfail or session.shouldstop:
                files.clear()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True


class _Taker:
    """A forked process, as `FileQueue` sees it."""

    def __init__(self, session: pytest.Session, pid: int, number: int, connection: Connection) -> None:
        self._session, self._pid, self.number, self._connection = session, pid, number, connection
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
            hook.pytest_runtest_logreport(report=report)
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
            self._session.config.hook.pytest_runtest_logreport(report=report)
        elif not self._is_told_to_end:
            raise RuntimeError(f"a process of tests has ended between two tests, with status {status}")
        return [file for file in reversed(self._files) if file]


class _Reports:
    """The plugin of a forked process: sends what `_Taker` receives."""

    def __init__(self, config: pytest.Config, connection: Connection, number: int) -> None:
        self._config, self._connection, self.number = config, connection, number

    def next_file(self) -> Tests | None:
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
