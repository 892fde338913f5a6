"""`DenseReplacer`: replaces the dense worker by a new one; streams only see a pause.

    the old one serves → start the new one in standby → compare weights → the old one leaves at a step boundary, its
    sequences stay with the attention worker → the new one takes over, and computes a token → the old one stops

A failure before the last arrow is undone: the new worker stops, and the old one, which has kept its weights, continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog

from services.common.child_options import ChildOptions
from services.common.config import Config, load_config
from services.common.errors import CapacityError, ConfigError, InvalidRequest, PeerError, RolledBack, TwostrokeError
from services.launch.child import DENSE_ROLE, Child, MakeChild, dense_stub
from services.launch.children import Children
from services.launch.standby import Standby
from services.launch.switched_address import SwitchedAddress
from services.pb import (
    attn_pb2,
    attn_pb2_grpc,
    dense_pb2,
    dense_pb2_grpc,
    sampling_pb2,
    sequence_pb2,
    source_pb2,
)
from services.pb.launch_pb2 import ReplaceDenseRequest
from services.rpc.client import open_channel, read_peer_tls
from services.rpc.server import uninterrupted
from services.rpc.start_deadline import StartDeadline

log = structlog.get_logger()

OpenRequests: TypeAlias = ReplaceDenseRequest.OpenRequests
SECTIONS = ("dense", "model")  # sections of the config that may differ
RESERVED = "dense.address"  # the launcher's own
ERROR_GRACE_S = 3.0
MOST_URGENT = -(2**31)
TOKEN_ID = 0  # every vocabulary has it
SOURCE = "source"  # the feature that reads the input of an encoder
EXAMPLE_HASH = "00" * 32  # of an input that nobody else has


@dataclass(frozen=True, slots=True)
class Replacement:
    """The result of a replacement."""

    pid: int
    pause_ms: float  # from asking the old one to leave until the new one was attached
    backend: str
    has_other_weights: bool


class DenseReplacer:
    """One replacement at a time. `make_child(name, role, config, options)` makes the new one; `children` change.

    After a call to the new worker fails, the worker gets `error_grace_s` to end, so that its own error can be reported.
    """

    def __init__(
        self,
        children: Children,
        dense_address: SwitchedAddress,
        attention_address: str | None,
        make_child: MakeChild,
        standby: Standby,
        error_grace_s: float = ERROR_GRACE_S,
    ) -> None:
        """attention_address: None if the model needs no attention worker"""
        self._children = children
        self._dense_address = dense_address
        self._attention_address = attention_address
        self._make_child = make_child
        self._standby = standby
        self._error_grace_s = error_grace_s
        self._task: asyncio.Task[Any] | None = None  # the running replacement
        self._num_started = 0

    async def replace(
        self,
        overrides: Sequence[str],
        *,
        drops_caches: bool,
        keeps_caches: bool = False,
        open_requests: OpenRequests = ReplaceDenseRequest.OPEN_REQUESTS_UNSPECIFIED,
        wait_timeout_s: float = 0.0,
    ) -> Replacement:
        """Replaces the worker. Raises `RolledBack`; before any attempt `InvalidRequest` or `ConfigError`.

        `open_requests` says what becomes of them when other weights come; with WAIT they have `wait_timeout_s` to end.

        With `keeps_caches` the new worker states the present weights' hash instead of its own, so the attention worker
        and gateways see no change. The attention worker still refuses a model of another shape.
        """
        if drops_caches and keeps_caches:
            raise InvalidRequest("drop_caches and keep_caches exclude each other")
        [old] = self._children.of_role(DENSE_ROLE)
        if (count := old.config.dense.num_ranks) > 1:
            raise InvalidRequest(f"there are {count} ranks: only a single one can be replaced")
        accepts_others = drops_caches or open_requests != ReplaceDenseRequest.OPEN_REQUESTS_UNSPECIFIED
        wait_s = wait_timeout_s if open_requests == ReplaceDenseRequest.WAIT else None
        if self._task is not None:
            raise RolledBack("another replacement is under way")
        config = self._configure(old, overrides)
        self._task = asyncio.current_task()
        try:
            # While the old one starts or attaches, a second one would only make its streams wait longer.
            present_hash = await self._present_hash(old)
            self._num_started += 1
            options = ChildOptions(
                standby="loaded",
                has_predecessor=True,
                stated_weights_hash=present_hash if keeps_caches else None,
                continues_sequences=open_requests in (ReplaceDenseRequest.KEEP, ReplaceDenseRequest.WAIT),
            )
            async with self._standby.suspended(is_taken=not overrides and not keeps_caches) as new:
                if new is None:
                    try:
                        new = self._make_child(f"{DENSE_ROLE}-{self._num_started}", DENSE_ROLE, config, options)
                    except OSError as error:  # its file of configuration cannot be written: the disk is full
                        reason = f"the new dense worker cannot be started: {error}"
                        raise RolledBack(f"{reason}; nothing was changed") from error
                    new.start()
                return await self._replace(old, new, accepts_others=accepts_others, wait_s=wait_s)
        finally:
            self._task = None

    async def _present_hash(self, old: Child) -> str:
        """The weights' hash of the old worker. Raises `RolledBack` if it does not serve."""
        try:
            async with dense_stub(old) as stub:
                return (await _present_status(old, stub)).weights_hash
        except (TwostrokeError, grpc.aio.AioRpcError) as error:
            raise RolledBack(f"{_describe(error)}; nothing was changed") from error

    async def close(self) -> None:
        """Undoes a running replacement."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _configure(self, old: Child, overrides: Sequence[str]) -> Config:
        if not self._dense_address.can_switch:
            raise ConfigError(
                f"dense.address is {old.config.dense.address}: only a dense worker at a Unix socket can be replaced"
            )
        for override in overrides:
            key = override.partition("=")[0].strip()
            if key.partition(".")[0] not in SECTIONS or key == RESERVED:
                raise InvalidRequest(
                    f"--set {override!r}: only keys of the sections {' and '.join(SECTIONS)} can change, "
                    f"and not {RESERVED}"
                )
        own = f'dense.address="{self._dense_address.new_address()}"'
        try:
            return load_config(old.config_file, [*overrides, own])
        except ConfigError as error:
            raise InvalidRequest(str(error)) from error

    async def _replace(
        self, old: Child, new: Child, *, accepts_others: bool, wait_s: float | None
    ) -> Replacement:
        log.info("replacing the dense worker", old_pid=old.pid)
        timeout_s = new.config.launch.start_timeout_s
        try:
            async with dense_stub(old) as old_stub, dense_stub(new) as new_stub:
                loading = StartDeadline(timeout_s).wait_loaded(new_stub, "the new dense worker")
                loaded = await self._or_end(loading, new)
                present = await _present_status(old, old_stub)
                _check_weights(present.weights_hash, loaded.weights_hash, accepts_others=accepts_others)
                if wait_s is not None:
                    await _drain(old_stub, wait_s)
                pause_ms, backend = await self._switch(old, old_stub, new, new_stub)
                new.leave_standby(old)  # before anything else: it may die at any time from now on
        except BaseException as error:
            await new.end()
            reason = _describe(error)
            log.error("the dense worker was not replaced", reason=reason, pid=old.pid)
            if isinstance(error, TwostrokeError | grpc.aio.AioRpcError | OSError):
                raise RolledBack(f"{reason}; the present dense worker, process {old.pid}, goes on") from error
            raise
        self._children.replace(old, new)
        old.stop()
        await uninterrupted(old.wait(old.config.launch.stop_grace_s))  # nothing else would kill it
        assert new.pid is not None
        log.info("dense worker replaced", pid=new.pid, backend=backend, pause_ms=round(pause_ms, 1))
        return Replacement(new.pid, pause_ms, backend, present.weights_hash != loaded.weights_hash)

    async def _switch(
        self,
        old: Child,
        old_stub: dense_pb2_grpc.DenseWorkerStub,
        new: Child,
        new_stub: dense_pb2_grpc.DenseWorkerStub,
    ) -> tuple[float, str]:
        """Switches the workers; returns the pause in milliseconds and the new backend. A failure is undone."""
        point_back = self._dense_address.prepare(old.config.dense.address)  # the disk may be full by then
        # Done before the streams end, so that gateways reconnect to the new worker.
        self._dense_address.point_to(new.config.dense.address)
        old.retire()  # if it restarted now, it would replace the new one
        begin = time.monotonic()
        try:
            timeout_s = old.config.channel.wait_timeout_s + old.config.peers.rpc_timeout_s  # a step and an answer
            keys = "channel.wait_timeout_s and peers.rpc_timeout_s"
            with _names_limit(f"the present dense worker, process {old.pid}, has not left", timeout_s, keys):
                await old_stub.Leave(dense_pb2.LeaveRequest(), timeout=timeout_s)
            take_over = new_stub.TakeOver(dense_pb2.TakeOverRequest(), timeout=timeout_s)
            with _names_limit(f"the new dense worker, process {new.pid}, has not taken over", timeout_s, keys):
                await self._or_end(take_over, new)
            pause_ms = 1e3 * (time.monotonic() - begin)
            info = await self._or_end(self._check_service(new, new_stub), new)
        except BaseException:
            point_back()
            await new.end()  # before the old one attaches, since they would replace each other
            await self._bring_back(old, old_stub)
            raise
        return pause_ms, info.backend

    async def _check_service(self, new: Child, stub: dense_pb2_grpc.DenseWorkerStub) -> dense_pb2.DenseInfo:
        """Raises `PeerError` if the attached new worker cannot serve."""
        timeout_s = new.config.peers.rpc_timeout_s
        with _names_limit(f"the new dense worker, process {new.pid}, has not answered", timeout_s):
            info = await stub.GetInfo(dense_pb2.GetInfoRequest(), timeout=timeout_s)
        if self._attention_address is not None:
            await self._check_steps(self._attention_address, new, stub, info)
        return info

    async def _check_steps(
        self, attention_address: str, new: Child, stub: dense_pb2_grpc.DenseWorkerStub, info: dense_pb2.DenseInfo
    ) -> None:
        """Raises `PeerError` if the attention worker runs no step."""
        peers = new.config.peers
        timeout_s = peers.rpc_timeout_s
        async with open_channel(attention_address, peers.max_message_bytes, read_peer_tls(peers)) as channel:
            attention = attn_pb2_grpc.AttentionWorkerStub(channel)
            request = attn_pb2.GetStatusRequest()
            with _names_limit("the attention worker has not answered", timeout_s):
                before = await attention.GetStatus(request, timeout=timeout_s, wait_for_ready=True)
            if not await compute_one_token(stub, info, timeout_s):  # sequences of gateways may fill all steps
                with _names_limit("the attention worker has not answered", timeout_s):
                    after = await attention.GetStatus(request, timeout=timeout_s)
                if after.num_steps == before.num_steps:
                    raise PeerError(f"the new dense worker has completed no step within {timeout_s:g} s")

    async def _or_end(
        self, work: Coroutine[Any, Any, Any] | grpc.aio.UnaryUnaryCall, new: Child
    ) -> Any:
        """The result of `work`. If the new worker ends first, raises the worker's last error."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, new.watching], return_when=asyncio.FIRST_COMPLETED)
            # Both may be done: the launcher must not keep a worker whose end it has taken note of.
            if not new.watching.done() and not isinstance(task.exception(), grpc.aio.AioRpcError | PeerError):
                return task.result()
            await asyncio.wait([new.watching], timeout=self._error_grace_s)
            if new.watching.done():
                raise PeerError(f"the new dense worker ended: {new.last_end}") from new.watching.exception()
            return await task
        finally:
            task.cancel()

    async def _bring_back(self, old: Child, stub: dense_pb2_grpc.DenseWorkerStub) -> None:
        old.undo_retire()
        if old.watching.done():
            self._children.start(old)  # it died in standby
            return
        timeout_s = old.config.peers.connect_timeout_s
        try:
            await stub.TakeOver(dense_pb2.TakeOverRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            log.error("the old dense worker does not come back", reason=_describe(error), pid=old.pid)
            await old.kill_hanging("it does not take over again")  # after a restart it attaches by itself


async def _present_status(old: Child, stub: dense_pb2_grpc.DenseWorkerStub) -> dense_pb2.DenseStatus:
    # A single attempt to connect may take a busy worker too long.
    timeout_s = old.config.peers.rpc_timeout_s
    with _names_limit(f"the present dense worker, process {old.pid}, has not answered", timeout_s):
        status = await stub.GetStatus(dense_pb2.GetStatusRequest(), timeout=timeout_s, wait_for_ready=True)
    if status.state != dense_pb2.DenseStatus.SERVING:
        state = dense_pb2.DenseStatus.State.Name(status.state).lower()
        raise PeerError(f"the present dense worker does not serve now: it is {state}")
    return status


@contextlib.contextmanager
def _names_limit(what: str, timeout_s: float, keys: str = "peers.rpc_timeout_s") -> Iterator[None]:
    """Turns the end of a call by its time limit, set by `keys`, into a `PeerError` that names the limit."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise PeerError(f"{what} within {timeout_s:g} s, the limit ({keys})") from error


async def _drain(stub: dense_pb2_grpc.DenseWorkerStub, timeout_s: float) -> None:
    """Lets the running requests end; no other one is started then."""
    request = dense_pb2.DrainRequest(timeout_ms=round(1000 * timeout_s))
    await stub.Drain(request, timeout=timeout_s + ERROR_GRACE_S)


def _check_weights(present: str, loaded: str, *, accepts_others: bool) -> None:
    if present != loaded and not accepts_others:
        raise RolledBack(
            f"the new dense worker has other weights, {loaded[:16]} and not {present[:16]}: keys and values of the "
            "present ones are of no use to it. --open-requests says what becomes of the requests under way. "
            "--keep-caches goes on with them, for another precision of the same model"
        )


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


async def compute_one_token(
    dense: dense_pb2_grpc.DenseWorkerStub, info: dense_pb2.DenseInfo, timeout_s: float
) -> bool:
    """Runs a sequence with priority over those of gateways. Returns whether it ran in time: a worker may be full.

    Raises `PeerError` if the worker breaks.
    """
    spec = sequence_pb2.SequenceSpec(
        request_id="probe-of-the-launcher",
        prompt_token_ids=[TOKEN_ID],
        sampling=sampling_pb2.SamplingParams(temperature=0.0),
        max_tokens=1,
        priority=MOST_URGENT,
    )
    if info.num_example_rows:
        spec.source.CopyFrom(sequence_pb2.SourceRef(hash=EXAMPLE_HASH, num_rows=info.num_example_rows))
        spec.features[SOURCE] = source_pb2.Source(example=True).SerializeToString()
    submit = dense_pb2.Submit(seq_id=secrets.randbits(64), spec=spec)
    call = dense.Connect()
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(dense_pb2.GatewayMessage(submit=submit))
            async for output in call:
                if output.HasField("farewell"):
                    raise PeerError(f"it ended the stream: {output.farewell.reason}")
                for end in output.ended:
                    if end.status_code == CapacityError.status_code.value[0]:
                        return False
                    if end.reason == dense_pb2.SequenceEnd.ERROR:
                        raise PeerError(f"it failed a sequence: {end.message}")
                    return True
        raise PeerError("it ended the stream")
    except TimeoutError:
        return False
    except grpc.aio.AioRpcError as error:
        raise PeerError(f"{error.code().name}: {error.details()}") from error
    finally:
        call.cancel()
