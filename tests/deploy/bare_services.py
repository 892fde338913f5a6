"""Runs the commands of containers as plain processes, with their environment, config files and health checks.

Mounted paths are replaced by paths of this host, and listening addresses by free ports.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster import REPOSITORY, free_port
from tests.support.warm_process import WarmProcess, warm_server

START_TIMEOUT_S = 90.0
HEALTH_TIMEOUT_S = 30.0


class BareServices:
    """The processes of one set of containers.

    `paths` maps the directories and files of the containers, and names of other machines, to those of this host.
    """

    def __init__(self, directory: Path, paths: Mapping[str, Path]) -> None:
        self._directory = directory
        self._paths = dict(paths)
        self._ports: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[bytes] | WarmProcess] = {}

    def local(self, text: str) -> str:
        """`text` with the container's paths and listening addresses replaced by this host's."""
        for path in sorted(self._paths, key=len, reverse=True):
            text = re.sub(rf"(?<![\w./]){re.escape(path)}(?![\w.])", str(self._paths[path]), text)
        return re.sub(r"\b(?:0\.0\.0\.0|127\.0\.0\.1):(\d+)\b", lambda match: self._address(match[1]), text)

    def add_config(self, path: str, file: Path) -> None:
        """Makes a local copy of the config file that containers read at `path`."""
        copy = self._directory / f"config-{len(self._paths)}.toml"
        copy.write_text(self.local(file.read_text()))
        self._paths[path] = copy

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a process. Those of Python are forked from `tests.support.warm_server`."""
        argv, own = self._argv(command), {key: self.local(value) for key, value in environment.items()}
        options: dict[str, Any] = {"env": os.environ | own, "start_new_session": True}
        with self.log_file(name).open("wb") as log:
            if argv[:2] == [sys.executable, "-m"]:
                self.processes[name] = WarmProcess(warm_server(), argv, stderr=log.fileno(), **options)
            else:
                self.processes[name] = subprocess.Popen(argv, cwd=REPOSITORY, stderr=log, **options)

    def log_file(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def wait_healthy(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Waits until the health check `command` succeeds."""
        own = {key: self.local(value) for key, value in environment.items()}
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            check = subprocess.run(
                self._argv(command),
                cwd=REPOSITORY,
                env=os.environ | own,
                capture_output=True,
                text=True,
                timeout=HEALTH_TIMEOUT_S,
            )
            if check.returncode == 0:
                return
            log = self.log_file(name).read_text
            assert self.processes[name].poll() is None, f"{name} ended:\n{log()}"
            assert time.monotonic() < deadline, f"{name} is not healthy: {check.stderr}\n{log()}"
            time.sleep(0.2)

    def stop(self, name: str, signal_name: str, grace_s: float) -> int:
        """Sends the stop signal. Returns the exit status; fails if the process runs for longer than `grace_s`."""
        process = self.processes[name]
        process.send_signal(getattr(signal, signal_name))
        return process.wait(grace_s)

    def kill(self) -> None:
        """Kills the processes that a failed test left."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def _argv(self, command: Sequence[str]) -> list[str]:
        argv = [self.local(word) for word in command]
        return [sys.executable, *argv[1:]] if argv[0] == "python" else argv

    def _address(self, port: str) -> str:
        if port not in self._ports:
            self._ports[port] = f"127.0.0.1:{free_port()}"
        return self._ports[port]
