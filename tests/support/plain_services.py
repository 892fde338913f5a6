"""The three services as plain processes without the launcher. The test restarts them, as a container runtime would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.cluster import STOP_TIMEOUT_S, Stubs
from tests.support.warm_process import WarmProcess, warm_server

MODULES = {role: f"services.{role}" for role in ("attn_worker", "dense_worker", "gateway")}
SOCKETS = {
    "gateway.address": "gateway",
    "gateway.http_address": "http",
    "dense.address": "dense",
    "attention.address": "attention",
}
START_TIMEOUT_S = 90.0
MAX_ENDS = 12  # while the gateway starts; so many that it is no accident


class PlainServices(Stubs):
    """Starts the services on Unix sockets in `directory`, and restarts each one as soon as it ends."""

    def __init__(self, directory: Path, overrides: tuple[str, ...], modules: Mapping[str, str]) -> None:
        super().__init__(directory)
        self.num_starts = dict.fromkeys(MODULES, 0)
        self.ends: list[tuple[str, int]] = []  # roles that ended, with their exit statuses
        self._directory = directory
        self._modules = MODULES | modules
        self._overrides = (*(f"{key}=unix:{directory}/{name}.sock" for key, name in SOCKETS.items()), *overrides)
        self._processes: dict[str, WarmProcess] = {}
        self._is_stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep)

    def start(self) -> None:
        """Returns when the gateway serves."""
        for role in self._modules:
            self._start(role)
        self._keeper.start()
        self.wait_serving(1)

    def wait_serving(self, num_gateways: int) -> None:
        """Waits until that many gateways, one after another, have been connected to the dense worker."""
        deadline, max_ends = time.monotonic() + START_TIMEOUT_S, len(self.ends) + MAX_ENDS
        while self.log("gateway").count("event=serving") < num_gateways:
            is_hopeless = time.monotonic() > deadline or len(self.ends) > max_ends
            assert not is_hopeless, {role: self.log(role)[-2000:] for role in self._modules}
            time.sleep(0.05)

    def pid_of(self, role: str) -> int:
        """Process id of the newest process of that role."""
        return self._processes[role].pid

    def kill(self, *roles: str) -> None:
        """Kills the newest processes of these roles at once; returns when others have been started in their place."""
        starts = {role: self.num_starts[role] for role in roles}
        for role in roles:
            os.kill(self.pid_of(role), signal.SIGKILL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(self.num_starts[role] == count for role, count in starts.items()):
            assert time.monotonic() < deadline, f"{roles} were not started again"
            time.sleep(0.01)

    def log(self, role: str) -> str:
        """Everything that the processes of that role have written."""
        return (self._directory / f"{role}.log").read_text()

    def stop(self) -> dict[str, int]:
        """Stops the services one by one, in reverse order; returns the exit statuses by role."""
        self._is_stopping.set()
        if self._keeper.is_alive():  # it is not if a service could not be started
            self._keeper.join()
        statuses = {}
        for role, process in reversed(self._processes.items()):
            process.terminate()
            statuses[role] = process.wait(STOP_TIMEOUT_S)
        return statuses

    def _start(self, role: str) -> None:
        command = [sys.executable, "-m", self._modules[role]]
        for override in self._overrides:
            command += ["--set", override]
        with (self._directory / f"{role}.log").open("ab") as log:
            self._processes[role] = WarmProcess(warm_server(), command, stderr=log.fileno())
        self.num_starts[role] += 1

    def _keep(self) -> None:
        while not self._is_stopping.wait(0.05):
            for role, process in list(self._processes.items()):
                if process.poll() is not None:
                    self.ends.append((role, process.returncode))
                    self._start(role)


@contextlib.contextmanager
def plain_services(
    directory: Path, *overrides: str, modules: Mapping[str, str] | None = None
) -> Iterator[PlainServices]:
    """Runs the services; at the end all must stop cleanly. `modules` replace `services.ROLE`, by role."""
    services = PlainServices(directory, overrides, modules or {})
    statuses: dict[str, int] = {}
    try:
        services.start()
        yield services
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            statuses = services.stop()
        for role in MODULES:
            with contextlib.suppress(ProcessLookupError, KeyError):
                if role not in statuses:
                    os.kill(services.pid_of(role), signal.SIGKILL)
        services.close()
    assert statuses == dict.fromkeys(MODULES, 0), {role: services.log(role)[-2000:] for role in MODULES}
