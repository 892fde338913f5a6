"""Output for the launcher's user when all services serve: the answer to a prompt, or the addresses and commands."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import Config
from services.common.errors import PeerError
from services.common.logs import print_to_stderr
from services.gateway import chat_client
from services.launch.child import DENSE_ROLE, Child
from services.pb import dense_pb2_grpc
from services.rpc.client import open_channel
from services.rpc.server import LIVENESS
from services.rpc.start_deadline import StartDeadline

log = structlog.get_logger()

MAX_HEALTH_BYTES = 4096


async def wait_serving(child: Child, deadline: StartDeadline, service: str = "") -> None:
    """Returns when a service reports SERVING, or its part `service`; raises `PeerError` after the deadline."""
    async with open_channel(child.address, MAX_HEALTH_BYTES, child.tls) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            deadline.check(f"the {child.role} at {child.address} does not serve")
            await asyncio.sleep(0.05)


async def wait_started(child: Child, deadline: StartDeadline) -> None:
    """Returns when a service lacks nothing, or nothing but services of other launchers, which may come later."""
    if child.role == DENSE_ROLE:
        async with open_channel(child.address, child.config.peers.max_message_bytes, child.tls) as channel:
            await deadline.wait_loaded(dense_pb2_grpc.DenseWorkerStub(channel), f"the dense worker at {child.address}")
    else:
        await wait_serving(child, deadline, LIVENESS if child.role == "gateway" else "")


async def answer_prompt(address: str, prompt: str, max_tokens: int, api_key: str | None) -> None:
    """Streams the answer of the gateway at `address` to standard output. Raises `PeerError` if there is none.

    If logs go to the same terminal, it is printed when it is complete, so that no log line comes within it.
    """
    flags = client_flags(address, prompt, max_tokens, api_key)
    if sys.stdout.isatty() and sys.stderr.isatty():
        flags.append("--no-stream")
        log.info("answering", prompt=prompt)
    if await asyncio.to_thread(chat_client.main, flags) not in (0, chat_client.BROKEN_PIPE_STATUS):
        raise PeerError("the prompt was not answered")


def client_flags(address: str, prompt: str, max_tokens: int, api_key: str | None) -> list[str]:
    """Flags of the chat client, each in one argument with its value: prompts, and one key in 64, begin with a dash."""
    flags = [f"--address={address}", f"--prompt={prompt}", f"--max-tokens={max_tokens}"]
    return flags if api_key is None else [*flags, f"--api-key={api_key}"]


def print_addresses(config: Config, chat_command: str) -> None:
    """Prints the gateway's addresses and calls of `chat_command`; with logs in JSON, logs the addresses instead."""
    name = config.model.name or config.model.path.name
    address, http_address = config.gateway.address, config.gateway.http_address
    if config.log.format == "json":  # for a program, which reads every line of standard error as JSON
        log.info("serving", model=name, address=address, http_address=http_address)
        return
    # With TLS the chat client would need certificates for the public address.
    chat_address = address if config.gateway.tls_certificate is None else config.gateway.local_address
    scheme = "http" if config.gateway.tls_certificate is None else "https"
    page = "" if http_address.startswith("unix:") else f"  in a browser: {scheme}://{http_address}/\n"
    print_to_stderr(
        f"\nServing {name} for gRPC clients at {address} and for OpenAI's over HTTP at "
        f"{http_address}. Stop with Ctrl-C.\n{page}"
        f"  one answer: {chat_command} --address {chat_address} "
        "--prompt 'San Francisco is a' --max-tokens 32\n"
        f"  a chat:     {chat_command} --address {chat_address}"
    )
