"""`Child`: one service as a process of the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.child_options import ChildOptions
from services.common.config import AttentionSection, Config, DenseSection, dump_config
from services.common.errors import PeerError
from services.launch.early_services import EarlyServices, start_process
from services.launch.gpus import is_on_gpu
from services.launch.hang import describe_hang
from services.launch.lifelines import Lifelines
from services.pb import dense_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls
from services.rpc.server import LIVENESS
from services.rpc.start_deadline import StartDeadline

log = structlog.get_logger()

STOPPED = (0, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)  # return codes of a process that somebody has stopped
ATTENTION_ROLE, DENSE_ROLE = "attn_worker", "dense_worker"
SECTIONS = {ATTENTION_ROLE: "attention", DENSE_ROLE: "dense"}  # of the config, by the worker's role
SHAPE_FILE = "model.shape"  # in the launcher's directory
MAX_WAITERS = 5  # threads that wait for the end of one process: to watch, drain, stop and kill it, or look at it


def worker_name(role: str, number: int) -> str:
    """The name of a worker: of which rank, or of which of several attention workers it is, if not of the first."""
    return f"{role}-{number}" if number else role


class Child:
    """One service as a child process, restarted when it dies, up to the configured number of times."""

    def __init__(
        self,
        name: str,
        role: str,
        config: Config,
        options: ChildOptions,
        *,
        run_dir: Path,
        environment: Mapping[str, str] | None,
        lifelines: Lifelines,
        succeed: Callable[[Child], bool] = lambda child: False,
        early: EarlyServices | None = None,
    ) -> None:
        """`options`: those of this child alone; the rest is filled in here. `early`: it may take its process there.

        `succeed` is called when it has died: it returns whether another process is the service from now on.
        """
        self.name = name  # prefix of its files
        self.role = role
        self.watching: asyncio.Task[None]  # from its first start on
        self.last_end = ""
        self.last_return_code: int | None = None
        self._succeed, self._lifelines, self._early = succeed, lifelines, early
        self._environment = environment
        self.config_file = run_dir / f"{name}.toml"
        self._error_file = run_dir / f"{name}.error"
        own: dict[str, object] = {"launcher_pid": os.getpid(), "error_file": self._error_file}
        if role in SECTIONS:
            own["shape_file"] = run_dir / SHAPE_FILE
        self.options = options.model_copy(update=own)
        self._section = config.launch
        self.config = config
        self.config_file.write_text(dump_config(config))
        self._process: subprocess.Popen[bytes] | None = None
        self._threads = ThreadPoolExecutor(MAX_WAITERS, thread_name_prefix=name)
        self._exits: list[float] = []  # times of unexpected ends within the restart window
        self._is_stopping = False
        self._kill_reason = ""  # why the launcher killed it
        self.num_restarts = 0
        # Before all services have served once, an end is an error that would repeat itself. Only a process that was
        # stopped from outside is restarted then, once: clients may see that it serves before the launcher does.
        self.may_restart = False

    def start(self) -> None:
        """Runs and watches the service from now on: `watching` is what `watch` does."""
        self.watching = asyncio.create_task(self.watch())

    async def wait_serving(self, deadline: StartDeadline, service: str = "") -> None:
        """Returns when a service reports SERVING, or its part `service`; raises `PeerError` after the deadline."""
        async with self.open_channel() as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    reply = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                deadline.check(f"the {self.role} at {self.address} does not serve")
                await asyncio.sleep(0.05)

    async def answers(self) -> bool:
        """Whether it answers a health check within a second, whatever the answer is."""
        async with self.open_channel() as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.aio.AioRpcError:
                return False
        return True

    async def wait_started(self, deadline: StartDeadline) -> None:
        """Returns when a service lacks nothing, or nothing but services of other launchers, which may come later."""
        if self.role == DENSE_ROLE:
            async with dense_stub(self) as stub:
                await deadline.wait_loaded(stub, f"the dense worker at {self.address}")
        else:
            await self.wait_serving(deadline, LIVENESS if self.role == "gateway" else "")

    async def end(self) -> None:
        """Stops the service within `launch.stop_grace_s`. Whatever `watch` raises does not matter any more."""
        self.stop()
        await self.wait(self.config.launch.stop_grace_s)
        await asyncio.gather(self.watching, return_exceptions=True)

    async def watch(self) -> None:
        """Runs the service until `stop`, until it ends after `retire`, or until another process succeeds it.

        Raises `PeerError` if it ends too often.
        """
        while not self._is_stopping:
            self._error_file.unlink(missing_ok=True)
            self._kill_reason = ""
            try:
                self._start()
            except OSError as error:  # no memory, or too many processes or open files, perhaps for a moment
                end, return_code = f"it cannot be started: {error}", None
            else:
                return_code = await self._wait(None)
                end = self._describe_end(return_code)
            if self._is_stopping:
                return
            self.last_end, self.last_return_code = end, return_code
            delay_s = self._back_off(return_code)
            if self._succeed(self):
                return
            self.options = self.options.model_copy(update={"is_restarted": True})
            log.warning("restarting", role=self.role, pid=self.pid, reason=self.last_end, delay_s=delay_s)
            await asyncio.sleep(delay_s)
            self.num_restarts += 1

    def _start(self) -> None:
        listener = self.options.http_listener
        early = None if self._early is None or listener is not None else self._early.take(self.module)
        if early is not None:
            own_end, self._process = early.line, early.process
            early.begin(self._arguments(early.lifeline), self._environment)
        else:
            own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its_end:
                self._process = start_process(
                    self.module,
                    self._arguments(its_end.fileno()),
                    environment=self._environment,
                    files=[its_end.fileno(), *([] if listener is None else [listener])],
                )
        self._lifelines.watch(own_end, self._process.pid)

    def _arguments(self, lifeline: int) -> list[str]:
        opens_gpu = self.role in SECTIONS and self.options.standby is None and is_on_gpu(self._own_section.device)
        options = self.options.model_copy(update={"lifeline": lifeline, "opens_gpu": opens_gpu})
        return ["--config", str(self.config_file), "--child", options.model_dump_json()]

    @property
    def service_name(self) -> str:
        """The name of the service, which is its successor's, too."""
        return worker_name(self.role, self.options.rank or self.options.attention_index)

    @property
    def module(self) -> str:
        """The module that it runs."""
        is_shard = self.role == DENSE_ROLE and self.options.rank > 0
        return "services.dense_worker.ranks" if is_shard else f"services.{self.role}"

    @property
    def address(self) -> str:
        """The address of its gRPC server, for this process."""
        if self.role == "gateway":
            assert self.config.gateway.local_address is not None, "the launcher has given it one"
            return self.config.gateway.local_address
        return self._own_section.address

    @property
    def device(self) -> str:
        """A worker's device, as the config names it."""
        return self._own_section.device

    @property
    def _own_section(self) -> DenseSection | AttentionSection:
        """A worker's section of the config."""
        return getattr(self.config, SECTIONS[self.role])

    def open_channel(self) -> grpc.aio.Channel:
        """A channel to its gRPC server. Raises `ConfigError` if its TLS files have become unusable."""
        tls = None if self.role == "gateway" else read_peer_tls(self.config.peers)
        return open_channel(self.address, self.config.peers.max_message_bytes, tls)

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id, or None if it was never started."""
        return self._process.pid if self._process else None

    def reconfigure(self, config: Config) -> None:
        """Gives it another config from its next start on. Raises `OSError` if the disk is full; it keeps its own then.
        """
        beside = self.config_file.with_suffix(".new")
        beside.write_text(dump_config(config))
        beside.replace(self.config_file)
        self.config = config

    def retire(self) -> None:
        """Lets it run, but does not restart it when it ends."""
        self._is_stopping = True

    def undo_retire(self) -> None:
        """Undoes `retire`; if it has ended meanwhile, `watch` starts it again."""
        self._is_stopping = False

    def leave_standby(self, old: Child) -> None:
        """It serves now in the place of `old`, and is started again as `old` was: then it attaches by itself."""
        self.options = self.options.model_copy(update={"standby": None})
        self.may_restart, self.num_restarts, self._exits = True, old.num_restarts, old._exits

    def stop(self, *, drains: bool = False) -> None:
        """Asks the service to stop and does not restart it. With `drains` a gateway first finishes its requests."""
        self._is_stopping = True
        if self._process is not None:
            # SIGINT only for services that have served: before that, Python may print a traceback.
            is_soft = drains or self.role != "gateway" or not self.may_restart
            self._process.send_signal(signal.SIGTERM if is_soft else signal.SIGINT)

    async def wait(self, grace_s: float) -> None:
        """Waits until the service has ended; kills it after `grace_s` seconds."""
        if self._process is None:
            return
        try:
            await self._wait(grace_s)
        except subprocess.TimeoutExpired:
            log.warning("killing", role=self.role, grace_s=grace_s)
            await self.log_hang()
            self._process.kill()
            await self._wait(None)

    async def _wait(self, timeout_s: float | None) -> int:
        """Waits on a separate thread: asyncio has few threads, and with many services all of them would wait."""
        assert self._process is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._process.wait, timeout_s)

    async def log_hang(self) -> None:
        """Logs what the process is doing, if it still runs and that can be told; within a few seconds."""
        if self.pid is None or not self.is_running:
            return
        try:
            hang = await asyncio.get_running_loop().run_in_executor(self._threads, describe_hang, self.pid)
        except RuntimeError as error:  # no further thread can be started, maybe because of what hangs
            log.error("what a service that hangs does is not known", role=self.role, pid=self.pid, reason=str(error))
        else:
            log.error("what a service that hangs does", role=self.role, pid=self.pid, **hang._asdict())

    async def kill_hanging(self, reason: str) -> None:
        """Logs what the process is doing, then kills it, so that it is restarted."""
        process = self._process
        await self.log_hang()
        if process is self._process:  # else it has ended and was restarted meanwhile
            self.kill(reason)

    def kill(self, reason: str) -> None:
        """Kills the process, which is then restarted."""
        if self._process is not None:
            self._kill_reason = reason
            self._process.kill()

    def _describe_end(self, return_code: int) -> str:
        """Describes the end of the process with the last error that it logged."""
        end = f"exit code {return_code}"
        if return_code < 0:
            end = f"signal {signal.Signals(-return_code).name}"
        if self._kill_reason:
            return f"{end} from the launcher: {self._kill_reason}"
        try:
            return f"{end}, after: {self._error_file.read_text().strip()}"
        except OSError:
            return end  # it had no time to log an error

    def _back_off(self, return_code: int | None) -> float:
        was_stopped = return_code in STOPPED and not self._kill_reason and self.options.standby is None
        if not self.may_restart and (self._exits or not was_stopped):
            raise PeerError(f"{self.role} ended before the cluster could serve: {self.last_end}")
        now = time.monotonic()
        self._exits = [at for at in self._exits if now - at < self._section.restart_window_s] + [now]
        if len(self._exits) > self._section.max_restarts:
            raise PeerError(
                f"{self.role} ended {len(self._exits)} times within {self._section.restart_window_s:g} s, the limit "
                f"is {self._section.max_restarts} restarts; the last time: {self.last_end}"
            )
        return self._section.restart_delay_s * 2 ** (len(self._exits) - 1)


@contextlib.asynccontextmanager
async def dense_stub(child: Child) -> AsyncIterator[dense_pb2_grpc.DenseWorkerStub]:
    """The calls of a dense worker, over a channel that is closed at the end of the context."""
    async with child.open_channel() as channel:
        yield dense_pb2_grpc.DenseWorkerStub(channel)


MakeChild = Callable[[str, str, Config, ChildOptions], Child]  # of a name, a role, a config and options
