"""`Monkey`: kills and stops the workers of a cluster at random moments, as its seed says."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from random import Random

import grpc

from tests.cluster import Cluster

DENSE, ATTENTION = "dense_worker", "attn_worker"
MAX_PAUSE_S = 0.8  # before the next deed
MAX_STOP_S = 1.5  # that nobody should notice
RECOVERY_S = 120.0
# Two crashes of a sequence without a token in between make it a suspect: so every one must get its token.
MIN_STEPS_BETWEEN_CRASHES = 60


class Monkey:
    """`run` until `is_over` is set, or for `max_deeds`; `deeds` tells what it did.

    With `stall_timeout_s` it also stops a worker for good, which then has to be found and replaced.
    """

    def __init__(self, cluster: Cluster, random: Random, max_deeds: int, stall_timeout_s: float | None) -> None:
        self._cluster = cluster
        self._random = random
        self._max_deeds = max_deeds
        self.is_over = threading.Event()
        self.deeds: list[str] = []
        self._kinds: list[Callable[[], bool]] = [
            self._kill_dense,
            self._kill_dense,
            self._kill_dense,
            self._kill_dense_again,
            self._kill_attention,
            self._kill_attention,
            self._kill_both,
            self._stop_some,
            self._stop_some,
            self._kill_stopped,
            self._terminate,
        ]
        if stall_timeout_s is not None:
            self._kinds.append(self._stop_for_good)

    def run(self) -> None:
        """Leaves a cluster that serves, or is about to."""
        while len(self.deeds) < self._max_deeds and not self.is_over.wait(self._random.uniform(0.02, MAX_PAUSE_S)):
            deed = self._random.choice(self._kinds)
            self.deeds.append(deed.__name__.strip("_"))
            if deed():
                self._await_recovery()

    def _kill_dense(self) -> bool:
        return self._signal(signal.SIGKILL, DENSE)

    def _kill_attention(self) -> bool:
        return self._signal(signal.SIGKILL, ATTENTION)

    def _kill_both(self) -> bool:
        roles = [DENSE, ATTENTION]
        self._random.shuffle(roles)
        return self._signal(signal.SIGKILL, *roles)

    def _kill_dense_again(self) -> bool:
        """The second time while it starts, or attaches: nothing runs in it yet."""
        pid = self._pid_of(DENSE)
        self._signal(signal.SIGKILL, DENSE)
        deadline = time.monotonic() + RECOVERY_S
        while self._pid_of(DENSE) == pid:
            assert time.monotonic() < deadline
        time.sleep(self._random.uniform(0.0, 3.0))
        return self._signal(signal.SIGKILL, self._random.choice([DENSE, ATTENTION]))

    def _stop_some(self) -> bool:
        roles = self._random.choice([[DENSE], [ATTENTION], [DENSE, ATTENTION]])
        with self._stopped(*roles):
            time.sleep(self._random.uniform(0.01, MAX_STOP_S))
        return False

    def _kill_stopped(self) -> bool:
        """One that waits for a stopped one, or the stopped one itself."""
        with self._stopped(self._random.choice([DENSE, ATTENTION])):
            time.sleep(self._random.uniform(0.01, MAX_STOP_S))
            return self._signal(signal.SIGKILL, self._random.choice([DENSE, ATTENTION]))

    def _terminate(self) -> bool:
        return self._signal(signal.SIGTERM, self._random.choice([DENSE, ATTENTION]))

    def _stop_for_good(self) -> bool:
        return self._signal(signal.SIGSTOP, self._random.choice([DENSE, ATTENTION]))

    @contextlib.contextmanager
    def _stopped(self, *roles: str) -> object:
        pids = [self._pid_of(role) for role in roles]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                    os.kill(pid, signal.SIGCONT)

    def _signal(self, number: signal.Signals, *roles: str) -> bool:
        self._killed = [self._pid_of(role) for role in roles]
        for pid in self._killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return True

    def _pid_of(self, role: str) -> int:
        deadline = time.monotonic() + RECOVERY_S
        while True:
            try:
                return self._cluster.pid_of(role)
            except (AssertionError, OSError):  # between two lives
                assert time.monotonic() < deadline, f"no {role} comes back"
                time.sleep(0.01)

    def _await_recovery(self) -> None:
        """Until the killed are replaced, and everybody has had a turn."""
        deadline = time.monotonic() + RECOVERY_S
        while not self.is_over.is_set() and not self._has_recovered():
            assert time.monotonic() < deadline, f"not recovered from {self.deeds[-1]}"
            time.sleep(0.05)

    def _has_recovered(self) -> bool:
        with contextlib.suppress(AssertionError, OSError, grpc.RpcError):
            pids = [self._cluster.pid_of(role) for role in (DENSE, ATTENTION)]
            if set(self._killed) & set(pids):
                return False
            status = self._cluster.dense_status()
            return status.state == status.SERVING and status.num_steps >= MIN_STEPS_BETWEEN_CRASHES
        return False
