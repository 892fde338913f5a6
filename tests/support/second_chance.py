"""A second chance for the few tests of a run that fail: each runs again, with nothing beside it, in a fresh process.

Our tests measure waits of many processes on a machine that they share, and one of 7,700 may once wait too long. The
second chance hides nothing: a test that passes alone is shown at the end, with its first failure, and one that fails
again fails the run. Many failures are no accident: if more tests fail than there are chances, all of them count.
`--no-second-chance` is for those who look for tests that sometimes fail.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator

import pytest

MAX_SECOND_CHANCES = 3  # tests of a run
HELD = "failed beside others"  # the outcome of a report that does not count yet


class HeldFailures:
    """The plugin that holds back reports of failures until it is known whether they count."""

    def __init__(self, session: pytest.Session, max_second_chances: int) -> None:
        self._session, self._num_left = session, max_second_chances
        self._held: dict[str, list[pytest.TestReport]] = {}  # by the test's node id
        self._passed_alone: list[pytest.TestReport] = []  # first failures, of tests that do not fail the run

    def log(self, report: pytest.TestReport) -> None:
        """Passes a report of the first run on to pytest, unless it says that a test with a second chance has failed."""
        if report.failed and report.nodeid not in self._held and not self._num_left:
            self.fail_all()
        elif report.failed:
            self._num_left -= report.nodeid not in self._held
            self._held.setdefault(report.nodeid, []).append(report)
            report = copy.copy(report)
            report.outcome = HELD  # type: ignore[assignment]
        self._session.config.hook.pytest_runtest_logreport(report=report)

    def tests(self) -> Iterator[tuple[str, deque[int]]]:
        """What shall run again, by its node id: indices in `session.items`.

        If a fixture failed at its end, that is the whole file: other tests may have used the fixture, too.
        """
        items = self._session.items
        for nodeid, reports in [*self._held.items()]:
            index, path = next((index, item.path) for index, item in enumerate(items) if item.nodeid == nodeid)
            is_whole = any(report.when == "teardown" for report in reports)
            yield nodeid, deque(i for i, item in enumerate(items) if (item.path == path if is_whole else i == index))

    def judge(self, nodeid: str, again: list[pytest.TestReport]) -> None:
        """Decides whether the failures of a test count. `again` are all reports of what has run again."""
        first = self._held[nodeid]
        second = [report for report in again if report.failed]
        passes = [report for report in again if report.nodeid == nodeid and report.when == "call" and report.passed]
        if second or not passes:
            for report in second or again:
                title = f"{report.nodeid}, alone: {report.outcome} in {report.when}"
                first[0].sections.append((title, report.longreprtext))
            return
        self._passed_alone += self._held.pop(nodeid)
        if first[0].when != "teardown":  # otherwise it has been counted
            self._session.config.hook.pytest_runtest_logreport(report=passes[0])

    def fail_all(self) -> None:
        """Lets all failures count that are still held back."""
        while self._held:
            for report in self._held.pop(next(iter(self._held))):
                self._session.config.hook.pytest_runtest_logreport(report=report)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return (HELD, "f", HELD.upper()) if report.outcome == HELD else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._passed_alone:
            terminalreporter.section(f"{HELD}, passed alone")
        for report in self._passed_alone:
            terminalreporter.write_sep("_", f"{report.nodeid}, {report.when}")
            terminalreporter.write_line(report.longreprtext)
            for title, content in report.sections:
                terminalreporter.write_sep("-", title)
                terminalreporter.write_line(content)
