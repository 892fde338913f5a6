"""Measures what an attack costs others: gaps in another client's stream, work that holds the event loop, and memory.

A machine that also does other things stops any process now and then, which no attack has caused. So four times the
longest gap before the attack is taken off the longest one during it, the event loop's delays are measured by the
processor time that the gateway spends meanwhile, which stands still with it, and each of the three limits must be kept
in one of several runs, not all of them in the same one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.clients.http_clients import client
from tests.support.clients.steady_stream import LATE_S, SteadyStream
from tests.support.cluster import Cluster
from tests.support.process_memory import resident_bytes

QUIET_S = 0.15  # before an attack
MAX_GAP_S = 0.3  # between two events of the other client's stream, beyond four times the longest one of the quiet time
MAX_LOOP_CPU_S = 0.3  # of the gateway, between two answers of its event loop; both cores count
MAX_GROWTH_BYTES = 64 * 2**20
NUM_TRIES = 5
PING_S = 0.02


def assert_undisturbed(
    cluster: Cluster,
    attack: Callable[[], object],
    *,
    headers: Mapping[str, str] | None = None,
    max_growth_bytes: int = MAX_GROWTH_BYTES,
) -> None:
    """Runs `attack` while another client streams (with `headers`) and a third one asks for the gateway's health. The
    stream must keep its pace, the event loop answer in time, and the gateway grow by at most `max_growth_bytes`, each
    in at least one of NUM_TRIES runs.

    The attack's own assertions must hold in every run.
    """
    gateway, figures = cluster.pid_of("gateway"), []
    for _ in range(NUM_TRIES):
        steady, pings = SteadyStream(cluster.http_address, headers), LoopPings(cluster.http_address, gateway)
        try:
            steady.longest_gap(time.monotonic())  # it streams now
            start = time.monotonic()
            time.sleep(QUIET_S)
            usual_gap = steady.longest_gap(start)
            start, resident = time.monotonic(), resident_bytes(gateway)
            pings.clear()
            attack()
            gap = steady.longest_gap(start) - 4 * usual_gap
            growth = resident_bytes(gateway) - resident
        finally:
            pings.stop()
            steady.stop()
        assert cluster.pid_of("gateway") == gateway, "the gateway died"
        figures.append((gap, pings.longest_cpu_s, growth))
        tries_by_limit = zip(zip(*figures, strict=True), limits(max_growth_bytes), strict=True)
        if all(min(tries) <= most for tries, most in tries_by_limit):
            return
    raise AssertionError(
        "; ".join(
            f"the stream stood still for {gap:.2f} s too long, the event loop for {cpu:.2f} s of work, "
            f"the gateway grew by {growth >> 20} MiB"
            for gap, cpu, growth in figures
        )
    )


def limits(max_growth_bytes: int) -> tuple[float, float, int]:
    """The limits of the figures of one run, in their order."""
    return MAX_GAP_S, MAX_LOOP_CPU_S, max_growth_bytes


class LoopPings:
    """Asks for the gateway's liveness again and again, which its event loop answers itself."""

    def __init__(self, address: str, pid: int) -> None:
        self._address = address
        self._pid = pid
        self._is_stopping = threading.Event()
        self._error: BaseException | None = None
        self.longest_cpu_s = 0.0  # the most processor time that the gateway spent between two answers
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def clear(self) -> None:
        """Forgets what has been measured so far."""
        self.longest_cpu_s = 0.0

    def stop(self) -> None:
        """Ends after one more answer. Fails if one was missing."""
        self._is_stopping.set()
        self._thread.join(LATE_S)
        assert not self._thread.is_alive()
        assert self._error is None, self._error

    def _run(self) -> None:
        try:
            with client(self._address) as http:
                last = cpu_s(self._pid)
                while True:
                    is_last = self._is_stopping.is_set()
                    assert http.get("/v2/health/live").status_code == 200
                    now = cpu_s(self._pid)
                    self.longest_cpu_s = max(self.longest_cpu_s, now - last)
                    last = now
                    if is_last:
                        return
                    time.sleep(PING_S)
        except BaseException as error:
            self._error = error


def cpu_s(pid: int) -> float:
    """The processor time of all threads of a process so far, in seconds; a clock of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
