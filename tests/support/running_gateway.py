"""The whole gateway in the test's event loop, on Unix sockets, with a scripted dense worker behind it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import grpc
import uvicorn.server
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import PreTrainedTokenizerFast

from services.common.child_options import ChildOptions
from services.common.config import (
    EMBEDDED_MODEL,
    Config,
    DenseSection,
    GatewaySection,
    MetricsSection,
    ModelSection,
    PeerSection,
)
from services.common.encoders.encoder_config import TextEncoderConfig, read_served_config
from services.common.errors import TwostrokeError
from services.common.model_config import ModelConfig, load_model_config
from services.gateway import service as gateway_service
from services.gateway.apis.twostroke.servicer import SERVICE_NAME
from services.gateway.service import Gateway
from services.gateway.text import tokenizer
from services.grammar.hf_tokenizer import load_hf_tokenizer
from services.pb import gateway_pb2_grpc
from services.rpc.server import serve
from tests.support.cluster import RECONNECTING
from tests.support.shared_routes import share_routes
from tests.support.warm_process import WarmProcess, warm_server
from tests.support.workers.fake_dense import FakeDense

TEST_LIMIT_S = 100.0  # far beyond what any test needs, also with a process that it starts on a busy machine
UNTIL_LIMIT_S = 40.0  # of one condition


@functools.cache
def embedded_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded model. Every gateway changes it in the same way; to read it takes 0.03 s."""
    return load_hf_tokenizer(EMBEDDED_MODEL)


@functools.cache
def embedded_config() -> ModelConfig:
    """The shape of the embedded model, which nobody can change. To read it takes 3 ms."""
    return load_model_config(EMBEDDED_MODEL)


def shared_served_config(path: Path) -> ModelConfig | TextEncoderConfig:
    """What `read_served_config` gives; of the embedded model always the same object."""
    return embedded_config() if path == EMBEDDED_MODEL else read_served_config(path)


def shared_hf_tokenizer(path: Path, is_optional: bool = False) -> PreTrainedTokenizerFast:
    """What `load_hf_tokenizer` gives; of the embedded model always the same object."""
    return embedded_tokenizer() if path == EMBEDDED_MODEL else load_hf_tokenizer(path, is_optional)


async def sleep_briefly(delay_s: float) -> None:
    """In the place of uvicorn's sleeps: a server looks every 0.1 s whether it should end, and then sleeps once more."""
    await asyncio.sleep(min(delay_s, 0.005))


uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": sleep_briefly})  # type: ignore[attr-defined]
# Gateways of one process share them.
share_routes()
tokenizer.load_hf_tokenizer = shared_hf_tokenizer
gateway_service.read_served_config = shared_served_config


def run(test: Coroutine[Any, Any, None]) -> None:
    """Runs one asynchronous test on the event loop that the services use.

    The test also fails if a task fails that nobody awaits.
    """
    unseen: list[dict[str, Any]] = []

    def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "future" in context:  # otherwise a callback failed: anyio's clients sometimes wake a cancelled reader
            unseen.append(context)

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(note)
        await asyncio.wait_for(test, TEST_LIMIT_S)

    uvloop.run(body())
    assert not unseen, unseen


class WarmService:
    """A service as a `WarmProcess`, with nothing at its standard input. Its outputs go to files in `directory`."""

    def __init__(self, directory: Path, module: str, *arguments: str) -> None:
        self._files = {name: directory / f"{module}.{name}" for name in ("stdout", "stderr")}
        command = [sys.executable, "-m", module, *arguments]
        with self._files["stdout"].open("w") as stdout, self._files["stderr"].open("w") as stderr:
            self._process = WarmProcess(warm_server(), command, stdout=stdout.fileno(), stderr=stderr.fileno())

    async def wait_for_log(self, text: str) -> None:
        """Returns once `text` is in standard error."""
        while text not in self._files["stderr"].read_text():
            assert self._process.poll() is None, self._files["stderr"].read_text()
            await asyncio.sleep(0.01)

    async def outcome(self) -> tuple[int, str, str]:
        """Waits for the end; returns the exit status, standard output and standard error."""
        status = await asyncio.to_thread(self._process.wait, TEST_LIMIT_S)
        return status, self._files["stdout"].read_text(), self._files["stderr"].read_text()

    def send_signal(self, number: int) -> None:
        """Sends a signal, such as SIGTERM."""
        self._process.send_signal(number)


class ServiceProcess:
    """`python -m MODULE ARGUMENTS...` as a child process.

    Not one of asyncio: uvloop would fork, and gRPC's fork handlers sometimes crash the child.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = subprocess.Popen(command, **pipes)

    async def read_until(self, text: str, stream: Literal["stdout", "stderr"]) -> str:
        """Reads `stream` up to and including `text`."""
        pipe, data = getattr(self._process, stream), b""
        while text.encode() not in data:
            data += (byte := await asyncio.to_thread(pipe.read, 1))
            assert byte, f"the process ended with {data!r} before {text!r}"
        return data.decode()

    async def outcome(self, stdin: str = "") -> tuple[int, str, str]:
        """Writes `stdin` and closes it; returns the exit status and the rest of standard output and error."""
        stdout, stderr = await asyncio.to_thread(self._process.communicate, stdin.encode())
        return self._process.returncode, stdout.decode(), stderr.decode()

    def write(self, stdin: str) -> None:
        """Writes to standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(stdin.encode())
        self._process.stdin.flush()

    def send_signal(self, number: int) -> None:
        """Sends a signal, such as SIGTERM."""
        self._process.send_signal(number)


async def until(condition: Callable[[], bool]) -> None:
    """Returns once `condition()` holds. Fails before the time limit of `run` is up, which says less."""
    deadline = time.monotonic() + UNTIL_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"it still does not hold after {UNTIL_LIMIT_S} s"
        await asyncio.sleep(0.001)


@dataclass
class RunningGateway:
    """The parts of a running gateway that tests use."""

    address: str
    http_address: str
    dense_address: str
    channel: grpc.aio.Channel
    stub: gateway_pb2_grpc.GatewayStub
    service: asyncio.Task[None]

    async def wait_health(self, status: int) -> None:
        """Returns once `grpc.health.v1` reports `status` for the gateway."""
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        health = health_pb2_grpc.HealthStub(self.channel)
        while True:
            response = await health.Check(request, wait_for_ready=True)
            if response.status == status:
                return
            await asyncio.sleep(0.005)

    async def wait_serving(self) -> None:
        """Returns once requests can run."""
        await self.wait_health(health_pb2.HealthCheckResponse.SERVING)


@contextlib.asynccontextmanager
async def running_gateway(
    directory: Path,
    dense: FakeDense | None,
    *,
    address: str | None = None,
    http_address: str | None = None,
    connect_timeout_s: float = 20.0,
    model: Path = EMBEDDED_MODEL,
    max_loras: int = 0,
    runner: Literal["auto", "pooling"] = "auto",
    options: ChildOptions | None = None,
    compat: Literal["none", "vllm", "sglang"] = "none",
    **gateway_options: Any,
) -> AsyncIterator[RunningGateway]:
    """Runs a gateway with its sockets in `directory`. With `dense` it serves when this returns.

    options: what a launcher would tell it; None: nothing
    """
    address = address or f"unix:{directory}/gateway.sock"
    http_address = http_address or f"unix:{directory}/http.sock"
    dense_address = f"unix:{directory}/dense.sock"
    config = Config(
        gateway=GatewaySection(address=address, http_address=http_address, **gateway_options),
        dense=DenseSection(address=dense_address, max_loras=max_loras),
        model=ModelSection(path=model, runner=runner),
        peers=PeerSection(connect_timeout_s=connect_timeout_s),
        metrics=MetricsSection(compat=compat),
    )
    if dense is not None:
        await dense.start(dense_address)
    service = asyncio.create_task(serve(lambda: Gateway(config, asyncio.Event(), options or ChildOptions())))
    # It may not listen yet when its client connects, which then tries again soon.
    own_address = gateway_options.get("local_address", address)
    async with grpc.aio.insecure_channel(own_address, options=RECONNECTING) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        gateway = RunningGateway(address, http_address, dense_address, channel, stub, service)
        try:
            if dense is not None:
                await gateway.wait_serving()
            yield gateway
        finally:
            service.cancel()
            with contextlib.suppress(asyncio.CancelledError, TwostrokeError):
                await service  # a bug in its end fails the test
            if dense is not None:
                await dense.kill()
