"""`Monkey`: kills and stops the workers of a cluster at random moments, which follow from a seed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import grpc

from services.pb import launch_pb2, launch_pb2_grpc
from tests.support.cluster import Cluster, children_of, runs_role

DENSE, ATTENTION = "dense_worker", "attn_worker"
MAX_PAUSE_S = 0.8  # before the next action
MAX_STOP_S = 1.5  # for a short stop, which must not end a worker
MAX_REPLACEMENT_S = 8.0
RECOVERY_S = 120.0
# A sequence with two crashes and no token in between becomes a suspect, so each must get a token in between.
MIN_STEPS_BETWEEN_CRASHES = 60
MIN_RUNNING_FOR_TWO_CRASHES = 3
TABLE_BYTES, NUM_FLIPS = 8192, 60  # of the host tier: its first entries; and bytes anywhere


def launcher_stub(cluster: Cluster) -> launch_pb2_grpc.LauncherStub:
    """Calls the cluster's launcher."""
    [line] = [line for line in cluster.log_file.read_text().splitlines() if "event=control" in line]
    return launch_pb2_grpc.LauncherStub(grpc.insecure_channel(line.partition("address=")[2].split()[0]))


class Monkey:
    """`run` works until `is_over` is set or `max_actions` is reached; `actions` lists what was done.

    With `tier` it also changes bytes of that file, a host tier. With `wait_timeout_s` it also stops a worker for longer
    than the other one waits in a step. With `stall_timeout_s` it also stops workers for good, so that the launcher has
    to notice and replace them.
    """

    def __init__(
        self,
        cluster: Cluster,
        random: Random,
        max_actions: int,
        wait_timeout_s: float | None,
        stall_timeout_s: float | None,
        *,
        has_standbys: bool,
        tier: Path | None = None,
    ) -> None:
        self._cluster = cluster
        self._wait_timeout_s = wait_timeout_s
        self._tier = tier
        self._launcher = launcher_stub(cluster)
        self._killed: list[int] = []
        self._before = (0, 0)  # process and number of steps of the dense worker that serves
        self._random = random
        self._max_actions = max_actions
        self.is_over = threading.Event()
        self.actions: list[str] = []
        self.signals: dict[int, set[signal.Signals]] = {}  # sent, by process
        self._kinds: list[Callable[[], bool]] = [
            self._kill_dense,
            self._kill_dense,
            self._kill_dense,
            self._kill_dense_again,
            self._kill_attention,
            self._kill_attention,
            self._kill_attention_again,
            self._kill_both,
            self._stop_some,
            self._stop_some,
            self._kill_stopped,
            self._terminate,
            self._replace,
            self._replace_and_kill,
        ]
        if tier is not None:
            self._kinds += [self._flip_bytes, self._flip_bytes, self._flip_bytes_and_kill]
        if wait_timeout_s is not None:
            self._kinds.append(self._stop_for_longer_than_a_wait)
        if stall_timeout_s is not None:
            self._kinds.append(self._stop_for_good)
        if has_standbys:
            self._kinds += [self._kill_standby, self._kill_worker_and_standby]
            self._kinds += [self._kill_successor, self._kill_in_start]

    def run(self) -> None:
        """At the end the cluster serves, or will soon serve again."""
        while len(self.actions) < self._max_actions and not self.is_over.wait(self._random.uniform(0.02, MAX_PAUSE_S)):
            action = self._random.choice(self._kinds)
            self.actions.append(action.__name__.strip("_"))
            self._killed.clear()
            self._before = self._serving_pid(DENSE), self._cluster.dense_status().num_steps
            if action():
                self._await_recovery()

    def _kill_dense(self) -> bool:
        return self._signal(signal.SIGKILL, DENSE)

    def _kill_attention(self) -> bool:
        return self._signal(signal.SIGKILL, ATTENTION)

    def _kill_attention_again(self) -> bool:
        """The second kill comes while the worker starts or computes lost tokens again.

        If few sequences run, there is no second kill: a sequence that runs alone in two crashes may be failed.
        """
        pid, status = self._pid_of(ATTENTION), self._cluster.dense_status()
        self._kill(pid)
        if status.num_running < MIN_RUNNING_FOR_TWO_CRASHES:
            return True
        self._await_end(ATTENTION, pid)
        time.sleep(self._random.uniform(0.0, 3.0))
        return self._signal(signal.SIGKILL, ATTENTION)

    def _kill_both(self) -> bool:
        roles = [DENSE, ATTENTION]
        self._random.shuffle(roles)
        return self._signal(signal.SIGKILL, *roles)

    def _kill_dense_again(self) -> bool:
        """The second kill comes while the new worker starts or attaches, or soon after; see `_kill_attention_again`."""
        pid, status = self._pid_of(DENSE), self._cluster.dense_status()
        self._kill(pid)
        if status.num_running < MIN_RUNNING_FOR_TWO_CRASHES:
            return True
        self._await_end(DENSE, pid)
        time.sleep(self._random.uniform(0.0, 3.0))
        return self._signal(signal.SIGKILL, self._random.choice([DENSE, ATTENTION]))

    def _kill_standby(self) -> bool:
        """Of one role, whether it is ready or starts; nothing happens to streams."""
        for pid in self._standby_pids(self._random.choice([DENSE, ATTENTION])):
            self._kill(pid)
        return False

    def _kill_worker_and_standby(self) -> bool:
        """There is nobody to take over."""
        role = self._random.choice([DENSE, ATTENTION])
        for pid in [*self._standby_pids(role), self._serving_pid(role)]:
            self._kill(pid)
        return True

    def _kill_successor(self) -> bool:
        """Kills the worker that has just taken over, or is about to; see `_kill_attention_again`."""
        role = self._random.choice([DENSE, ATTENTION])
        pid, status = self._serving_pid(role), self._cluster.dense_status()
        self._kill(pid)
        if status.num_running < MIN_RUNNING_FOR_TWO_CRASHES:
            return True
        self._await_end(role, pid)
        time.sleep(self._random.uniform(0.0, 0.5))
        self._kill(self._serving_pid(role))
        return True

    def _kill_in_start(self) -> bool:
        """Kills a worker, and the next standby while it starts."""
        role = self._random.choice([DENSE, ATTENTION])
        pid = self._serving_pid(role)
        self._kill(pid)
        self._await_end(role, pid)
        time.sleep(self._random.uniform(0.0, 3.0))
        for standby_pid in self._standby_pids(role):
            self._kill(standby_pid)
        return True

    def _stop_some(self) -> bool:
        roles = self._random.choice([[DENSE], [ATTENTION], [DENSE, ATTENTION]])
        with self._stopped(*roles):
            time.sleep(self._random.uniform(0.01, MAX_STOP_S))
        return False

    def _kill_stopped(self) -> bool:
        """Kills the stopped worker, or the one that waits for it."""
        with self._stopped(self._random.choice([DENSE, ATTENTION])):
            time.sleep(self._random.uniform(0.01, MAX_STOP_S))
            return self._signal(signal.SIGKILL, self._random.choice([DENSE, ATTENTION]))

    def _terminate(self) -> bool:
        return self._signal(signal.SIGTERM, self._random.choice([DENSE, ATTENTION]))

    def _replace(self) -> bool:
        """Another dense worker takes over as planned."""
        self._ask_for_replacement()
        return True

    def _replace_and_kill(self) -> bool:
        """Kills a worker meanwhile: either the new dense worker takes over, or the old one goes on."""
        with ThreadPoolExecutor(1) as threads:
            replacement = threads.submit(self._ask_for_replacement)
            time.sleep(self._random.uniform(0.0, MAX_REPLACEMENT_S))
            self._signal(signal.SIGKILL, self._random.choice([DENSE, DENSE, ATTENTION]))
            replacement.result()
        return True

    def _ask_for_replacement(self) -> None:
        try:
            self._launcher.ReplaceDense(launch_pb2.ReplaceDenseRequest(), timeout=RECOVERY_S)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.ABORTED, f"not rolled back: {error.details()}"
            self.actions[-1] += " (rolled back)"

    def _flip_bytes(self) -> bool:
        """Changes bytes of the host tier, of each part of it, while it is used."""
        assert self._tier is not None
        with self._tier.open("r+b") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            for end in [*[TABLE_BYTES] * 3, *[num_bytes] * NUM_FLIPS]:
                file.seek(self._random.randrange(end))
                [byte] = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ self._random.randint(1, 255)]))
        return False

    def _flip_bytes_and_kill(self) -> bool:
        """The next attention worker opens such a file."""
        self._flip_bytes()
        return self._kill_attention()

    def _stop_for_longer_than_a_wait(self) -> bool:
        """The other worker gives up the step; the stopped worker notices it when it goes on."""
        assert self._wait_timeout_s is not None
        with self._stopped(self._random.choice([DENSE, ATTENTION])):
            time.sleep(self._wait_timeout_s + self._random.uniform(-0.5, 1.5))
        return True

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
        for pid in [self._pid_of(role) for role in roles]:
            self._kill(pid, number)
        return True

    def _kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        self._killed.append(pid)
        self.signals.setdefault(pid, set()).add(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _await_end(self, role: str, pid: int) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while pid in self._pids_of(role):
            assert time.monotonic() < deadline, f"{role} {pid} does not end"
            time.sleep(0.01)

    def _pid_of(self, role: str) -> int:
        """The process of a role; a random one while there are two, of which one may be a standby."""
        deadline = time.monotonic() + RECOVERY_S
        while not (pids := self._pids_of(role)):
            assert time.monotonic() < deadline, f"no {role} comes back"
            time.sleep(0.01)
        return self._random.choice(pids)

    def _pids_of(self, role: str) -> list[int]:
        pids = []
        for pid in children_of(self._cluster.process.pid):
            with contextlib.suppress(OSError):  # it has ended
                if runs_role(pid, role):
                    pids.append(pid)
        return pids

    def _serving_pid(self, role: str) -> int:
        status = self._launcher.GetStatus(launch_pb2.GetStatusRequest(), timeout=RECOVERY_S)
        [pid] = [service.pid for service in status.services if service.role == role]
        return pid

    def _standby_pids(self, role: str) -> list[int]:
        status = self._launcher.GetStatus(launch_pb2.GetStatusRequest(), timeout=RECOVERY_S)
        return [standby.pid for standby in status.standbys if standby.role == role and standby.pid]

    def _await_recovery(self) -> None:
        """Waits until killed workers are replaced, and every sequence has had enough steps to get a token."""
        deadline = time.monotonic() + RECOVERY_S
        while not self.is_over.is_set() and not self._has_recovered():
            assert time.monotonic() < deadline, f"not recovered from {self.actions[-1]}"
            time.sleep(0.05)

    def _has_recovered(self) -> bool:
        with contextlib.suppress(AssertionError, OSError, grpc.RpcError):
            if {*self._killed} & {*self._pids_of(DENSE), *self._pids_of(ATTENTION)}:
                return False
            pid, num_steps = self._before
            num_needed = MIN_STEPS_BETWEEN_CRASHES + (num_steps if pid == self._serving_pid(DENSE) else 0)
            status = self._cluster.dense_status()
            return status.state == status.SERVING and status.num_steps >= num_needed
        return False
