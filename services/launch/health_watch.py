"""`HealthWatch`: finds a service that makes no progress and kills it, so that it is restarted.

    it does not answer its health check               → kill only it: the others may just wait for it
    it is stalled in its own computation              → kill it
    it is stalled waiting for the other worker,       → kill the dense worker, which costs no KV cache;
    which is stalled too, or reports nothing            if that does not help, kill both, but no attention worker
                                                        that has computed a token since then

A process that has not served yet may be silent while it loads or builds: for several times the slowest start of its
role so far, and, until the server has started, as long as `launch.start_timeout_s`. The time that it, or the launcher,
waits for a CPU is no silence: on a busy machine both go on, only later.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.channel import Flag
from services.channel.region import unread_flags_of
from services.common.errors import ConfigError
from services.common.process import cpu_wait_s
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE, Child
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc, stall_pb2
from services.rpc.server import run_together
from services.rpc.watchdog import describe_stall

log = structlog.get_logger()

CHECKS_PER_BOUND = 5
LOOK_S = 0.5  # how often to look whether a process that starts serves
START_FACTOR = 4.0  # a start may be this much slower than the slowest one before
MIN_MISSED = 3  # missed checks before a kill, since the launcher itself may have been stopped


@dataclass(slots=True)
class HealthRecord:
    """The record of one process."""

    first_seen_at: float = field(default_factory=time.monotonic)
    answered_at: float = field(default_factory=time.monotonic)  # time of the last answer, or of the first check
    num_missed: int = 0  # missed checks since then
    has_served: bool = False
    stall: stall_pb2.Stall | None = None  # the stall that it reports
    waited_before_s: float = 0.0  # for a CPU, of this process and the launcher together, until the first missed check
    waited_s: float = 0.0  # since then
    num_tokens: int = 0  # of completed steps, if it is an attention worker; a step may only close sequences
    num_tokens_before: int | None = None  # when the dense worker was ended last, if it was

    def note_answer(self) -> None:
        """It has answered now."""
        self.num_missed, self.waited_s, self.answered_at, self.stall = 0, 0.0, time.monotonic(), None

    def note_missed(self, pid: int) -> None:
        """It has missed a check."""
        waited_s = cpu_wait_s(pid) + cpu_wait_s(os.getpid())
        if not self.num_missed:
            self.waited_before_s = waited_s
        self.num_missed += 1
        self.waited_s = waited_s - self.waited_before_s


class HealthWatch:
    """Watches some of the launcher's children."""

    def __init__(self, children: Callable[[], Iterable[Child]], stall_timeout_s: float, start_timeout_s: float) -> None:
        """`children` returns those that are watched now. `stall_timeout_s`: how long they may be silent or stalled."""
        self._children = children
        self._stall_timeout_s = stall_timeout_s
        self._start_timeout_s = start_timeout_s
        self._records: dict[int, HealthRecord] = {}  # by process id
        self._start_s: dict[str, float] = {}  # seconds of the slowest start until it served, by role
        self._dense_ended_at = float("-inf")

    async def run(self) -> None:
        """Watches until cancelled."""
        await run_together(self._check_all(), self._look_for_starts())

    async def _look_for_starts(self) -> None:
        """Notes soon that a process serves: if it hangs then, it has no more the time of a start."""
        while True:
            await asyncio.sleep(LOOK_S)
            children = [child for child in self._children() if child.is_running and child.pid is not None]
            records = [(child, self._records.setdefault(child.pid, HealthRecord())) for child in children]
            starting = (self._check(*each, is_look=True) for each in records if not each[1].has_served)
            await asyncio.gather(*starting)

    async def _check_all(self) -> None:
        while True:
            await asyncio.sleep(self._stall_timeout_s / CHECKS_PER_BOUND)
            children = {child.pid: child for child in self._children() if child.is_running and child.pid is not None}
            self._records = {pid: self._records.get(pid) or HealthRecord() for pid in children}
            await asyncio.gather(*(self._check(child, self._records[pid]) for pid, child in children.items()))
            records = [(child, self._records[pid]) for pid, child in children.items() if child.pid == pid]
            culprits = self.find_culprits(records, time.monotonic())
            for child, reason in culprits:
                handoffs = _unread_handoffs(child.pid)
                what = "restarting a service that makes no progress"
                log.error(what, role=child.role, reason=reason, unread_handoffs=handoffs)
            await asyncio.gather(*(child.kill_hanging(reason) for child, reason in culprits))

    def note_started(self) -> None:
        """Notes that all children serve, as somebody else has seen: one may hang before its first check."""
        for child in self._children():
            if child.is_running and child.pid is not None:
                record = self._records.setdefault(child.pid, HealthRecord())
                record.note_answer()
                self._note_serving(child.role, record)

    def _note_serving(self, role: str, record: HealthRecord) -> None:
        if not record.has_served:
            record.has_served = True
            self.note_start(role, record.answered_at - record.first_seen_at)

    def note_start(self, role: str, start_s: float) -> None:
        """Notes that a process of a role serves, `start_s` seconds after its first check."""
        self._start_s[role] = max(start_s, self._start_s.get(role, 0.0))

    def find_culprits(self, records: Sequence[tuple[Child, HealthRecord]], now: float) -> list[tuple[Child, str]]:
        """The services to kill, with the reasons; `now` is on the monotonic clock."""
        silent = []
        for child, record in records:
            bound_s, silent_s = self._stall_timeout_s, now - record.answered_at - record.waited_s
            if not record.has_served:
                start_s = self._start_s.get(child.role)
                usual_s = self._start_timeout_s if start_s is None else bound_s + START_FACTOR * start_s
                bound_s = max(bound_s, min(usual_s, self._start_timeout_s))
            if silent_s > bound_s and record.num_missed >= MIN_MISSED:
                silent.append((child, f"no answer to {record.num_missed} health checks in {silent_s:.1f} s"))
        if silent:
            return silent
        stalls = [(child, record.stall) for child, record in records if record.stall is not None]
        computing = [(child, describe_stall(stall)) for child, stall in stalls if not stall.waits_for]
        if computing and {child.role for child, _ in computing} != {DENSE_ROLE}:
            return computing
        roles = {child.role for child, _ in stalls}
        lone_wait_s = max((stall.stalled_s for _, stall in stalls), default=0.0)
        if any(record.has_served and record.num_missed >= MIN_MISSED for _, record in records):
            return []  # others may wait for a process that has stopped, whose time is over soon
        # If only one is stalled, it waits for a lost answer, or noticed the stall a little earlier than the other.
        if computing or {DENSE_ROLE, ATTENTION_ROLE} <= roles or lone_wait_s > 2 * self._stall_timeout_s:
            return self._blame_dense(records, stalls, now)
        return []

    def _blame_dense(
        self, records: Sequence[tuple[Child, HealthRecord]], stalls: Sequence[tuple[Child, stall_pb2.Stall]], now: float
    ) -> list[tuple[Child, str]]:
        """Chooses the dense worker. On GPUs it cannot tell computing from waiting, so it is chosen there too."""
        since_s = now - self._dense_ended_at
        if since_s < self._stall_timeout_s:  # another launcher has the dense worker, and is ending it
            return []
        is_again = since_s < 4 * self._stall_timeout_s
        self._dense_ended_at = now
        reason = "; ".join(describe_stall(stall) for _, stall in stalls)
        culprits = []
        for child, record in records:
            was_helped = record.num_tokens_before is not None and record.num_tokens > record.num_tokens_before
            record.num_tokens_before = record.num_tokens
            if child.role == DENSE_ROLE or (child.role == ATTENTION_ROLE and is_again and not was_helped):
                culprits.append((child, reason))
        return culprits

    async def _check(self, child: Child, record: HealthRecord, *, is_look: bool = False) -> None:
        """Checks the health of one service, and reads its stall if it does not serve. `is_look`: only whether it does.
        """
        timeout_s = self._stall_timeout_s / CHECKS_PER_BOUND
        try:
            opened = child.open_channel()
        except ConfigError as error:  # the TLS files are being replaced, which is no fault of the running service
            log.error("cannot ask a service for its health", role=child.role, reason=str(error))
            return
        async with opened as channel:
            try:
                check = health_pb2_grpc.HealthStub(channel).Check
                reply = await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError:
                if not is_look:
                    record.note_missed(child.pid or 0)
                return
            if is_look and reply.status != health_pb2.HealthCheckResponse.SERVING:
                return
            record.note_answer()
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                self._note_serving(child.role, record)
                if child.role != ATTENTION_ROLE:
                    return
            try:
                status = await _read_status(child.role, channel, timeout_s)
            except grpc.aio.AioRpcError as error:  # it cannot report yet
                log.debug("no status", role=child.role, reason=error.details())
                return
            if status is not None and status.HasField("stall"):
                record.stall = status.stall
            if isinstance(status, attn_pb2.AttentionStatus):
                record.num_tokens = status.num_computed_tokens
            if isinstance(status, dense_pb2.DenseStatus) and status.state == dense_pb2.DenseStatus.STANDBY:
                record.has_served = True  # it waits, and has no reason to be silent


def _unread_handoffs(pid: int | None) -> str:
    """The flags of each data region that one worker has set and the other one has not read."""
    unread = {} if pid is None else unread_flags_of(pid)
    return "; ".join(f"{name}: {', '.join(Flag(each).name for each in flags)}" for name, flags in unread.items())


async def _read_status(
    role: str, channel: grpc.aio.Channel, timeout_s: float
) -> dense_pb2.DenseStatus | attn_pb2.AttentionStatus | None:
    if role == DENSE_ROLE:
        dense = dense_pb2_grpc.DenseWorkerStub(channel)
        return await dense.GetStatus(dense_pb2.GetStatusRequest(), timeout=timeout_s)
    if role == ATTENTION_ROLE:
        attention = attn_pb2_grpc.AttentionWorkerStub(channel)
        return await attention.GetStatus(attn_pb2.GetStatusRequest(), timeout=timeout_s)
    return None  # a gateway's stall is caused by the dense worker
