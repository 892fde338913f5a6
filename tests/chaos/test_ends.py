"""A chaos run fails if a worker ends that the monkey did not end."""

from __future__ import annotations

import signal

import pytest

from tests.chaos.ends import End, read_ends, unexpected_ends

LOG = """\
timestamp=2026-01-01T00:00:00Z level=info service=attention event=attached attachment_id=1
timestamp=2026-01-01T00:00:01Z level=warning service=launch event=restarting role=attn_worker pid=7 {} delay_s=0.05
timestamp=2026-01-01T00:00:02Z level=error service=launch event="restarting a service that makes no progress" reason=x
"""
CRASH = 'reason="exit code 70, after: stopped by a bug: AbortError: \\"Locally\\" aborted."'


@pytest.mark.parametrize(
    ("reason", "sent", "is_expected"),
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
def test_an_end_is_compared_with_the_signals(reason: str, sent: set[signal.Signals], is_expected: bool) -> None:
    [end] = read_ends(LOG.format(reason))
    assert (end.role, end.pid) == ("attn_worker", 7)
    assert unexpected_ends([end], {7: sent, 8: {signal.SIGKILL}}) == ([] if is_expected else [end])
    assert end.reason in reason


def test_every_end_in_a_log_is_read() -> None:
    log = LOG.format('reason="signal SIGKILL"') + LOG.format("reason=x").replace("pid=7", "pid=8")
    log += 'service=launch event="the standby takes over" role=dense_worker pid=10 old_pid=9 reason="signal SIGKILL"\n'
    log += 'service=launch event="the standby has ended" role=dense_worker pid=11 reason="exit code 0" delay_s=1.0\n'
    assert read_ends(log) == [
        End("attn_worker", 7, "signal SIGKILL"),
        End("attn_worker", 8, "x"),
        End("dense_worker", 9, "signal SIGKILL"),
        End("dense_worker", 11, "exit code 0"),
    ]
