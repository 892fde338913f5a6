"""`AttentionClient`: attaches to the attention worker, opens sequences there and publishes plans.

It runs on the event loop. The engine thread calls `publish` from outside. On a GPU plans and answers go by a link, past
the event loops of both workers (see `message_link`). Answers go to the `AttentionListener`, whose methods pass them to
the engine thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import grpc
import structlog
import torch

from services.channel import Channel, ChannelSpec
from services.channel.factory import map_channel
from services.channel.message_link import MessageLink
from services.channel.region import shared_memory_id
from services.common.attention.learned import Learned, encode_learned
from services.common.config import PeerSection
from services.common.errors import ConfigError, DeviceError, PeerError, StaleEpoch, TwostrokeError
from services.common.gpu import gpu_uuid
from services.common.kv_cache.format import KVCacheFormat
from services.dense_worker.engine.attachment import AttachedCache, Attachment, AttachmentEnd
from services.pb import attn_pb2, attn_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls
from services.rpc.server import run_together
from services.rpc.start_deadline import StartDeadline
from services.step import PlanAccepted, SequenceOpened, StepPlan
from services.step.codec import decode_answer, encode_plan

log = structlog.get_logger()

_RETRY_S = 0.02  # short, because all streams wait
_MIN_UNREADY = 3  # attachments that may end before they are ready, however long each of them takes
_REASON_S = 0.5  # how long the stream of plans may take to give the reason of an aborted handoff
# A retry may succeed after these; any other status is a refusal. An attention worker that stops cancels its calls.
TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


_Message: TypeAlias = Any  # from the engine: plans as `_serve` sends them, `AttachmentEnd`, or "ready"


class AttentionListener(Protocol):
    """The engine's callbacks; called on the event loop, `on_answer` also on the link's thread."""

    def on_attached(self, attachment: Attachment) -> None: ...
    def on_detached(self, attachment: Attachment, end: AttachmentEnd) -> None: ...
    def on_answer(self, attachment: Attachment, answer: SequenceOpened | PlanAccepted) -> None: ...
    def on_cache_added(
        self,
        attachment: Attachment,
        cache: AttachedCache,
        add_seam: Callable[[], None],
        drop_seam: Callable[[], None],
    ) -> None: ...
    def on_cache_given_up(self, attachment: Attachment, cache_id: int, is_given_up: bool) -> None: ...
    def on_cache_lost(self, attachment: Attachment, cache_id: int, end: AttachmentEnd) -> None: ...


class AttachmentWatcher(Protocol):
    """Informs gateways whether an attention worker is attached; see `GatewayWorker`."""

    async def ready(self, attachment: Attachment) -> None: ...
    async def detached(self, end: AttachmentEnd) -> None: ...


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """The values that this dense worker sends to the attention worker when it attaches."""

    weights_hash: str
    model_fingerprint: str
    max_num_seqs: int
    spec: ChannelSpec
    device: torch.device
    wait_timeout_s: float
    kv_cache_dtype: KVCacheFormat = "model"
    learned: Learned = field(default_factory=Learned)
    is_deterministic: bool = False  # the config's `dense.deterministic`
    num_lanes: int = 1  # the config's `scheduler.num_lanes`
    splits_context: bool = False  # the config's `attention.split_context`
    rehearses: bool = False  # on CPUs that would take a core from those who read the request


class AttentionClient:
    """Keeps one attachment and renews it when it breaks, trying for at most `peers.connect_timeout_s` seconds.

    Before each attachment it waits for `may_attach`, and clears it when another dense worker has attached.
    """

    def __init__(self, address: str, options: AttachOptions, peers: PeerSection, may_attach: asyncio.Event) -> None:
        self._may_attach = may_attach
        self._address = address
        self._options = options
        self._connect_timeout_s = peers.connect_timeout_s
        self._rpc_timeout_s = peers.rpc_timeout_s
        self._max_message_bytes = peers.max_message_bytes
        self._loop = asyncio.get_running_loop()
        self._grpc = open_channel(address, peers.max_message_bytes, read_peer_tls(peers))
        self._stub = attn_pb2_grpc.AttentionWorkerStub(self._grpc)
        self._attachment: Attachment | None = None
        self._deadline = StartDeadline(self._connect_timeout_s)  # of the present attempts to attach
        self._has_been_ready = False  # the present attachment has been
        self._num_unready = 0  # attachments in a row that have not been ready before they ended
        self._unready_until = self._deadline  # they may go on as long
        self._inbox: asyncio.Queue[tuple[Attachment, _Message]] = asyncio.Queue()
        self._listener: AttentionListener  # set by `run`, as the next one
        self._watcher: AttachmentWatcher

    async def run(self, listener: AttentionListener, watcher: AttachmentWatcher) -> None:
        """Attaches, serves until the attachment breaks, and repeats.

        Raises `PeerError` if it cannot attach in time, or if one attachment after the other breaks before it is ready.
        """
        self._listener, self._watcher = listener, watcher
        try:
            while True:
                await self._may_attach.wait()
                attachment = await self._attach()
                self._attachment, self._has_been_ready = attachment, False
                listener.on_attached(attachment)
                end = await self._serve(attachment)
                # The engine knows only that a handoff was aborted. If both workers stop, nobody is to be warned.
                (log.warning if end.is_crash else log.info)("detached", reason=end.reason, is_crash=end.is_crash)
                attachment.abort()
                if end.is_replaced:
                    self._may_attach.clear()  # attaching again would replace the other worker
                listener.on_detached(attachment, end)
                await watcher.detached(end)
                self._check_progress(end)
        finally:
            await self._grpc.close()

    def abort(self) -> None:
        """Releases an engine thread that waits for the attention worker. Called at shutdown."""
        if self._attachment is not None:
            self._attachment.abort()

    async def forget_prefixes(self, generation: int) -> None:
        """Tells those attention workers that are there what the next sequences tell all: see `ForgetPrefixes`."""
        request = attn_pb2.ForgetPrefixesRequest(generation=generation)
        calls = (each.ForgetPrefixes(request, timeout=self._rpc_timeout_s) for each in self._attached_stubs)
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, grpc.aio.AioRpcError):
                log.warning("an attention worker was not told of a flush", reason=error.details())
            elif isinstance(error, BaseException):
                raise error

    @property
    def _attached_stubs(self) -> Sequence[attn_pb2_grpc.AttentionWorkerStub]:
        return [self._stub]

    def ready(self, attachment: Attachment) -> None:
        """Reports that the engine can run steps. Called on the engine thread; never blocks."""
        if attachment is self._attachment:
            self._has_been_ready = True
        self._post(attachment, "ready")

    def publish(self, attachment: Attachment, plan: StepPlan) -> None:
        """Sends a plan. Called on the engine thread; never blocks."""
        if attachment.link is None:
            self._post(attachment, plan)
            return
        try:
            attachment.link.send(encode_plan(plan).SerializeToString())
        except PeerError as error:
            log.debug("a plan could not be sent", reason=str(error))  # the end of `Execute` gives the reason
            self._lose_link(attachment, error)

    def drop(self, attachment: Attachment, end: AttachmentEnd) -> None:
        """Gives up the attachment; a new one follows. Called on the engine thread; never blocks."""
        self._post(attachment, end)

    def release(self, attachment: Attachment, cache_id: int) -> None:
        """A KV cache that was given up is empty. Called on the engine thread; never blocks."""
        raise AssertionError("a single attention worker is not given up")

    def keep(self, attachment: Attachment, cache_id: int, reason: str) -> None:
        """A KV cache that was given up must stay. Called on the engine thread; never blocks."""
        raise AssertionError("a single attention worker is not given up")

    def forget(self, attachment: Attachment, cache_id: int) -> None:
        """The engine plans nothing any more for a KV cache that has gone. Called on the engine thread."""
        raise AssertionError("a single attention worker goes with its attachment")

    def _post(self, attachment: Attachment, message: _Message) -> None:
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, (attachment, message))

    async def _attach(self) -> Attachment:
        self._deadline = StartDeadline(self._connect_timeout_s)
        while True:
            try:
                return await self._attach_once()
            except (ConfigError, DeviceError):
                raise  # a retry cannot succeed
            except (grpc.aio.AioRpcError, TwostrokeError) as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() not in TRANSIENT:
                    raise ConfigError(f"attention worker at {self._address} refused: {error.details()}") from error
                if self._deadline.remaining_s <= 0:
                    reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                    raise PeerError(f"{self._absence} within {self._connect_timeout_s} s: {reason}") from error
                await asyncio.sleep(_RETRY_S)

    def _check_progress(self, end: AttachmentEnd) -> None:
        if self._has_been_ready or not end.is_crash:
            self._num_unready = 0
            return
        self._num_unready += 1
        if self._num_unready == 1:
            self._unready_until = StartDeadline(self._connect_timeout_s)
        if self._num_unready >= _MIN_UNREADY and self._unready_until.remaining_s <= 0:
            raise PeerError(
                f"{self._num_unready} attachments in a row have ended before they were ready, in over"
                f" {self._connect_timeout_s:g} s (peers.connect_timeout_s), the last one because: {end.reason}. This"
                " process must start again; if that does not help, the other workers, whose logs say more"
            )

    @property
    def _absence(self) -> str:
        """What is said of attempts to attach that end without success."""
        return f"no attention worker at {self._address}"

    async def _attach_once(self) -> Attachment:
        """Raises an error of gRPC, or what `map_channels` raises."""
        request = attach_request(self._options)
        request.takes_plan_link = True
        reply = await self._stub.Attach(request, timeout=self._connect_timeout_s)
        return self._map(reply)

    def _map(self, reply: attn_pb2.AttachReply) -> Attachment:
        channels = map_channels(reply, self._options.spec, self._options.device, self._options.wait_timeout_s)
        link = self._connect(reply.plan_link) if reply.plan_link else None
        rehearses = link is not None and self._options.rehearses
        return replace(describe_attachment(reply, channels, [describe_cache(reply)]), link=link, rehearses=rehearses)

    def _connect(self, name: str) -> MessageLink | None:
        try:
            return MessageLink.connect(name, self._max_message_bytes)
        except PeerError as error:
            log.warning("plans go by gRPC, which takes longer", reason=str(error))
            return None

    async def _serve(self, attachment: Attachment) -> AttachmentEnd:
        """Runs until the attachment ends; returns the reason."""
        call = execute(self._stub, attachment.epoch, attachment.attachment_id, has_link=attachment.link is not None)
        if attachment.link is not None:
            receive = partial(self._receive_by_link, attachment)
            attachment.link.receive(receive, partial(self._lose_link, attachment))
        try:
            # No TaskGroup: in Python 3.11 it loses a cancellation if one of its tasks fails at the same time.
            await run_together(
                receive_answers(call, lambda answer: self._listener.on_answer(attachment, answer)),
                self._handle_inbox(attachment, lambda plan: call.write(encode_plan(plan))),
            )
        except Ended as ended:
            return ended.end
        finally:
            call.cancel()
        raise AssertionError("the stream's reader ends with an error")

    def _receive_by_link(self, attachment: Attachment, message: bytes) -> None:
        try:
            self._listener.on_answer(attachment, decode_answer(attn_pb2.PlanAnswer.FromString(message)))
        except Exception as error:  # no one awaits the link's thread
            self._post(attachment, AttachmentEnd(f"reading an answer: {error!r}", is_crash=True))

    def _lose_link(self, attachment: Attachment, error: PeerError) -> None:
        self._post(attachment, AttachmentEnd(str(error), is_crash=True))

    async def _handle_inbox(self, attachment: Attachment, send: Callable[[Any], Awaitable[None]]) -> None:
        """Handles the engine's messages in order; `send` takes its plans."""
        while True:
            wanted_by, message = await self._inbox.get()
            if wanted_by is not attachment:
                continue  # the message is for an earlier attachment
            if message == "ready":
                await self._watcher.ready(attachment)
                continue
            if isinstance(message, AttachmentEnd):
                if message.is_crash:  # the engine saw an aborted handoff; the stream may still give the reason
                    await asyncio.sleep(_REASON_S)
                raise Ended(message)
            try:
                await send(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                log.debug("a plan could not be sent", reason=repr(error))
                return  # the stream has ended; its reader gets the reason


def attach_request(options: AttachOptions) -> attn_pb2.AttachRequest:
    """What an attention worker is asked for."""
    request = attn_pb2.AttachRequest(
        weights_hash=options.weights_hash,
        model_fingerprint=options.model_fingerprint,
        dtype=str(options.spec.dtype).removeprefix("torch."),
        max_num_batched_tokens=options.spec.max_tokens,
        max_num_seqs=options.max_num_seqs,
        gpu=gpu_uuid(options.device),
        kv_cache_dtype=options.kv_cache_dtype,
        deterministic=options.is_deterministic,
        num_lanes=options.num_lanes,
        split_context=options.splits_context,
    )
    request.MergeFrom(encode_learned(options.learned))
    return request


def map_channels(
    reply: attn_pb2.AttachReply, spec: ChannelSpec, device: torch.device, wait_timeout_s: float
) -> dict[int, Channel]:
    """The channels of an attachment, by lane. Raises the errors of `map_channel`, `ConfigError` for other memory."""
    numbers = reply.epoch, reply.attachment_id
    try:
        return {
            lane.lane: map_channel(device, lane.kind, lane.handle, spec, *numbers, wait_timeout_s)
            for lane in reply.lanes
        }
    except StaleEpoch as error:
        if reply.shared_memory == shared_memory_id():
            raise
        raise ConfigError(
            "the attention worker has another /dev/shm than the dense worker: run both on one machine, and containers"
            f" with a common /dev/shm ({error})"
        ) from error


def describe_cache(reply: attn_pb2.AttachReply, cache_id: int = 0) -> AttachedCache:
    """The cache of the attention worker that has given the reply."""
    return AttachedCache(
        cache_id,
        reply.num_blocks,
        reply.num_free_blocks,
        dict(zip(reply.open_seq_ids, reply.open_num_blocks, strict=True)),
        reply.is_empty,
        reply.prefix_generation,
        reply.num_host_blocks,
    )


def describe_attachment(
    reply: attn_pb2.AttachReply,
    channels: Mapping[int, Channel],
    caches: Sequence[AttachedCache],
) -> Attachment:
    """The attachment to attention workers with these caches, of which the first one has given the reply."""
    return Attachment(
        epoch=reply.epoch,
        attachment_id=reply.attachment_id,
        channels=channels,
        block_size=reply.block_size,
        caches=tuple(caches),
        max_model_len=reply.max_model_len,
        window=reply.window if reply.HasField("window") else None,
        num_sink_tokens=reply.num_sink_tokens,
        layer_window=reply.layer_window if reply.HasField("layer_window") else None,
        max_num_sequences=reply.max_num_sequences or None,
    )


def execute(
    stub: attn_pb2_grpc.AttentionWorkerStub, epoch: int, attachment_id: int, *, has_link: bool = False
) -> grpc.aio.StreamStreamCall:
    """Opens the stream of plans of an attachment. `has_link`: they go by its link."""
    metadata = [("epoch", str(epoch)), ("attachment-id", str(attachment_id))]
    if has_link:
        metadata.append(("plan-link", "1"))
    return stub.Execute(metadata=metadata)


async def receive_answers(
    call: grpc.aio.StreamStreamCall, on_answer: Callable[[SequenceOpened | PlanAccepted], None]
) -> None:
    """Reads the answers of an attention worker until the attachment ends. Raises `Ended`."""
    try:
        while (result := await call.read()) is not grpc.aio.EOF:  # no iterator: it could not follow another `read`
            if result.is_leaving:
                raise Ended(AttachmentEnd("the attention worker was asked to stop", is_crash=False))
            on_answer(decode_answer(result))
    except grpc.aio.AioRpcError as error:
        is_replaced = error.code() is grpc.StatusCode.FAILED_PRECONDITION  # `StaleEpoch`
        reason = f"running a step: {error.code().name}: {error.details()}"
        raise Ended(AttachmentEnd(reason, is_crash=not is_replaced, is_replaced=is_replaced)) from error
    raise Ended(AttachmentEnd("the attention worker ended the stream of plans", is_crash=True))


class Ended(Exception):
    """Ends the serving of an attachment."""

    def __init__(self, end: AttachmentEnd) -> None:
        super().__init__(end.reason)
        self.end = end
