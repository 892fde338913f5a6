"""A benchmark's waits for its other process end when that process ends, and otherwise at a time limit."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest
import torch

from bench import handoff
from bench.gpu import peer
from bench.gpu.peer import MAX_STEPS_AHEAD, DeviceWait, ParentProcess, PeerProcess, closing, replay_steps
from services.channel import Channel, ChannelAborted, ChannelTimeout
from services.channel.region import SHM_DIR
from services.common.errors import PeerError


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_lines_are_read_one_by_one_even_if_written_in_parts() -> None:
    with PeerProcess(python("print('one\\ntwo', flush=True); print('thr', end='', flush=True); print('ee')")) as child:
        assert [child.read_line() for _ in range(3)] == ["one", "two", "three"]


def test_the_wait_for_a_silent_process_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "WAIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(peer, "EXIT_TIMEOUT_S", 0.1)
    start_s = time.monotonic()
    with (
        pytest.raises(PeerError, match=r"said nothing for 0\.2 s"),
        PeerProcess(python("import time; print('half', end='', flush=True); time.sleep(600)")) as child,
    ):
        child.read_line()
    assert child.failure() == f"the other process ended with status {-signal.SIGKILL}", "it was left running"
    assert time.monotonic() - start_s < 10


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('no end', end='')", "said less than it should"),
    ],
)
def test_the_error_names_how_the_other_process_ended(program: str, error: str) -> None:
    with pytest.raises(PeerError, match=error), PeerProcess(python(program)) as child:
        child.read_line()


def test_a_failure_after_the_last_line_is_an_error() -> None:
    with (
        pytest.raises(PeerError, match="ended with status 5"),
        PeerProcess(python("print('done', flush=True); raise SystemExit(5)")) as child,
    ):
        assert child.read_line() == "done"


class FakeEvent:
    """An event that is done after `num_queries` queries, or never if that is None."""

    def __init__(self, num_queries: int | None = 0, **_: object) -> None:
        self.num_queries = num_queries
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        if self.num_queries:
            self.num_queries -= 1
        return self.num_queries == 0


class FakeChannel:
    def __init__(self) -> None:
        self.is_aborted = self.is_closed = False

    def abort(self) -> None:
        assert not self.is_closed
        self.is_aborted = True

    def check(self) -> None:
        if self.is_aborted:
            raise ChannelAborted("aborted")

    def close(self) -> None:
        self.is_closed = True


class FakeProcess:
    def __init__(self, num_alive: int | None = None) -> None:
        self._num_alive = num_alive

    def failure(self) -> str | None:
        if self._num_alive is None:
            return None
        self._num_alive -= 1
        return "it is dead" if self._num_alive < 0 else None


def test_a_step_that_ends_does_not_abort_the_channel() -> None:
    channel: Any = FakeChannel()
    DeviceWait(channel, FakeProcess())(FakeEvent(num_queries=50))
    assert not channel.is_aborted


@pytest.mark.parametrize(("num_alive", "error"), [(20, "it is dead"), (None, r"no step ended for 0\.1 s")])
def test_a_step_that_never_ends_aborts_the_channel(
    num_alive: int | None, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "WAIT_TIMEOUT_S", 0.1)
    channel: Any = FakeChannel()
    with pytest.raises(PeerError, match=error):
        DeviceWait(channel, FakeProcess(num_alive))(FakeEvent(num_queries=None))
    assert channel.is_aborted


def test_a_step_that_ends_because_of_an_abort_is_an_error() -> None:
    channel: Any = FakeChannel()
    channel.abort()
    with pytest.raises(ChannelAborted):
        DeviceWait(channel, FakeProcess())(FakeEvent())


def test_the_end_of_the_parent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = ParentProcess()
    assert parent.failure() is None
    pid = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: pid + 1)  # this process may be a child of process 1
    assert parent.failure() == f"process {pid}, which started this one, is gone"


def test_launched_steps_never_exceed_the_limit_of_the_drivers_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    num_launched, waited = 0, []

    def replay() -> None:
        nonlocal num_launched
        num_launched += 1

    def wait(event: FakeEvent) -> None:
        assert event.is_recorded and num_launched - len(waited) <= MAX_STEPS_AHEAD
        waited.append(event)

    ends = replay_steps(replay, 100, wait)
    assert (num_launched, waited) == (100, ends)


def test_an_error_releases_the_waits_before_the_channel_is_closed() -> None:
    channel: Any = FakeChannel()
    with pytest.raises(KeyboardInterrupt), closing(channel):
        raise KeyboardInterrupt
    assert channel.is_aborted and channel.is_closed
    channel = FakeChannel()
    with closing(channel):
        pass
    assert channel.is_closed and not channel.is_aborted


def test_handoffs_are_timed_between_two_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["handoff.py", "--steps", "20"])
    handoff.main()
    assert capsys.readouterr().out.startswith("round trip between two processes, cpu, shm: median ")


def test_a_handoff_whose_other_process_dies_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = []

    class DyingPeer(PeerProcess):
        def read_line(self) -> str:
            line = super().read_line()
            self._process.kill()
            return line

    def ask(channel: Channel) -> None:
        regions.append(SHM_DIR / channel.handle.decode())
        real_ask(channel)

    real_ask = handoff.ask
    monkeypatch.setattr(handoff, "ask", ask)
    monkeypatch.setattr(handoff, "PeerProcess", DyingPeer)
    monkeypatch.setattr(handoff, "WAIT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["handoff.py", "--steps", "100000"])
    with pytest.raises(SystemExit) as caught:
        handoff.main()
    assert caught.value.code == "handoff: no ATTENTION_READY from the peer within 0.5 s"
    assert isinstance(caught.value.__cause__, ChannelTimeout)
    assert regions and not regions[0].exists(), "its shared memory was left behind"
