"""The two processes at the ends of a channel, and how one waits for the other: never without a bound.

A GPU's wait for a flag has no end of its own: where the other process is gone, or nothing ends for WAIT_TIMEOUT_S, the
channel is aborted, which lets the GPU run through, and a `PeerError` says why.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self

import torch

from services.channel import Channel
from services.common.errors import PeerError

WAIT_TIMEOUT_S = 60.0  # for a line, a step or an end of the other process
EXIT_TIMEOUT_S = 10.0  # until the other process is killed, once something has failed
MAX_STEPS_AHEAD = 32  # of the device; a launch blocks for good where the driver's queue is full of waits
READ_BYTES = 1 << 16


class OtherProcess(Protocol):
    """Who sets the flags that this process waits for."""

    def failure(self) -> str | None:
        """Why it will set no more of them; None as long as it may."""


class PeerProcess:
    """A child at the other end, whose standard output is read line by line. Use as a context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Awaits its end. Raises `PeerError` if that is not a good one, unless an error is on its way already."""
        try:
            self._process.wait(WAIT_TIMEOUT_S if error is None else EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        if error is None and (failure := self.failure()) is not None:
            raise PeerError(failure)

    def read_line(self) -> str:
        """What it says next. Raises `PeerError`."""
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        file = self._stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([file], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise PeerError(f"the other process said nothing for {WAIT_TIMEOUT_S:g} s")
            data = os.read(file, READ_BYTES)
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(EXIT_TIMEOUT_S)
                raise PeerError(self.failure() or "the other process said less than it should")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def failure(self) -> str | None:
        """See `OtherProcess`. One that ended well has set all its flags."""
        status = self._process.poll()
        return f"the other process ended with status {status}" if status else None


class ParentProcess:
    """The process that started this one, as its other end."""

    def __init__(self) -> None:
        self._pid = os.getppid()

    def failure(self) -> str | None:
        """See `OtherProcess`."""
        return None if os.getppid() == self._pid else f"process {self._pid}, which started this one, is gone"


class DeviceWait:
    """Waits for what this process's device does with the flags of a channel."""

    def __init__(self, channel: Channel, other: OtherProcess) -> None:
        self._channel = channel
        self._other = other

    def __call__(self, event: torch.cuda.Event) -> None:
        """Returns once the device has got to `event`. Raises `PeerError`; then the channel is aborted."""
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while not event.query():  # as a wait of CUDA's own does, it keeps the core busy
            failure = self._other.failure()
            if failure is None and time.monotonic() > deadline_s:
                failure = f"no step ended for {WAIT_TIMEOUT_S:g} s"
            if failure is not None:
                self._channel.abort()
                raise PeerError(failure)
        self._channel.check()


def replay_steps(
    replay: Callable[[], None], num_steps: int, wait: Callable[[torch.cuda.Event], None]
) -> list[torch.cuda.Event]:
    """Replays steps that follow each other at once, and awaits them all: the ends of each, which have times."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps)]
    for step, end in enumerate(ends):
        if step >= MAX_STEPS_AHEAD:
            wait(ends[step - MAX_STEPS_AHEAD])
        replay()
        end.record()
    for end in ends[-MAX_STEPS_AHEAD:]:
        wait(end)
    return ends


@contextlib.contextmanager
def closing(channel: Channel) -> Iterator[Channel]:
    """Closes it at the end, when the device must be done with it; an error therefore releases all waits before."""
    try:
        yield channel
    except BaseException:
        channel.abort()
        raise
    finally:
        channel.close()
