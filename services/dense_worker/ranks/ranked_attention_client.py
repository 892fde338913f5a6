"""`RankedAttentionClient`: an `AttentionClient` of several ranks, of which each has an attention worker and a shard.

It attaches to all attention workers, and lets each other rank's shard map the data region of its own one: no seam
crosses ranks. Plans go to all attention workers, and their answers are merged. When any of these processes goes, the
attachment ends for all; caches stay, and a new attachment joins them again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import PeerSection
from services.common.errors import ConfigError, DeviceError, PeerError, RequestAborted, StaleEpoch
from services.common.rank import Rank
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.engine.attention_client import (
    TRANSIENT,
    AttachmentWatcher,
    AttachOptions,
    AttentionClient,
    AttentionListener,
    Ended,
    attach_request,
    describe_cache,
    execute,
    receive_answers,
)
from services.dense_worker.ranks.group import RankGroup
from services.dense_worker.ranks.join_group import RankStore, join_groups
from services.dense_worker.ranks.leading_backend import LeadingRanks
from services.dense_worker.ranks.rank_answers import RankAnswers, Reopening
from services.lora.adapter import Adapter, encode_adapter
from services.pb import attn_pb2, attn_pb2_grpc, shard_pb2, shard_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls
from services.rpc.error_details import error_of
from services.rpc.server import run_together
from services.step import PlanAccepted, SequenceOpened, StepPlan
from services.step.codec import encode_plan

# A shard that answers an adapter's load with one of these is sound: what the adapter is, or its size, is the reason.
_REFUSALS = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
# How long ranks can still read why they do not meet. Then those are released that wait in a library, for a dead one.
_REASON_STAYS_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OtherRank:
    """Where the processes of another rank are, and what its attention worker is asked for."""

    attention_address: str
    shard_address: str
    options: AttachOptions


@dataclass(slots=True, eq=False)
class _Serving:
    """What belongs to one attachment."""

    replies: Sequence[attn_pb2.AttachReply]  # by rank
    attachment_id: int  # for the shards
    answers: RankAnswers
    loads: set[asyncio.Task[Any]] = field(default_factory=set)  # of adapters, by shards
    has_ended: bool = False


class RankedAttentionClient(AttentionClient):
    """Has the first rank's attention worker itself."""

    def __init__(
        self,
        address: str,
        options: AttachOptions,
        peers: PeerSection,
        may_attach: asyncio.Event,
        rank: Rank,
        others: Sequence[OtherRank],
        report_loading: Callable[[str], None],
    ) -> None:
        """`rank`: the first one. `report_loading` gets what shards report that load; empty: none is waited for."""
        super().__init__(address, options, peers, may_attach)
        tls, max_bytes = read_peer_tls(peers), peers.max_message_bytes
        self._rank = rank
        self._all_options = [options, *(each.options for each in others)]
        attention = [open_channel(each.attention_address, max_bytes, tls) for each in others]
        shards = [open_channel(each.shard_address, max_bytes, tls) for each in others]
        self._others = (*attention, *shards)
        self._attention_stubs = [self._stub, *map(attn_pb2_grpc.AttentionWorkerStub, attention)]
        self._shard_stubs = [shard_pb2_grpc.DenseShardStub(channel) for channel in shards]
        self._shard_addresses = [each.shard_address for each in others]
        named = {"the attention worker of rank 0": self._grpc}
        named |= {f"the attention worker of rank {rank}": each for rank, each in enumerate(attention, 1)}
        named |= {f"the dense shard of rank {rank}": each for rank, each in enumerate(shards, 1)}
        self._health_stubs = {who: health_pb2_grpc.HealthStub(channel) for who, channel in named.items()}
        self._report_loading = report_loading
        self._loading: dict[int, str] = {}  # what shards have reported that load, by rank
        self._serving: _Serving | None = None
        self._store: RankStore | None = None  # of the present groups, which may still use it
        self._given_up: dict[asyncio.Future[Sequence[RankGroup]], float] = {}  # meetings in threads, and since when

    async def run(self, listener: AttentionListener, watcher: AttachmentWatcher) -> None:
        try:
            await super().run(listener, watcher)
        finally:
            for channel in self._others:
                await channel.close()

    @property
    def _attached_stubs(self) -> Sequence[attn_pb2_grpc.AttentionWorkerStub]:
        return self._attention_stubs

    async def _attach_once(self) -> Attachment:
        await self._check_health()
        asked = zip(self._attention_stubs, self._all_options, strict=True)
        replies = await _all_or_none(self._ask_to_attach(rank, *each) for rank, each in enumerate(asked))
        _check_alike(replies)
        attachment = self._map(replies[0])
        try:
            _tie(attachment, replies)
            attachment_id = secrets.randbits(64)
            groups = await self._meet(attachment_id, replies)
            try:
                for channel in attachment.channels.values():
                    channel.check()  # what has died before the seams were tied is found here
            except PeerError:
                _abort(groups)
                raise
        except BaseException:
            attachment.abort()
            attachment.close()
            raise
        caches = [describe_cache(each) for each in replies]
        open_blocks = [each.orphaned_blocks for each in caches]
        orphaned = {seq_id: max(each.get(seq_id, 0) for each in open_blocks) for seq_id in set().union(*open_blocks)}
        serving = _Serving(replies, attachment_id, RankAnswers([each.num_free_blocks for each in caches]))
        self._serving = serving
        cache = replace(  # as if all ranks had one
            caches[0],
            num_blocks=min(each.num_blocks for each in caches),
            num_free_blocks=serving.answers.num_free_blocks,
            orphaned_blocks=orphaned,
            prefix_generation=max(each.prefix_generation for each in caches),
        )
        return replace(
            attachment,
            caches=(cache,),
            max_model_len=min(each.max_model_len for each in replies),
            layer_window=min((each.layer_window for each in replies if each.HasField("layer_window")), default=None),
            ranks=self._lead(groups, serving),
        )

    async def _check_health(self) -> None:
        """Raises `PeerError` if a process of a rank is not ready, before anything is asked of the others."""
        try:
            await _all_or_none(self._check_ready(*each) for each in self._health_stubs.items())
        except PeerError:
            await asyncio.gather(*(self._note_loading(*each) for each in enumerate(self._shard_stubs, 1)))
            raise
        self._loading.clear()
        self._report_loading("")

    async def _note_loading(self, rank: int, stub: shard_pb2_grpc.DenseShardStub) -> None:
        """A shard that loads extends the time that it has."""
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may not listen yet
            status = await stub.GetStatus(shard_pb2.GetShardStatusRequest(), timeout=self._rpc_timeout_s)
            if status.loading and status.loading != self._loading.get(rank):
                self._loading[rank] = status.loading
                line = f"rank {rank}: {status.loading}"  # of one rank: there are few such lines
                self._deadline.note_progress(line)
                self._report_loading(line)

    async def _check_ready(self, who: str, stub: health_pb2_grpc.HealthStub) -> None:
        with _naming(who):
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._rpc_timeout_s)
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            raise PeerError(f"{who} is not ready")

    async def _ask_to_attach(
        self, rank: int, stub: attn_pb2_grpc.AttentionWorkerStub, options: AttachOptions
    ) -> attn_pb2.AttachReply:
        with _naming(f"the attention worker of rank {rank}"):
            return await stub.Attach(attach_request(options), timeout=self._connect_timeout_s)

    @property
    def _absence(self) -> str:
        return "the ranks have not met"

    async def _meet(self, attachment_id: int, replies: Sequence[attn_pb2.AttachReply]) -> Sequence[RankGroup]:
        """Lets all shards join, and meets them. Raises `PeerError`, or `ConfigError` if one refuses.

        A library that connects ranks may wait for one that has died, without a bound, and nothing releases its thread.
        Raises `DeviceError` if an earlier one is still not back: only the end of the process ends it.
        """
        bound_s = 2 * self._options.wait_timeout_s  # twice what gloo's own connection may take
        self._given_up = {each: when for each, when in self._given_up.items() if not each.done()}
        if self._given_up and (waited_s := time.monotonic() - min(self._given_up.values())) > bound_s:
            raise DeviceError(
                f"connecting the ranks has not ended {waited_s:.1f} s after it was given up, the limit"
                f" (twice channel.wait_timeout_s) is {bound_s:g} s: this process must start again"
            )
        store = RankStore.create()
        options = self._options
        arguments = options.device, store, self._rank, options.num_lanes, options.wait_timeout_s
        meeting = _in_thread(join_groups, *arguments)
        joins = [
            self._join(rank, attachment_id, replies[rank], store.port) for rank in range(1, len(self._shard_stubs) + 1)
        ]
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                groups, *_ = await _all_or_none([asyncio.shield(meeting), *joins])
        except BaseException as error:
            store.fail(str(error) or "the first rank stops")
            asyncio.get_running_loop().call_later(_REASON_STAYS_S, store.close)
            self._given_up[meeting] = time.monotonic()
            meeting.add_done_callback(_abort_met)
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"they have not been connected within {self._connect_timeout_s:g} s (peers.connect_timeout_s)"
                ) from error
            raise
        self._store = store
        return groups

    async def _join(self, rank: int, attachment_id: int, seam: attn_pb2.AttachReply, store_port: int) -> None:
        request = shard_pb2.JoinRequest(
            weights_hash=self._options.weights_hash,
            rank=rank,
            num_ranks=self._rank.count,
            attachment_id=attachment_id,
            seam=seam,
            store_port=store_port,
        )
        try:
            await self._shard_stubs[rank - 1].Join(request, timeout=self._connect_timeout_s)
        except grpc.aio.AioRpcError as error:
            # A shard finds its seam stale when its attention worker has been started again.
            may_succeed = error.code() in TRANSIENT or isinstance(error_of(error), StaleEpoch)
            address = self._shard_addresses[rank - 1]
            reason = f"the dense shard of rank {rank} at {address}: {error.code().name}: {error.details()}"
            raise (PeerError if may_succeed else ConfigError)(reason) from error

    def _lead(self, groups: Sequence[RankGroup], serving: _Serving) -> LeadingRanks:
        """What the backend gets. Its commands go the way of plans, in the order in which they are given."""
        loop = asyncio.get_running_loop()

        def send(command: shard_pb2.ShardCommand) -> None:
            attachment = self._attachment
            if attachment is not None and attachment.ranks is ranks:
                self._post(attachment, command)

        def load_adapter(slot: int, adapter: Adapter) -> concurrent.futures.Future[None]:
            return asyncio.run_coroutine_threadsafe(self._load_adapter(serving, slot, adapter), loop)

        ranks = LeadingRanks(groups, send, load_adapter)
        return ranks

    async def _load_adapter(self, serving: _Serving, slot: int, adapter: Adapter) -> None:
        """Cancelled when the attachment ends."""
        task = asyncio.current_task()
        if serving.has_ended or task is None:
            raise asyncio.CancelledError
        serving.loads.add(task)
        try:
            request = shard_pb2.LoadAdapterRequest(
                attachment_id=serving.attachment_id, slot=slot, adapter=encode_adapter(adapter)
            )
            await _all_or_none(self._load_at(rank, request) for rank in range(1, self._rank.count))
        finally:
            serving.loads.discard(task)

    async def _load_at(self, rank: int, request: shard_pb2.LoadAdapterRequest) -> None:
        """Raises `RequestAborted` if the shard cannot load the adapter."""
        limit_s = self._connect_timeout_s
        try:
            await self._shard_stubs[rank - 1].LoadAdapter(request, timeout=limit_s)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                # A shard that fails, stops or dies ends the attachment, and this with it.
                await asyncio.sleep(self._rpc_timeout_s)
            reason = error.details() or error.code().name
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                reason = f"not loaded within {limit_s:g} s (peers.connect_timeout_s)"
            raise RequestAborted(f"the dense shard of rank {rank}: {reason}") from error

    async def _serve(self, attachment: Attachment) -> AttachmentEnd:
        serving = self._serving
        assert serving is not None, "it was made with the attachment"
        pairs = zip(self._attention_stubs, serving.replies, strict=True)
        plans = [execute(stub, reply.epoch, reply.attachment_id) for stub, reply in pairs]
        metadata = (("attachment-id", str(serving.attachment_id)),)
        shards = [stub.Run(metadata=metadata) for stub in self._shard_stubs]

        def take(rank: int, answer: SequenceOpened | PlanAccepted) -> None:
            try:
                merged = _merge(serving.answers, rank, answer)
            except PeerError as error:
                raise Ended(AttachmentEnd(str(error), is_crash=True)) from error
            if isinstance(merged, list):
                for each in merged:
                    self._post(attachment, each)
            elif merged is not None:
                self._listener.on_answer(attachment, merged)

        async def send(message: StepPlan | shard_pb2.ShardCommand | Reopening) -> None:
            if isinstance(message, shard_pb2.ShardCommand):
                for call in shards:
                    await call.write(message)
            elif isinstance(message, Reopening):
                await plans[message.rank].write(encode_plan(StepPlan(0, new_sequences=(message.new,))))
            else:
                serving.answers.note_plan(message)
                encoded = encode_plan(message)
                for call in plans:
                    await call.write(encoded)

        try:
            await run_together(
                *(receive_answers(call, partial(take, rank)) for rank, call in enumerate(plans)),
                *(_wait_end(call, rank) for rank, call in enumerate(shards, start=1)),
                self._handle_inbox(attachment, send),
            )
        except Ended as ended:
            return ended.end
        finally:
            attachment.abort()  # the engine may wait for a rank that waits for this one
            serving.has_ended = True
            for load in serving.loads:
                load.cancel()
            for call in (*plans, *shards):
                call.cancel()
        raise AssertionError("the streams' readers end with an error")


def _merge(
    answers: RankAnswers, rank: int, answer: SequenceOpened | PlanAccepted
) -> SequenceOpened | PlanAccepted | list[Reopening] | None:
    if isinstance(answer, PlanAccepted):
        return answers.accepted(rank, answer)
    return answers.opened(rank, answer)


async def _all_or_none(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What all calls return. If one fails, cancels the others, waits for their ends and raises its error."""
    tasks = [asyncio.ensure_future(_awaited(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """As `asyncio.to_thread`, in a thread that does not hold up the end of the process."""
    call: concurrent.futures.Future[T] = concurrent.futures.Future()
    call.set_running_or_notify_cancel()

    def run() -> None:
        try:
            call.set_result(function(*arguments))
        except BaseException as error:
            call.set_exception(error)

    threading.Thread(target=run, name="meeting of ranks", daemon=True).start()
    return asyncio.wrap_future(call)


@contextlib.contextmanager
def _naming(who: str) -> Iterator[None]:
    """Errors of gRPC name the process that was called: `PeerError`, or `ConfigError` if a retry cannot help."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        kind = PeerError if error.code() in TRANSIENT else ConfigError
        raise kind(f"{who}: {error.details() or error.code().name}") from error


async def _awaited(call: Awaitable[T]) -> T:
    return await call


def _abort(groups: Iterable[RankGroup]) -> None:
    for each in groups:
        each.abort()


def _abort_met(meeting: asyncio.Future[Sequence[RankGroup]]) -> None:
    """Nobody wants the groups that the first rank may still have got."""
    if not meeting.cancelled() and meeting.exception() is None:
        _abort(meeting.result())


def _tie(attachment: Attachment, replies: Sequence[attn_pb2.AttachReply]) -> None:
    """Lets all ranks' seams share their fate. Raises `StaleEpoch` if one is gone."""
    for lane, channel in attachment.channels.items():
        channel.tie(each.handle for reply in replies[1:] for each in reply.lanes if each.lane == lane)


def _check_alike(replies: Sequence[attn_pb2.AttachReply]) -> None:
    """Raises `PeerError` if the attention workers' caches cannot have the same plans."""
    for name in ("block_size", "window", "num_sink_tokens"):
        found: list[Any] = [getattr(each, name) for each in replies]
        if found.count(found[0]) < len(found):
            raise PeerError(f"the ranks' attention workers differ in {name}: {', '.join(map(str, found))}")


async def _wait_end(call: grpc.aio.StreamStreamCall, rank: int) -> None:
    """Raises `Ended` when a shard's stream ends."""
    reason = "it has ended its stream"
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name}: {error.details()}"
    raise Ended(AttachmentEnd(f"the dense shard of rank {rank}: {reason}", is_crash=True))
