"""`MpsDaemon`: NVIDIA's Multi-Process Service for the launcher's own children.

Without it two processes share a GPU by time slices, and a handoff takes hundreds of microseconds. The daemon
gets a directory of its own and ends with the launcher; no setting of the card is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from services.common.errors import PeerError

CONTROL = "nvidia-cuda-mps-control"
ANSWER_TIMEOUT_S = 10.0


def has_mps() -> bool:
    """Whether this machine has the daemon's program and an NVIDIA GPU."""
    return shutil.which(CONTROL) is not None and Path("/dev/nvidiactl").exists()


class MpsDaemon:
    """Started by the constructor, ended by `stop`. Children need `environment` to become its clients."""

    def __init__(self, directory: Path) -> None:
        """Raises `PeerError` when the daemon cannot be started or does not answer."""
        pipe, log = directory / "pipe", directory / "log"
        pipe.mkdir(parents=True)
        log.mkdir()
        self.environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        self._run([CONTROL, "-d"], None)
        self._ask("get_server_list")

    def client_pids(self) -> set[int]:
        """Process ids of all that use the GPU through this daemon."""
        servers = self._ask("get_server_list").split()
        return {int(pid) for server in servers for pid in self._ask(f"get_client_list {server}").split()}

    def stop(self) -> None:
        """Ends the daemon and its server; its clients have ended before."""
        self._ask("quit")

    def _ask(self, command: str) -> str:
        return self._run([CONTROL], f"{command}\n")

    def _run(self, command: list[str], text: str | None) -> str:
        try:
            result = subprocess.run(
                command, input=text, env=self.environment, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S
            )
        except (subprocess.TimeoutExpired, OSError) as error:
            raise PeerError(f"the MPS daemon does not answer within {ANSWER_TIMEOUT_S} s: {error}") from error
        if result.returncode != 0:
            raise PeerError(f"{' '.join(command)} failed with {result.returncode}: {result.stderr or result.stdout}")
        return result.stdout
