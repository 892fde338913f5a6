"""The two processes at the ends of a channel. Each waits for the other only for a limited time.

A GPU's wait for a flag never ends by itself. If the other process is gone, or no step ends for WAIT_TIMEOUT_S, the
channel is aborted, which ends all waits on the GPU, and a `PeerError` says why.
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
EXIT_TIMEOUT_S = 10.0  # after a failure, for the other process to end before it is killed
MAX_STEPS_AHEAD = 32  # ahead of the device; a launch blocks forever once the driver's queue is full of waits
READ_BYTES = 1 << 16


class OtherProcess(Protocol):
    """The process that sets the flags which this process waits for."""

    def failure(self) -> str | None:
        """Why the process will set no more flags; None as long as it may."""


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
        """Waits for the child's end. Raises `PeerError` if the child failed, unless another error is being raised."""
        try:
            self._process.wait(WAIT_TIMEOUT_S if error is None else EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        if error is None and (failure := self.failure()) is not None:
            raise PeerError(failure)

    def read_line(self) -> str:
        """The child's next line. Raises `PeerError` if there is none in time."""
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
        """How the child failed. A child that ended well has set all its flags, so that is no failure."""
        status = self._process.poll()
        return f"the other process ended with status {status}" if status else None


class ParentProcess:
    """The parent process, which is the other end for a child."""

    def __init__(self) -> None:
        self._pid = os.getppid()

    def failure(self) -> str | None:
        """Whether the parent has died."""
        return None if os.getppid() == self._pid else f"process {self._pid}, which started this one, is gone"


class DeviceWait:
    """Waits for work on this process's device that uses the flags of a channel."""

    def __init__(self, channel: Channel, other: OtherProcess) -> None:
        self._channel = channel
        self._other = other

    def __call__(self, event: torch.cuda.Event) -> None:
        """Returns when the device has reached `event`. If it raises `PeerError`, the channel is aborted."""
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while not event.query():  # keeps the core busy, like CUDA's own waits
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
    """Replays steps one directly after the other and waits for all. Returns timed events of their ends."""
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
    """A context that closes the channel at its end. After an error it first releases all waits of the device."""
    try:
        yield channel
    except BaseException:
        channel.abort()
        raise
    finally:
        channel.close()
