"""All services on one machine, started, watched and stopped together.

The workers talk over Unix sockets in a temporary directory unless the config gives them addresses.
Logs go to standard error; standard output carries generated text alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.channel.shm_cleanup import remove_stale_regions
from services.common.config import Config
from services.common.errors import PeerError
from services.common.logs import tell_people
from services.gateway import chat_client
from services.launch.addresses import check_free, check_tls, place_sockets
from services.launch.child import Child
from services.launch.children import Children
from services.launch.dense_address import DenseAddress
from services.launch.health_watch import HealthWatch
from services.launch.metrics import LaunchMetrics
from services.launch.mps import CONTROL, MpsDaemon, has_gpu, has_mps
from services.launch.own_key import make_own_key
from services.launch.replace import DenseReplacer
from services.launch.run_directory import run_directory
from services.launch.service_configs import service_configs
from services.launch.servicer import make_control
from services.launch.uninterrupted import uninterrupted
from services.rpc.client import open_channel
from services.rpc.metrics import new_registry, serving_metrics
from services.rpc.server import GrpcServer

log = structlog.get_logger()

MAX_HEALTH_BYTES = 4096


async def launch(config: Config, arguments: argparse.Namespace, drain: asyncio.Event) -> None:
    """Starts all, answers the prompt if there is one, and serves until cancelled, or until `drain` is set: then
    gateways get `gateway.drain_timeout_s` to finish what runs, before the workers are stopped.
    """
    with run_directory() as run_dir:
        await launch_in(run_dir, config, arguments, drain)


async def launch_in(run_dir: Path, config: Config, arguments: argparse.Namespace, drain: asyncio.Event) -> None:
    """See `launch`; `run_dir` is there for sockets and files."""
    config = place_sockets(config, run_dir, is_private=arguments.prompt is not None)
    for address in (
        config.gateway.address, config.gateway.http_address, config.dense.address, config.attention.address
    ):
        check_free(address)
    check_tls(config)
    api_key = make_own_key(config)
    dense_address = DenseAddress(config.dense.address, run_dir)
    services = service_configs(config, run_dir, dense_address)
    mps = start_mps(config, run_dir)
    make_child = functools.partial(Child, run_dir=run_dir, environment=mps.environment if mps else None)
    children = Children()
    registry = new_registry("launch")
    LaunchMetrics(registry, lambda: children)
    replacer = DenseReplacer(children, dense_address, config.attention.address, make_child)
    control = make_control(run_dir, children, replacer)
    for name, role, own_config in services:
        children.start(make_child(name, role, own_config))
    main = asyncio.create_task(use(config, arguments, children, mps, api_key))
    health = asyncio.create_task(HealthWatch(children, config.watchdog, config.launch.start_timeout_s).run())
    drained = asyncio.create_task(drain_gateways(drain, config, children))
    failure = asyncio.create_task(children.wait_failure())
    try:
        [dense] = children.of_role("dense_worker")
        dense_address.point_to(dense.address)
        log.info("control", address=await control.start())
        await control.set_serving(True)
        with serving_metrics(config.launch.metrics_address, registry):
            done, _ = await asyncio.wait([main, drained, failure, health], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what ended it
    finally:
        tasks = (main, drained, failure, health)
        await uninterrupted(stop(tasks, replacer, control, children, config.launch.stop_grace_s))
        dense_address.remove()
        remove_stale_regions()  # of killed children; others have removed theirs
        if mps is not None:
            stop_mps(mps)


async def stop(
    tasks: Sequence[asyncio.Task[None]],
    replacer: DenseReplacer,
    control: GrpcServer,
    children: Children,
    grace_s: float,
) -> None:
    """Ends first what uses the services, then them, within `grace_s` seconds."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await replacer.close()
    await control.stop(0.0)
    await children.stop(grace_s)


async def drain_gateways(drain: asyncio.Event, config: Config, children: Children) -> None:
    """Once `drain` is set: lets every gateway end its requests, for which it needs the workers."""
    await drain.wait()
    gateways = children.of_role("gateway")
    for gateway in gateways:
        gateway.stop(drains=True)
    grace_s = config.gateway.drain_timeout_s + config.launch.stop_grace_s
    await asyncio.gather(*(gateway.wait(grace_s) for gateway in gateways))


async def use(
    config: Config,
    arguments: argparse.Namespace,
    children: Children,
    mps: MpsDaemon | None,
    api_key: str | None,
) -> None:
    """What the user sees: one answer and out, or a served address."""
    address = config.gateway.address
    timeout_s = config.launch.start_timeout_s
    await asyncio.gather(*(wait_serving(gateway.address, timeout_s) for gateway in children.of_role("gateway")))
    for child in children:
        child.may_restart = True
    if mps is not None:
        clients = await asyncio.to_thread(mps.client_pids)
        missing = [child.role for child in children if child.role != "gateway" and child.pid not in clients]
        if missing:
            log.error("NOT under MPS: every handoff is about 20 times slower", roles=",".join(missing))
        else:
            log.info("both workers are MPS clients")
    prompt = arguments.sample_prompt if arguments.prompt is None else arguments.prompt
    if prompt is not None:
        flags = client_flags(children.of_role("gateway")[0].address, prompt, arguments.max_tokens, api_key)
        if await asyncio.to_thread(chat_client.main, flags) not in (0, chat_client.BROKEN_PIPE_STATUS):
            raise PeerError("the prompt was not answered")
    if arguments.prompt is not None:
        return
    http_address = config.gateway.http_address
    # With TLS the chat client would need certificates at the public address.
    chat_address = address if config.gateway.tls_certificate is None else config.gateway.local_address
    scheme = "http" if config.gateway.tls_certificate is None else "https"
    page = "" if http_address.startswith("unix:") else f"  in a browser: {scheme}://{http_address}/\n"
    tell_people(
        f"\nServing {config.model.path.name} for gRPC clients at {address} and for OpenAI's over HTTP at "
        f"{http_address}. Stop with Ctrl-C.\n{page}"
        f"  one answer: {sys.executable} -m services.gateway.chat_client --address {chat_address} "
        "--prompt 'San Francisco is a' --max-tokens 32\n"
        f"  a chat:     {sys.executable} -m services.gateway.chat_client --address {chat_address}"
    )
    await asyncio.Event().wait()


def client_flags(address: str, prompt: str, max_tokens: int, api_key: str | None) -> list[str]:
    """Of the chat client, each in one argument with its value: a prompt, and one key in 64, begins with a dash."""
    flags = [f"--address={address}", f"--prompt={prompt}", f"--max-tokens={max_tokens}"]
    return flags if api_key is None else [*flags, f"--api-key={api_key}"]


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
    mode, shares_gpu = config.launch.mps, share_gpu(config.dense.device, config.attention.device)
    if mode != "off" and shares_gpu and has_mps():
        daemon = MpsDaemon(run_dir / "mps")
        daemon.start()
        return daemon
    if mode == "on" and not shares_gpu:
        raise PeerError(
            f"launch.mps is 'on', but the workers share no GPU: dense.device is {config.dense.device!r}, "
            f"attention.device {config.attention.device!r}"
        )
    if mode == "on":
        raise PeerError(f"launch.mps is 'on', but this machine has no {CONTROL} or no NVIDIA GPU")
    if shares_gpu and has_gpu():
        reason = "launch.mps is 'off'" if mode == "off" else f"this machine has no {CONTROL}"
        log.warning("the workers share a GPU without MPS: every handoff is about 20 times slower", reason=reason)
    return None


def stop_mps(daemon: MpsDaemon) -> None:
    """A daemon that does not answer is told of in the log: why the launcher ends is something else."""
    try:
        daemon.stop()
    except PeerError as error:
        log.error("the MPS daemon may have been left behind", reason=str(error))


def share_gpu(*devices: str) -> bool:
    """Whether these are names of one GPU, if the machine has one: `auto` and `cuda` are the first."""
    first = {"auto": "cuda:0", "cuda": "cuda:0"}
    return "cpu" not in devices and len({first.get(device, device) for device in devices}) == 1
