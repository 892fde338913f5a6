"""`Standby`: one spare process of a worker, which becomes the worker when the present one dies.

    the worker serves → a spare is started, at low priority → it is ready → the present worker dies
    → the address leads to the spare, which is told to take over → it serves → the next spare is started

A spare that dies is replaced by another one, a bounded number of times. Without a spare that is ready, a worker that
dies is started again. Runs in the launcher's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import grpc
import structlog

from services.common.child_options import ChildOptions
from services.common.config import LaunchSection
from services.common.errors import ConfigError, PeerError
from services.common.process import proportional_bytes
from services.launch.child import DENSE_ROLE, Child, MakeChild, worker_name
from services.launch.children import Children
from services.launch.service_configs import with_address
from services.launch.standby_calls import SpareState, standby_calls
from services.launch.switched_address import SwitchedAddress
from services.pb import launch_pb2
from services.rpc.server import uninterrupted
from services.rpc.start_deadline import StartDeadline

log = structlog.get_logger()

POLL_S = 0.25
RETRY_S = 1.0  # before the next spare, if one has died; doubles with each further one in the window
OWN_ERROR = 1  # exit status of a service that has reported what it lacks
MIB = 2**20

State = launch_pb2.StandbyStatus
# What a spare is told as the worker was.
INHERITED_OPTIONS = ("stated_weights_hash", "rank", "rank_attention_addresses", "shard_addresses")


@dataclass(slots=True)
class Spare:
    """A process that waits to take over."""

    child: Child
    channel: grpc.aio.Channel
    is_taken: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is no spare any more
    is_successor: bool = False  # of a worker that has died
    is_ready: bool = False
    state: SpareState = field(default_factory=lambda: SpareState(is_ready=False))  # as it has said


class Standby:
    """The standby of one worker. `run` keeps a spare; when the worker has died, `succeed` makes it its successor."""

    def __init__(
        self,
        role: str,
        mode: Literal["auto", "off", "imports", "loaded"],
        children: Children,
        address: SwitchedAddress,
        make_child: MakeChild,
        section: LaunchSection,
        rank: int = 0,
    ) -> None:
        """`make_child(name, role, config, options)` makes a spare. `rank`: the worker's, if there are several.

        Raises `ConfigError` if there can be none.
        """
        self.role, self._rank, self._name = role, rank, worker_name(role, rank)
        self._calls = standby_calls(role, rank)
        self._key = f"launch.standby_{'dense' if role == DENSE_ROLE else 'attention'}"
        self._mode = mode
        self._children = children
        self._address = address
        self._make_child = make_child
        self._section = section
        self._spare: Spare | None = None
        self._off_reason = f"{self._key} is off" if mode == "off" else ""
        self._is_wanted = asyncio.Event()  # cleared while the worker is being replaced
        self._is_wanted.set()
        self._num_started = 0
        self._has_been_ready = False
        self._failures: list[float] = []  # times of the ends of spares, within the restart window
        self._num_never_ready = 0  # spares in a row that have ended before they were ready, however long each took
        self.num_take_overs = 0
        if mode != "off" and not address.can_switch:
            reason = "it needs a worker at a Unix socket, the worker's address is a TCP port"
            if mode != "auto":
                raise ConfigError(f"{self._key} is {mode!r}: {reason}")
            self._off_reason = reason

    @property
    def spare(self) -> Child | None:
        """The process that waits, or starts."""
        return None if self._spare is None else self._spare.child

    def status(self) -> launch_pb2.StandbyStatus:
        """The state and the costs of the spare."""
        spare, reply = self._spare, State(role=self.role, name=self._name, num_take_overs=self.num_take_overs)
        reply.state, reply.reason = (State.OFF if self._off_reason else State.STARTING), self._off_reason
        if spare is not None:
            reply.state = State.READY if spare.is_ready else State.STARTING
            reply.pid = spare.child.pid or 0
            reply.has_weights, reply.device_bytes = spare.state.has_weights, spare.state.device_bytes
            reply.host_bytes = proportional_bytes(reply.pid)
        return reply

    async def run(self) -> None:
        """Keeps a spare until cancelled. Raises `PeerError` if it is asked for explicitly and cannot be had."""
        while not self._off_reason:
            await self._is_wanted.wait()
            await self._wait_serving()
            if not self._is_wanted.is_set():
                continue
            try:
                spare = self._start()
            except OSError as error:  # its file of configuration cannot be written: the disk is full
                self._num_never_ready += 1
                await self._handle_failure(f"it cannot be started: {error}")
                continue
            await self._wait_end(spare)
            if spare.is_successor:
                await self._tell(spare)
            await spare.channel.close()
            if self._spare is spare:  # it has ended by itself
                self._spare = None
                # Its error says what the child knows.
                await asyncio.gather(spare.child.watching, return_exceptions=True)
                self._num_never_ready = 0 if spare.is_ready else self._num_never_ready + 1
                child = spare.child
                has_reported = child.last_return_code == OWN_ERROR
                await self._handle_failure(child.last_end, child.pid, has_reported=has_reported)
        if self._mode != "off":
            log.warning("there is no standby", role=self._name, reason=self._off_reason)
        await asyncio.Event().wait()

    def succeed(self, old: Child) -> bool:
        """Makes the spare the successor of a worker that has died. Returns whether there is one that is ready."""
        spare = self._spare
        if old not in self._children or spare is None or not spare.is_ready or not spare.child.is_running:
            return False
        try:
            self._address.point_to(spare.child.address)
        except OSError as error:  # no room for a symbolic link: the worker is started again at its own address
            log.error("the standby cannot take over", role=self._name, reason=str(error))
            return False
        pid, reason = spare.child.pid, old.last_end
        log.warning("the standby takes over", role=self._name, pid=pid, old_pid=old.pid, reason=reason)
        spare.is_successor = True
        new = self._take(spare)  # `run` tells it
        new.leave_standby(old)
        new.num_restarts += 1
        self.num_take_overs += 1
        self._children.replace(old, new)
        return True

    @contextlib.asynccontextmanager
    async def suspended(self, *, is_taken: bool) -> AsyncIterator[Child | None]:
        """A context without a spare, in which the worker is replaced.

        With `is_taken` it gives the spare, if that holds the weights. Otherwise the spare is stopped first, because
        there may be no memory for a third worker.
        """
        self._is_wanted.clear()
        spare, taken = self._spare, None
        try:
            if spare is not None and is_taken and spare.is_ready and spare.state.has_weights and spare.child.is_running:
                taken = self._take(spare)
            else:
                await self.close()
            yield taken
        finally:
            self._is_wanted.set()

    async def close(self) -> None:
        """Stops the spare."""
        if self._spare is not None:
            await uninterrupted(self._take(self._spare).end())

    def _take(self, spare: Spare) -> Child:
        self._spare = None
        spare.is_taken.set()
        return spare.child

    def _start(self) -> Spare:
        present = self._children.worker(self.role, self._rank)
        self._num_started += 1
        assert self._mode != "off"
        of_present = {key: getattr(present.options, key) for key in INHERITED_OPTIONS}
        options = ChildOptions(standby=self._mode, has_predecessor=True, **of_present)
        config = with_address(present.config, self.role, self._address.new_address())
        child = self._make_child(f"{self._name}-standby-{self._num_started}", self.role, config, options)
        child.start()
        self._spare = Spare(child, child.open_channel())
        return self._spare

    async def _wait_serving(self) -> None:
        """Waits until the worker serves: until both are attached to each other, and the KV cache has its memory."""
        while True:
            worker = self._children.worker(self.role, self._rank)
            with contextlib.suppress(grpc.aio.AioRpcError, ConfigError):  # its TLS files are checked elsewhere
                async with worker.open_channel() as channel:
                    if await self._calls.serves(channel):
                        return
            await asyncio.sleep(POLL_S)

    async def _wait_end(self, spare: Spare) -> None:
        """Waits until the spare has ended, or is taken. Kills one that is not ready in time."""
        ready = asyncio.create_task(self._wait_ready(spare))
        taken = asyncio.create_task(spare.is_taken.wait())
        try:
            await asyncio.wait([ready, spare.child.watching, taken], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                try:
                    ready.result()
                except PeerError as error:
                    await spare.child.kill_hanging(str(error))
                await asyncio.wait([spare.child.watching, taken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            taken.cancel()
            await asyncio.gather(ready, taken, return_exceptions=True)

    async def _wait_ready(self, spare: Spare) -> None:
        """Raises `PeerError` after `launch.start_timeout_s`."""
        deadline, began_s = StartDeadline(self._section.start_timeout_s), time.monotonic()
        while not await self._is_ready(spare, deadline):
            deadline.check(f"the standby of the {self._name} is not ready")
            await asyncio.sleep(POLL_S)
        spare.is_ready = self._has_been_ready = True
        costs = self.status()
        log.info(
            "standby ready",
            role=self._name,
            pid=costs.pid,
            kind="loaded" if costs.has_weights else "imports",
            host_mb=round(costs.host_bytes / MIB),
            gpu_mb=round(costs.device_bytes / MIB),
            seconds=round(time.monotonic() - began_s, 1),
        )

    async def _is_ready(self, spare: Spare, deadline: StartDeadline) -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):  # it does not listen yet
            spare.state = await self._calls.state(spare.channel, deadline)
            return spare.state.is_ready
        return False

    async def _tell(self, spare: Spare) -> None:
        """Tells the spare to take over. One that does not answer is killed, and then started again."""
        child = spare.child
        try:
            await self._calls.take_over(spare.channel, child.config.peers.rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            log.error("the standby does not take over", role=self._name, pid=child.pid, reason=reason)
            await child.kill_hanging(f"it does not take over: {reason}")

    async def _handle_failure(self, reason: str, pid: int | None = None, *, has_reported: bool = False) -> None:
        """Waits before the next spare is started, or gives it up. Raises `PeerError` if the first one reports why.

        pid: None: it could not be started
        """
        now_s = time.monotonic()
        if has_reported and self._mode != "auto" and not self._has_been_ready:
            raise PeerError(f"{self._key} is {self._mode!r}, and the standby ended: {reason}")
        window_s, most = self._section.restart_window_s, self._section.max_restarts
        self._failures = [at for at in self._failures if now_s - at < window_s] + [now_s]
        num_in_window, num_never_ready = len(self._failures), self._num_never_ready
        if has_reported and self._mode == "auto":
            self._off_reason = reason
        elif max(num_in_window, num_never_ready) > most:
            when = f"within {window_s:g} s" if num_in_window > most else "before it was ready"
            self._off_reason = (
                f"it ended {max(num_in_window, num_never_ready)} times {when}, the limit is {most} restarts; the last "
                f"time: {reason}"
            )
        else:
            delay_s = RETRY_S * 2 ** (num_in_window - 1)
            log.warning("the standby has ended", role=self._name, pid=pid, reason=reason, delay_s=delay_s)
            await asyncio.sleep(delay_s)


class Spares:
    """The present spares of several standbys, which change while one iterates again."""

    def __init__(self, standbys: Sequence[Standby]) -> None:
        self._standbys = standbys

    def __iter__(self) -> Iterator[Child]:
        return iter([each.spare for each in self._standbys if each.spare is not None])
