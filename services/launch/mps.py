"""`MpsDaemon`: NVIDIA's Multi-Process Service for the two workers of one GPU.

Without it two processes share a GPU by time slices, and a handoff takes hundreds of microseconds. The daemon has its
own directory and ends with the process that started it: the launcher or, in a container of its own,
`python -m services.launch.mps --directory DIR`. No setting of the card is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import structlog

from services.common.config import Config, LogSection
from services.common.errors import PeerError
from services.common.logs import configure_logs
from services.common.several_attention_workers import devices_of_workers
from services.rpc.server import run_service

log = structlog.get_logger()

CONTROL = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
ANSWER_TIMEOUT_S = 10.0
WATCH_INTERVAL_S = 2.0


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU. Needs no torch, which takes seconds to import."""
    return Path("/dev/nvidiactl").exists()


def has_mps() -> bool:
    """Whether this machine has the daemon's program and an NVIDIA GPU."""
    return shutil.which(CONTROL) is not None and has_gpu()


class MpsDaemon:
    """Started by `start`, ended by `stop`. Other processes need `environment` to become its clients."""

    def __init__(self, directory: Path) -> None:
        self._pipe, self._log = directory / "pipe", directory / "log"
        self.environment = os.environ | {
            PIPE_VARIABLE: str(self._pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self._log),
        }
        # Both settings would apply: a client's indices would count only the devices that are visible to the daemon.
        self._own_environment = {k: v for k, v in self.environment.items() if k != "CUDA_VISIBLE_DEVICES"}

    def start(self) -> None:
        """Starts the daemon. Raises `PeerError` if it cannot be started or does not answer; then none remains."""
        self._pipe.mkdir(parents=True, exist_ok=True)
        self._log.mkdir(exist_ok=True)
        try:
            self._run([CONTROL, "-d"], None)
            self.client_pids()
        except PeerError:
            with contextlib.suppress(PeerError):
                self.stop()
            raise

    def client_pids(self) -> set[int]:
        """Process ids of all clients of this daemon. Raises `PeerError` if it does not answer."""
        servers = self._ask("get_server_list").split()
        return {int(pid) for server in servers for pid in self._ask(f"get_client_list {server}").split()}

    def has_fault(self) -> bool:
        """Whether a client's error has made this daemon's GPU useless for all clients, until all of them have ended.

        Raises `PeerError` if it does not answer.
        """
        servers = self._ask("get_server_list").split()
        return any("FAULT" in self._ask(f"get_server_status {server}").upper() for server in servers)

    def stop(self) -> None:
        """Ends the daemon and its server, after its clients. Raises `PeerError` if it does not answer."""
        self._ask("quit")

    def _ask(self, command: str) -> str:
        return self._run([CONTROL], f"{command}\n")

    def _run(self, command: list[str], text: str | None) -> str:
        try:
            result = subprocess.run(
                command,
                input=text,
                env=self._own_environment,
                capture_output=True,
                text=True,
                timeout=ANSWER_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            call = " ".join(command)
            raise PeerError(f"the MPS daemon does not answer: {call} takes over {error.timeout} s") from error
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be run: {error.strerror}") from error
        if result.returncode != 0:
            raise PeerError(f"{' '.join(command)} failed with {result.returncode}: {result.stderr or result.stdout}")
        return result.stdout


def start_mps(config: Config, run_dir: Path) -> MpsDaemon | None:
    """Starts MPS if workers share a GPU. Raises `PeerError` if it is configured but not available."""
    devices = [config.dense.device, *devices_of_workers(config)]
    mode, shares_gpu = config.launch.mps, any(share_gpu(*pair) for pair in combinations(devices, 2))
    if mode != "off" and shares_gpu and has_mps():
        daemon = MpsDaemon(run_dir / "mps")
        daemon.start()
        return daemon
    if mode == "on" and not shares_gpu:
        raise PeerError(
            f"launch.mps is 'on', but the workers share no GPU: dense.device is {config.dense.device!r}, "
            f"attention.device {', '.join(map(repr, devices[1:]))}"
        )
    if mode == "on":
        raise PeerError(f"launch.mps is 'on', but this machine has no {CONTROL} or no NVIDIA GPU")
    if shares_gpu and has_gpu():
        reason = "launch.mps is 'off'" if mode == "off" else f"this machine has no {CONTROL}"
        log.warning("the workers share a GPU without MPS: every handoff is about 20 times slower", reason=reason)
    return None


def find_mps(config: Config) -> MpsDaemon | None:
    """The daemon that another container runs, by this module, for a launcher with one of two workers that share a GPU.

    None if there is none, or no need of one. Raises `PeerError` if it is configured but does not answer.
    """
    mode, pipe = config.launch.mps, os.environ.get(PIPE_VARIABLE)
    if mode == "off" or not share_gpu(config.dense.device, config.attention.device) or not has_gpu():
        return None
    if pipe is None or not has_mps():
        reason = f"{PIPE_VARIABLE} is not set" if pipe is None else f"this machine has no {CONTROL}"
        if mode == "on":
            raise PeerError(f"launch.mps is 'on', but {reason}")
        log.warning("the workers share a GPU without MPS: every handoff is about 20 times slower", reason=reason)
        return None
    daemon = MpsDaemon(Path(pipe).parent)
    daemon.client_pids()
    return daemon


def stop_mps(daemon: MpsDaemon) -> None:
    """Stops the daemon. If it does not answer, that is only logged, so that it does not hide another error."""
    try:
        daemon.stop()
    except PeerError as error:
        log.error("the MPS daemon may have been left behind", reason=str(error))


def share_gpu(*devices: str) -> bool:
    """Whether both names mean the same GPU, if the machine has one; `auto` and `cuda` mean the first."""
    return "cpu" not in devices and len({gpu_of(device) for device in devices}) == 1


def gpu_of(device: str) -> str:
    """The GPU that a device in the config means, if the machine has one."""
    return {"auto": "cuda:0", "cuda": "cuda:0"}.get(device, device)


async def serve(daemon: MpsDaemon) -> None:
    """Runs the daemon until cancelled, and logs its clients. Raises `PeerError` when it stops answering."""
    await asyncio.to_thread(daemon.start)
    known: set[int] = set()
    try:
        log.info("serving")
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            clients = await asyncio.to_thread(daemon.client_pids)
            if clients != known:
                log.info("clients changed", pids=",".join(map(str, sorted(clients))))
                known = clients
    finally:
        await asyncio.to_thread(daemon.stop)


def main(argv: Sequence[str]) -> None:
    """Runs the daemon, or checks one; `argv` without the name of the program. Ends the process."""
    parser = argparse.ArgumentParser(prog="services.launch.mps", description="Runs the MPS daemon until SIGTERM.")
    parser.add_argument("--directory", type=Path, required=True, help="for pipes and logs; the same for all clients")
    parser.add_argument("--check", action="store_true", help="only check whether one answers: status 0 or 1")
    arguments = parser.parse_args(argv)
    daemon = MpsDaemon(arguments.directory)
    if not arguments.check:
        configure_logs(LogSection(), "mps")
        run_service(serve(daemon))
    try:
        daemon.client_pids()
    except PeerError as error:
        parser.exit(1, f"services.launch.mps: {error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
