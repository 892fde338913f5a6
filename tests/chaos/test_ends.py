"""A chaos run fails for an end that the monkey did not order."""

from __future__ import annotations

import signal

import pytest

from tests.chaos.ends import End, ends_told_by, unordered_ends

LOG = """\
timestamp=2026-01-01T00:00:00Z level=info service=attention event=attached attachment_id=1
timestamp=2026-01-01T00:00:01Z level=warning service=launch event=restarting role=attn_worker pid=7 {} delay_s=0.05
timestamp=2026-01-01T00:00:02Z level=error service=launch event="restarting a service that makes no progress" reason=x
"""
CRASH = 'reason="exit code 70, after: stopped by a bug: AbortError: \\"Locally\\" aborted."'


@pytest.mark.parametrize(
    ("reason", "sent", "is_ordered"),
    [
        ('reason="signal SIGKILL"', {signal.SIGKILL}, True),
        ('reason="signal SIGKILL, after: an error it had logged"', {signal.SIGKILL}, True),
        ('reason="signal SIGKILL from the launcher: no answer to 5 health checks in 8.2 s"', {signal.SIGSTOP}, True),
        ('reason="signal SIGKILL from the launcher: no answer to 5 health checks in 8.2 s"', set(), False),
        ('reason="exit code 0"', {signal.SIGTERM}, True),
        ('reason="exit code 0"', set(), False),
        (CRASH, set(), False),
        (CRASH, {signal.SIGTERM}, False),
        ('reason="signal SIGSEGV"', {signal.SIGTERM, signal.SIGKILL}, False),
    ],
)
def test_an_end_is_told_and_judged(reason: str, sent: set[signal.Signals], is_ordered: bool) -> None:
    [end] = ends_told_by(LOG.format(reason))
    assert (end.role, end.pid) == ("attn_worker", 7)
    assert unordered_ends([end], {7: sent, 8: {signal.SIGKILL}}) == ([] if is_ordered else [end])
    assert end.reason in reason


def test_every_end_of_a_log_is_told() -> None:
    log = LOG.format('reason="signal SIGKILL"') + LOG.format("reason=x").replace("pid=7", "pid=8")
    assert ends_told_by(log) == [End("attn_worker", 7, "signal SIGKILL"), End("attn_worker", 8, "x")]
