"""`Launcher`: all services on one machine, or some of them, started, watched and stopped together.

The workers use Unix sockets in a temporary directory unless the config gives them addresses. Logs go to standard error;
standard output has only generated text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from services.channel.region import SHM_DIR, remove_stale_regions
from services.common.config import Config, add_api_key, service_manager_of_environment
from services.common.encoders.encoder_types import is_encoder
from services.common.errors import CapacityError, PeerError
from services.common.max_model_len import check_before_start
from services.common.several_attention_workers import check_attention_workers, has_several
from services.common.several_lanes import check_lanes_config
from services.common.weight_files import begin_reading_weights, check_weights
from services.launch.addresses import check_addresses, check_api_keys, check_chat_template, check_tls, place_sockets
from services.launch.attention_workers import AttentionWorkers
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE, SECTIONS, SHAPE_FILE, Child, MakeChild
from services.launch.children import Children
from services.launch.early_services import EarlyServices, start_process
from services.launch.gpu_faults import INTERVAL_S, GpuFaults
from services.launch.gpus import check_rank_gpus
from services.launch.health_watch import HealthWatch
from services.launch.lifelines import Lifelines
from services.launch.memory_plan import check_memory
from services.launch.metrics import LaunchMetrics
from services.launch.mps import MpsDaemon, find_mps, start_mps, stop_mps
from services.launch.passed_sockets import take_passed_sockets, with_passed_sockets
from services.launch.replace import DenseReplacer
from services.launch.run_directory import run_directory
from services.launch.service_configs import (
    ServiceStart,
    make_own_key,
    num_gateways,
    service_configs,
    without_needless_services,
    worker_addresses,
)
from services.launch.service_manager import ServiceManager
from services.launch.servicer import make_control
from services.launch.shape_reader import reading_shape
from services.launch.standby import Spares, Standby
from services.launch.summary import answer_prompt, print_addresses, print_summary
from services.launch.switched_address import SwitchedAddress
from services.rpc.metrics import new_registry, serving_metrics
from services.rpc.server import Service, uninterrupted
from services.rpc.start_deadline import StartDeadline

log = structlog.get_logger()

HOST_KV_NAME = "host-kv"  # of the file of the host tier, if the config names none


class Launcher(Service):
    """After `drain` is set, the gateways finish their requests, and `run` returns."""

    def __init__(
        self,
        config: Config,
        arguments: argparse.Namespace,
        drain: asyncio.Event,
        chat_command: str,
        early: EarlyServices,
    ) -> None:
        """`arguments`: the command line, see `services.launch.arguments`. `chat_command`: by which users can chat.

        It takes processes from `early`, and ends the others.
        """
        super().__init__()
        self._config = config
        self._arguments = arguments
        self._drain = drain
        self._chat_command = chat_command
        self._early = early
        self._mps: MpsDaemon | None = None
        self._manager = ServiceManager(service_manager_of_environment())
        self._health: list[HealthWatch] = []  # of workers and gateways, but not of spares
        self._gpu_faults: GpuFaults | None = None  # without MPS there are none to watch

    async def start(self) -> None:
        """Starts all services and begins to answer `ctl`.

        Raises `ConfigError`, `PeerError`, and what `check_memory` raises, also if a disk is full.
        """
        self._opened.callback(self._early.keep, frozenset())
        with _naming_full_disk():
            run_dir = self._opened.enter_context(run_directory())
        passed = take_passed_sockets()
        for listener in passed:
            self._opened.callback(listener.close)
        config = await self._complete_config(run_dir, passed)
        addresses = worker_addresses(config, run_dir)
        counts_dir = self._opened.enter_context(run_directory(SHM_DIR)) if num_gateways(config) > 1 else None
        services = service_configs(config, run_dir, addresses, counts_dir, [each.fileno() for each in passed])
        # A process that runs already can inherit no listener.
        self._early.keep({f"services.{each.role}" for each in services if each.options.http_listener is None})
        remove_stale_regions()  # of a launcher that was killed; their memory is free then
        await asyncio.to_thread(check_memory, config, self._early.taken_bytes)
        has_all_workers = {role for role, _ in addresses} == {*SECTIONS}
        if addresses:
            await self._find_mps(config, run_dir, starts=has_all_workers)
        self._opened.callback(remove_stale_regions)  # regions of killed children; others have removed theirs
        for address in addresses.values():
            self._opened.callback(address.remove)
        make_child = self._child_maker(run_dir)
        self._start_services(config, services, addresses, make_child)
        replacer = None
        if (first := (DENSE_ROLE, 0)) in addresses:
            attention_address = None if is_encoder(config.model.path) else config.attention.address
            standby = self._standbys[first]
            replacer = DenseReplacer(self._children, addresses[first], attention_address, make_child, standby)
        attention_workers = None
        if has_several(config) and has_all_workers:
            attention_workers = AttentionWorkers(self._children, make_child, self._standbys[first], config, run_dir)
        await self._start_control(run_dir, replacer, attention_workers)

    async def _complete_config(self, run_dir: Path, passed: Sequence[socket.socket]) -> Config:
        """The config with all that the launcher decides. Raises `ConfigError`."""
        config = with_passed_sockets(self._config, passed)
        config = place_sockets(config, run_dir, is_private=self._arguments.prompt is not None)
        self._serves_alone = config.launch.runs_all
        config = self._config = without_needless_services(config)
        if {*SECTIONS} & {*config.launch.services}:
            self._opened.enter_context(reading_shape(config.model, run_dir / SHAPE_FILE, start_process))
        await self._check_config(config, is_http_passed=bool(passed))
        begin_reading_weights(config)
        self._api_key = make_own_key(config)
        has_tier = ATTENTION_ROLE in config.launch.services and config.attention.host_kv_bytes
        if has_tier and config.attention.host_kv_path is None:
            memory_dir = self._opened.enter_context(run_directory(SHM_DIR))  # outlives the worker, but not the launcher
            config = config.with_values("attention", host_kv_path=memory_dir / HOST_KV_NAME)
        return config

    def _start_services(
        self,
        config: Config,
        services: Sequence[ServiceStart],
        addresses: Mapping[tuple[str, int], SwitchedAddress],
        make_child: MakeChild,
    ) -> None:
        """Starts them, to be stopped with all else. `addresses`: of the workers, which lead to these from now on."""
        self._children = Children()
        self._standbys = self._make_standbys(config, addresses, make_child)
        self._opened.push_async_callback(self._stop_services)
        if self._mps is not None:
            processes = [self._children, Spares(list(self._standbys.values()))]
            has_all_workers = {role for role, _ in addresses} == {*SECTIONS}
            self._gpu_faults = GpuFaults(self._mps, processes, None if has_all_workers else INTERVAL_S)
        with _naming_full_disk():
            for service in services:
                self._children.start(make_child(*service))
            for worker, address in addresses.items():
                address.point_to(self._children.worker(*worker).address)

    async def run(self) -> None:
        """Runs until the prompt is answered, or all has drained. Raises the error that ends a service for good."""
        config = self._config
        standbys = list(self._standbys.values())
        stall_timeout_s, start_timeout_s = config.watchdog.stall_timeout_s, config.launch.start_timeout_s
        gateways = partial(self._children.of_role, "gateway")
        self._health = [
            HealthWatch(self._workers, stall_timeout_s, start_timeout_s),
            HealthWatch(gateways, config.watchdog.gateway_timeout_s, start_timeout_s),
        ]
        spares = HealthWatch(lambda: Spares(standbys), stall_timeout_s, start_timeout_s)
        faults = [] if self._gpu_faults is None else [self._gpu_faults]
        watches = (each.run() for each in (*self._health, spares, *standbys, *faults))
        own = (self._use(), self._drained(), self._children.wait_failure(), self._manager.keep_alive())
        await run_until_first(*own, *watches)

    async def stop(self) -> None:
        """Ends first the users of the services, then the services, within `launch.stop_grace_s`."""
        self._manager.stopping()
        await super().stop()

    async def _check_config(self, config: Config, *, is_http_passed: bool) -> None:
        """All that can be known before anything starts. Raises `ConfigError`."""
        check_addresses(config, is_http_passed=is_http_passed)
        check_attention_workers(config)
        check_lanes_config(config)
        await asyncio.to_thread(check_before_start, config)
        await asyncio.to_thread(check_weights, config)
        await asyncio.to_thread(check_rank_gpus, config)
        check_tls(config)
        check_chat_template(config)
        for number, key in enumerate(self._arguments.api_key or (), start=1):
            add_api_key(f"flag-{number}", key)
        check_api_keys(config)

    async def _find_mps(self, config: Config, run_dir: Path, *, starts: bool) -> None:
        """Makes workers clients of the MPS daemon: of one of ours if it `starts`, else of another launcher's."""
        if not starts:
            self._mps = await asyncio.to_thread(find_mps, config)
            return
        self._mps = start_mps(config, run_dir)
        if self._mps is not None:
            self._opened.callback(stop_mps, self._mps)

    def _child_maker(self, run_dir: Path) -> MakeChild:
        lifelines = Lifelines()
        lifelines.start()
        self._opened.callback(lifelines.close)
        return partial(
            Child,
            run_dir=run_dir,
            environment=None if self._mps is None else self._mps.environment,
            lifelines=lifelines,
            succeed=self._succeed,
            early=self._early,
        )

    def _make_standbys(
        self, config: Config, addresses: Mapping[tuple[str, int], SwitchedAddress], make_child: MakeChild
    ) -> dict[tuple[str, int], Standby]:
        """The standby of each worker, by its role and rank; one may be off."""
        modes = {DENSE_ROLE: config.launch.standby_dense, ATTENTION_ROLE: config.launch.standby_attention}
        if self._arguments.prompt is not None:  # then all ends with the answer
            modes = dict.fromkeys(modes, "off")
        if has_several(config):
            modes[ATTENTION_ROLE] = "off"
        return {
            (role, rank): Standby(role, modes[role], self._children, address, make_child, config.launch, rank)
            for (role, rank), address in addresses.items()
        }

    async def _stop_services(self) -> None:
        """Stops services and spares at the same time, so that all of them have one grace period."""
        stopped = self._children.stop(self._config.launch.stop_grace_s)
        await asyncio.gather(stopped, *(standby.close() for standby in self._standbys.values()))

    def _succeed(self, child: Child) -> bool:
        """Whether a standby is the service from now on, in the place of one that has died."""
        if self._gpu_faults is not None:
            self._gpu_faults.note_end(child)
        standby = self._standbys.get((child.role, child.options.rank))
        return standby is not None and standby.succeed(child)

    async def _start_control(
        self, run_dir: Path, replacer: DenseReplacer | None, attention_workers: AttentionWorkers | None
    ) -> None:
        standbys = list(self._standbys.values())
        control = make_control(run_dir, self._children, replacer, standbys, self._config, attention_workers)
        self._opened.push_async_callback(control.stop, 0.0)
        if replacer is not None:
            self._opened.push_async_callback(replacer.close)
        log.info("control", address=await control.start())
        await control.set_serving(True)
        registry = new_registry("launch")
        LaunchMetrics(registry, lambda: self._children, list(self._standbys.values()))
        address = self._config.launch.metrics_address
        self._opened.enter_context(serving_metrics(address, registry, "launch.metrics_address"))

    async def _use(self) -> None:
        """Prints the answer to a prompt and returns, or prints the addresses and serves."""
        config, arguments = self._config, self._arguments
        try:
            await self._wait_started()
        except PeerError as error:
            silent = await self._silent_workers()
            await asyncio.gather(*(child.log_hang() for child in self._children))
            if silent:
                raise PeerError(f"{error}: no answer from {', '.join(silent)}") from error
            raise
        for child in self._children:
            child.may_restart = True
        for watch in self._health:
            watch.note_started()
        gateways = self._children.of_role("gateway")
        prompt = arguments.sample_prompt if arguments.prompt is None else arguments.prompt
        if prompt is not None:
            await answer_prompt(gateways[0].address, prompt, arguments.max_tokens, self._api_key)
        if arguments.prompt is None:
            if config.launch.runs_all:
                [dense], [attention] = (self._children.of_role(role) for role in (DENSE_ROLE, ATTENTION_ROLE))
                await print_summary(config, dense, attention)
            if gateways:
                print_addresses(config, self._chat_command)
            else:
                log.info("started", services=",".join(config.launch.services))
            await self._manager.ready(f"serving {config.model.name or config.model.path.name}")
        # Clients need not wait for the daemon's answers. With one worker only, the other one may have no context yet.
        if self._mps is not None and config.launch.runs_all:
            await self._check_mps(self._mps)
        if arguments.prompt is None:
            await asyncio.Event().wait()

    async def _wait_started(self) -> None:
        """Waits until clients are served, or until only services of other launchers are missing."""
        deadline = StartDeadline(self._config.launch.start_timeout_s)
        if not self._serves_alone:
            await asyncio.gather(*(child.wait_started(deadline) for child in self._children))
            return
        [dense] = self._children.of_role(DENSE_ROLE)
        watching = asyncio.create_task(deadline.watch(dense.address, dense.config.peers))
        try:
            await asyncio.gather(*(child.wait_serving(deadline) for child in self._children.of_role("gateway")))
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _check_mps(self, mps: MpsDaemon) -> None:
        clients = await asyncio.to_thread(mps.client_pids)
        missing = [child.role for child in self._workers() if child.pid not in clients]
        if missing:
            log.error("NOT under MPS: every handoff is about 20 times slower", roles=",".join(missing))
        else:
            log.info("both workers are MPS clients")

    async def _silent_workers(self) -> list[str]:
        """Workers that run and do not answer: gateways, and the dense worker, wait for such a one."""
        workers = self._workers()
        answers = await asyncio.gather(*(child.answers() for child in workers))
        return [
            f"the {child.service_name}, process {child.pid}"
            for child, has_answered in zip(workers, answers, strict=True)
            if child.is_running and not has_answered
        ]

    def _workers(self) -> list[Child]:
        return [child for child in self._children if child.role != "gateway"]

    async def _drained(self) -> None:
        """Waits for `drain`, then lets every gateway finish its requests while the workers still run."""
        await self._drain.wait()
        self._manager.stopping()
        gateways = self._children.of_role("gateway")
        for gateway in gateways:
            gateway.stop(drains=True)
        grace_s = self._config.gateway.drain_timeout_s + self._config.launch.stop_grace_s
        await asyncio.gather(*(gateway.wait(grace_s) for gateway in gateways))


@contextlib.contextmanager
def _naming_full_disk() -> Iterator[None]:
    """Turns an `OSError`, which names the file, into a `CapacityError`."""
    try:
        yield
    except OSError as error:
        raise CapacityError(f"the services cannot be started: {error}") from error


async def run_until_first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all until the first one returns or fails, then cancels the others. Raises its error."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await uninterrupted(_ended(tasks))


async def _ended(tasks: list[asyncio.Future[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
