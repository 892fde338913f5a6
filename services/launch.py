"""`python -m services.launch`: all three services on one machine, started, watched and stopped together.

The workers talk over Unix sockets in a temporary directory unless the config gives them addresses.
Logs go to standard error; standard output carries generated text alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.channel.shm_cleanup import remove_stale_regions
from services.common.cli import add_config_arguments, dashed
from services.common.client import open_channel
from services.common.config import Config, LaunchSection, dump_config, load_config
from services.common.errors import ConfigError, PeerError
from services.common.logs import configure_logs
from services.common.metrics import new_registry, serving_metrics
from services.common.server import run_service
from services.gateway import chat_client
from services.launch_metrics import LaunchMetrics
from services.mps import MpsDaemon, has_mps

log = structlog.get_logger()

ROLES = ("attn_worker", "dense_worker", "gateway")  # in starting order; stopped in reverse
MAX_HEALTH_BYTES = 4096


class Child:
    """One service as a child process, restarted when it dies, up to the configured number of times."""

    def __init__(
        self, role: str, config_file: Path, section: LaunchSection, environment: Mapping[str, str] | None
    ) -> None:
        self.role = role
        self._environment = environment
        self._config_file = config_file
        self._section = section
        self._process: subprocess.Popen[bytes] | None = None
        self._exits: list[float] = []  # times of unexpected ends, within the window that counts
        self._is_stopping = False
        self.num_restarts = 0
        self.may_restart = False  # until all have served once, an end is a mistake that would repeat itself

    async def watch(self) -> None:
        """Runs the service until `stop`. Raises `PeerError` when it ends too often."""
        while not self._is_stopping:
            # Not asyncio's own way, which forks: with gRPC's threads around that may crash the child.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", f"services.{self.role}", "--config", self._config_file, "--die-with-parent"],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the launcher only, which stops the services
            )
            return_code = await asyncio.to_thread(self._process.wait)
            if self._is_stopping:
                return
            delay_s = self._back_off(return_code)
            log.warning("restarting", role=self.role, return_code=return_code, delay_s=delay_s)
            await asyncio.sleep(delay_s)
            self.num_restarts += 1

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id, if it has been started."""
        return self._process.pid if self._process else None

    def stop(self, *, drains: bool = False) -> None:
        """Asks the service to stop, with `drains` a gateway once it has no requests; it will not be restarted."""
        self._is_stopping = True
        if self._process is not None:
            # SIGINT is for those that have served alone: before, Python would show where it interrupts.
            is_soft = drains or self.role != "gateway" or not self.may_restart
            self._process.send_signal(signal.SIGTERM if is_soft else signal.SIGINT)

    async def wait(self, grace_s: float) -> None:
        """Until the service has ended, which is forced after `grace_s` seconds."""
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            log.warning("killing", role=self.role, grace_s=grace_s)
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _back_off(self, return_code: int) -> float:
        if not self.may_restart:
            raise PeerError(f"{self.role} ended with code {return_code} before the cluster could serve")
        now = time.monotonic()
        self._exits = [at for at in self._exits if now - at < self._section.restart_window_s] + [now]
        if len(self._exits) > self._section.max_restarts:
            raise PeerError(
                f"{self.role} ended with code {return_code}, for the {len(self._exits)}th time within "
                f"{self._section.restart_window_s} s; the limit is {self._section.max_restarts} restarts"
            )
        return self._section.restart_delay_s * 2 ** (len(self._exits) - 1)


async def launch(config: Config, arguments: argparse.Namespace, drain: asyncio.Event) -> None:
    """Starts all, answers the prompt if there is one, and serves until cancelled, or until `drain` is set: then
    gateways get `gateway.drain_timeout_s` to finish what runs, before the workers are stopped.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="twostroke-"))
    try:
        await launch_in(run_dir, config, arguments, drain)
    finally:
        shutil.rmtree(run_dir)


async def launch_in(run_dir: Path, config: Config, arguments: argparse.Namespace, drain: asyncio.Event) -> None:
    """See `launch`; `run_dir` is there for sockets and files."""
    config = place_sockets(config, run_dir, is_private=arguments.prompt is not None)
    for address in (
        config.gateway.address, config.gateway.http_address, config.dense.address, config.attention.address
    ):
        check_free(address)
    config_file = run_dir / "config.toml"
    config_file.write_text(dump_config(config))
    mps = start_mps(config, run_dir)
    children = [Child(role, config_file, config.launch, mps.environment if mps else None) for role in ROLES]
    registry = new_registry("launch")
    LaunchMetrics(registry, lambda: children)
    watchers = [asyncio.create_task(child.watch()) for child in children]
    main = asyncio.create_task(use(config, arguments, children, mps))
    drained = asyncio.create_task(drain_gateways(drain, config, children))
    try:
        with serving_metrics(config.launch.metrics_address, registry):
            done, _ = await asyncio.wait([main, drained, *watchers], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what ended it
    finally:
        main.cancel()
        drained.cancel()
        await asyncio.gather(main, drained, return_exceptions=True)
        for child in reversed(children):
            child.stop()
        await asyncio.gather(*(child.wait(config.launch.stop_grace_s) for child in children))
        await asyncio.gather(*watchers, return_exceptions=True)
        if mps is not None:
            mps.stop()
        remove_stale_regions()  # of killed children; others have removed theirs


async def drain_gateways(drain: asyncio.Event, config: Config, children: Sequence[Child]) -> None:
    """Once `drain` is set: lets every gateway end its requests, for which it needs the workers."""
    await drain.wait()
    gateways = [child for child in children if child.role == "gateway"]
    for gateway in gateways:
        gateway.stop(drains=True)
    grace_s = config.gateway.drain_timeout_s + config.launch.stop_grace_s
    await asyncio.gather(*(gateway.wait(grace_s) for gateway in gateways))


async def use(
    config: Config, arguments: argparse.Namespace, children: Sequence[Child], mps: MpsDaemon | None
) -> None:
    """What the user sees: one answer and out, or a served address."""
    address = config.gateway.address
    await wait_serving(address, config.launch.start_timeout_s)
    for child in children:
        child.may_restart = True
    if mps is not None:
        missing = [child.role for child in children if child.role != "gateway" and child.pid not in mps.client_pids()]
        if missing:
            log.error("NOT under MPS: every handoff is about 20 times slower", roles=",".join(missing))
        else:
            log.info("both workers are MPS clients")
    prompt = arguments.sample_prompt if arguments.prompt is None else arguments.prompt
    if prompt is not None:
        client = ["--address", address, "--prompt", prompt, "--max-tokens", str(arguments.max_tokens)]
        if await asyncio.to_thread(chat_client.main, client) != 0:
            raise PeerError("the prompt was not answered")
    if arguments.prompt is not None:
        return
    http_address = config.gateway.http_address
    page = "" if http_address.startswith("unix:") else f"  in a browser: http://{http_address}/\n"
    print(
        f"\nServing {config.model.path.name} for gRPC clients at {address} and for OpenAI's over HTTP at "
        f"{http_address}. Stop with Ctrl-C.\n{page}"
        f"  one answer: {sys.executable} -m services.gateway.chat_client --address {address} "
        "--prompt 'San Francisco is a' --max-tokens 32\n"
        f"  a chat:     {sys.executable} -m services.gateway.chat_client --address {address}",
        file=sys.stderr,
        flush=True,
    )
    await asyncio.Event().wait()


async def wait_serving(address: str, timeout_s: float) -> None:
    """Returns when the gateway reports SERVING; raises `PeerError` after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    async with open_channel(address, MAX_HEALTH_BYTES) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            if time.monotonic() > deadline:
                raise PeerError(f"the gateway at {address} is not serving after {timeout_s} s")
            await asyncio.sleep(0.05)


def start_mps(config: Config, run_dir: Path) -> MpsDaemon | None:
    """Starts MPS where both workers share a GPU; raises `PeerError` when it is asked for and cannot be had."""
    mode, devices = config.launch.mps, {config.dense.device, config.attention.device}
    if mode == "off" or devices == {"cpu"} or len(devices) > 1:
        return None
    if has_mps():
        daemon = MpsDaemon(run_dir / "mps")
        daemon.start()
        return daemon
    if mode == "on":
        raise PeerError("launch.mps is 'on', but this machine has no nvidia-cuda-mps-control or no NVIDIA GPU")
    return None  # on a machine without a GPU there is nothing to share


def place_sockets(config: Config, run_dir: Path, *, is_private: bool) -> Config:
    """Unix sockets for the workers that got no address of their own; for the gateway if nobody else calls."""
    places = {"dense": {"address": "dense"}, "attention": {"address": "attention"}}
    if is_private:
        places["gateway"] = {"address": "gateway", "http_address": "http"}
    update = {}
    for name, keys in places.items():
        section = getattr(config, name)
        sockets = {
            key: f"unix:{run_dir}/{file}.sock" for key, file in keys.items() if key not in section.model_fields_set
        }
        update[name] = section.model_copy(update=sockets)
    return config.model_copy(update=update)


def check_free(address: str) -> None:
    """Raises `ConfigError` when somebody serves there: their answers would be taken for our own."""
    if address.startswith("unix:"):
        return  # the service itself can tell
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: port in use or address not of this host") from error


def parse_args(argv: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """Flags are shorthands for config keys; a wrong config ends the process with one line and status 1."""
    parser = argparse.ArgumentParser(prog="services.launch", description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--model", metavar="DIR", help="Hugging Face model directory (model.path)")
    parser.add_argument("--load-format", choices=["safetensors", "dummy"], help="dummy: random weights")
    parser.add_argument("--num-layers", type=int, metavar="N", help="run only the first N layers")
    parser.add_argument("--prompt", metavar="TEXT", help="stream the answer to TEXT, then stop")
    parser.add_argument("--sample-prompt", metavar="TEXT", help="stream the answer to TEXT, then go on serving")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="length of that answer (64)")
    arguments = parser.parse_args(dashed(argv))
    flags = {
        "model.path": arguments.model,
        "model.load_format": arguments.load_format,
        "model.num_layers": arguments.num_layers,
    }
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None]
    try:
        return load_config(arguments.config, [*overrides, *arguments.set]), arguments
    except ConfigError as error:
        parser.exit(1, f"services.launch: {error}\n")


def main() -> None:
    config, arguments = parse_args(sys.argv[1:])
    configure_logs(config.log, "launch")
    drain = asyncio.Event()
    run_service(launch(config, arguments, drain), drain)


if __name__ == "__main__":
    main()
