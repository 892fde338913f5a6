"""A real cluster for tests: `python -m services.launch` in its own process, and a plain client."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.channel.region import FIRST_LANE, LINK_SUFFIX, NAME_PREFIX, SHM_DIR
from services.pb import (
    attn_pb2,
    attn_pb2_grpc,
    dense_pb2,
    dense_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    sampling_pb2,
)
from tests.support.warm_process import MODULES, WARM_SERVER, WarmProcess, run_warm, warm_server

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
REQUEST_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
CTL_TIMEOUT_S = 200.0
FIRST_PORT = 12_000
# Soon after the start of another process; by default a second later or more.
RECONNECTING = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
# They take CPU time, and are processes more: only tests that ask for them have some.
NO_STANDBYS = ("launch.standby_dense=off", "launch.standby_attention=off")
RESERVATIONS: list[socket.socket] = []  # of the ports that this process uses


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    finish: gateway_pb2.Finish


class Stubs:
    """A plain client of all three services, whose sockets lie in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._channels = [
            grpc.insecure_channel(f"unix:{directory}/{name}.sock", options=RECONNECTING)
            for name in ("gateway", "dense", "attention")
        ]
        gateway, dense, attention = self._channels
        self.gateway = gateway_pb2_grpc.GatewayStub(gateway)
        self.dense = dense_pb2_grpc.DenseWorkerStub(dense)
        self.attention = attn_pb2_grpc.AttentionWorkerStub(attention)

    def generate(self, prompt: str | Sequence[int], max_tokens: int, **options: object) -> Answer:
        """Generates one streamed answer; greedy unless `options` contains other sampling parameters."""
        pieces, token_ids, finish = [], [], None
        for chunk in self.gateway.GenerateStream(request(prompt, max_tokens, **options), timeout=REQUEST_TIMEOUT_S):
            assert finish is None, "nothing may follow the finish"
            pieces.append(chunk.text)
            token_ids += chunk.token_ids
            if chunk.HasField("finish"):
                finish = chunk.finish
        assert finish is not None, "the last chunk carries the finish"
        return Answer(token_ids, "".join(pieces), finish)

    def generate_all(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[Answer]:
        """Generates all answers concurrently."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self.generate, prompts, max_tokens))

    def attention_status(self) -> attn_pb2.AttentionStatus:
        request = attn_pb2.GetStatusRequest()
        return self.attention.GetStatus(request, timeout=REQUEST_TIMEOUT_S, wait_for_ready=True)

    def dense_status(self) -> dense_pb2.DenseStatus:
        request = dense_pb2.GetStatusRequest()
        return self.dense.GetStatus(request, timeout=REQUEST_TIMEOUT_S, wait_for_ready=True)

    def num_copied_tokens(self) -> int:
        """Of sequences that have moved to the present attention workers, whose blocks were copied."""
        total = 0
        for each in self.dense_status().attention_workers:
            with grpc.insecure_channel(each.address) as channel:
                status = attn_pb2_grpc.AttentionWorkerStub(channel).GetStatus(attn_pb2.GetStatusRequest())
                total += status.num_copied_tokens
        return total

    def wait_idle(self, timeout_s: float = IDLE_TIMEOUT_S) -> attn_pb2.AttentionStatus:
        """Waits until no sequence is open and all blocks are free; fails after `timeout_s` seconds.

        If an attention worker was just killed, this also waits for its successor and for the dense worker to attach.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status = self.attention_status()
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    raise
            else:
                if status.num_sequences == 0 and status.num_free_blocks == status.num_blocks:
                    return status
                assert time.monotonic() < deadline, f"blocks are still in use: {status}"
            time.sleep(0.02)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class Cluster(Stubs):
    """A launcher's services and processes."""

    def __init__(
        self,
        process: subprocess.Popen[str] | WarmProcess,
        directory: Path,
        log_file: Path,
        settings: Mapping[str, str],
    ) -> None:
        super().__init__(directory)
        self.process = process
        self.log_file = log_file
        self.address = settings["gateway.address"]
        self.http_address = settings.get("gateway.http_address")

    def pid_of(self, role: str) -> int:
        """Process id of a child of the launcher. If it was just killed, waits until it is started again."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            for pid in children_of(self.process.pid):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    if runs_role(pid, role):
                        return pid
            assert time.monotonic() < deadline, f"no {role} among the children of the launcher"
            time.sleep(0.02)

    def kill(self, *roles: str) -> None:
        """Kills these services at once; returns when the launcher has started others in their place."""
        pids = {role: self.pid_of(role) for role in roles}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(self.pid_of(role) == pid for role, pid in pids.items()):
            assert time.monotonic() < deadline, f"{roles} were not started again"
            time.sleep(0.02)


def request(prompt: str | Sequence[int], max_tokens: int, **options: object) -> gateway_pb2.GenerateRequest:
    """A request; `options` are fields of `SamplingParams` or of `GenerateRequest`, by name."""
    sampling_names = set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    sampling = {"temperature": 0.0} | {key: options.pop(key) for key in sampling_names & options.keys()}
    message = gateway_pb2.GenerateRequest(
        max_tokens=max_tokens, sampling=sampling_pb2.SamplingParams(**sampling), **options
    )
    if isinstance(prompt, str):
        message.prompt = prompt
    else:
        message.prompt_token_ids.ids.extend(prompt)
    return message


@contextlib.contextmanager
def running_cluster(
    directory: Path,
    *overrides: str,
    wrapper: Sequence[str] = (),
    is_warm: bool = False,
    launcher: str = "services.launch",
    modules: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    listeners: Sequence[socket.socket] = (),
) -> Iterator[Cluster]:
    """Starts a cluster with Unix sockets in `directory`; at the end it must stop cleanly and leave nothing.

    `wrapper` is a command that executes the next one in its own process, such as `unshare`. `env` is the whole
    environment, by default ours. With `is_warm` the processes are forked from `tests.support.warm_server`, for tests
    that measure neither start time nor all memory of a process; how much it grows is the same. `launcher` is the module
    that starts all others; `modules` are those that run in place of some, by module. There are no standbys unless
    `overrides` ask for them. `listeners` are passed on as systemd would, to a warm
    `tests.support.workers.activated_launcher`; then HTTP has their address.
    """
    regions_before = stale_regions()
    if modules:
        launcher = "tests.support.workers.replacing_launcher"
        env = {**(os.environ if env is None else env), MODULES: json.dumps(modules)}
    command = [sys.executable, "-m", launcher]
    sockets = [f"{name}.address=unix:{directory}/{name}.sock" for name in ("gateway", "dense", "attention")]
    if not listeners:
        sockets.append(f"gateway.http_address=unix:{directory}/http.sock")
    settings = dict(override.split("=", 1) for override in (*sockets, *NO_STANDBYS, *overrides))
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    log_file = directory / "log"
    with log_file.open("w") as log:
        if is_warm:
            passed = {number: each.fileno() for number, each in enumerate(listeners, start=3)}
            process = WarmProcess(
                warm_server(), command, stderr=log.fileno(), env=env, wrapper=wrapper, pass_fds=passed
            )
        else:
            process = subprocess.Popen([*wrapper, *command], cwd=REPOSITORY, stderr=log, env=env, text=True)
    cluster = Cluster(process, directory, log_file, settings)
    try:
        wait_for_log(process, log_file, "Serving ")
        children = children_of(process.pid)
        yield cluster
        if process.poll() is None:
            children = children_of(process.pid)  # some may have been replaced
            process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0, log_file.read_text()
        assert not [pid for pid in children if is_alive(pid)], "a service outlived the launcher"
        assert_nothing_left(regions_before, log_file.read_text())
    finally:
        cluster.close()
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def ctl(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m services.launch ctl` for the launcher of that cluster."""
    found = re.search(r"event=control address=(\S+)", cluster.log_file.read_text())
    assert found is not None
    return run_warm("services.launch", "ctl", "--launcher", found[1], *arguments, timeout_s=CTL_TIMEOUT_S)


def wait_for_log(process: subprocess.Popen[str] | WarmProcess, log_file: Path, text: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while text not in log_file.read_text():
        assert process.poll() is None, f"ended with {process.returncode}:\n{log_file.read_text()}"
        assert time.monotonic() < deadline, f"no {text!r} after {START_TIMEOUT_S} s:\n{log_file.read_text()}"
        time.sleep(0.05)


def free_port() -> int:
    """A port of this machine at which no process listens, and that no other test gets until this process ends.

    The system gives outgoing connections none of these ports, so that nobody takes it before the service does.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = FIRST_PORT + secrets.randbelow(max(first_outgoing - FIRST_PORT, 1000))
        if reserve_port(port):
            return port


def reserve_port(port: int) -> bool:
    """Whether no process listens at this port, and no other test gets it until this process ends."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0twostroke-test-port-{port}")  # the name of no file; it ends with the process
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        reservation.close()
        return False
    RESERVATIONS.append(reservation)
    return True


def stale_regions() -> set[Path]:
    """Shared memory whose creator is dead. Other clusters may run at the same time; theirs is locked and left out.

    A socket has no lock, but there is one beside a region only.
    """
    stale = set()
    for path in SHM_DIR.glob(f"{NAME_PREFIX}*"):
        if path.is_socket():
            if not path.with_name(f"{path.name.removesuffix(LINK_SUFFIX)}-{FIRST_LANE}").exists():
                stale.add(path)
            continue
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            stale.add(path)
    return stale


def assert_nothing_left(regions_before: set[Path], log: str) -> None:
    """Asserts that no shared memory is left of the attention workers in `log` to which a dense worker attached, and
    that soon none is left of other workers. Clusters of another test process may run at the same time, and the shared
    memory of their killed workers stays for a moment.
    """
    epochs = re.findall(r"event=attached epoch=(\w+)", log)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while left := stale_regions() - regions_before:
        ours = [path for path in left if any(epoch in path.name for epoch in epochs)]
        assert not ours and time.monotonic() < deadline, f"shared memory was left behind: {left}"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """The process ids of its children. For a launcher these are its services."""
    children = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if WARM_SERVER not in Path(f"/proc/{child}/cmdline").read_text():
                children.append(int(child))
    return children


def runs_role(pid: int, role: str) -> bool:
    """Whether a process runs a service, such as "dense_worker", or a variant of it. Raises `OSError` after its end."""
    return f"{role}\0" in Path(f"/proc/{pid}/cmdline").read_text()


def is_alive(pid: int) -> bool:
    """Whether a process has not ended. One that nobody waits for is still listed then, as an orphan may be here."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
