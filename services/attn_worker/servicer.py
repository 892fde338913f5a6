"""The gRPC servicer of the attention worker. Runs on the event loop; the engine thread does all work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NoReturn

import grpc
import structlog
from prometheus_client import CollectorRegistry

from services.attn_worker.attach_request import check_limits, check_model, num_lanes, read_learned
from services.attn_worker.attachment import Attachment
from services.attn_worker.build import AttentionSetup, build_engine
from services.attn_worker.cache.make_spec import StepLimits
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.plan_receiver import PlanReceiver, PutAnswer
from services.channel import Channel, ChannelSpec
from services.channel.factory import create_channel
from services.channel.message_link import LinkOffer
from services.channel.region import SHM_DIR, remove_stale_regions, shared_memory_id
from services.common.attention.learned import Learned
from services.common.errors import CapacityError, InvalidRequest, PeerError, StaleEpoch, ends_process
from services.common.process import resident_bytes
from services.pb import attn_pb2, attn_pb2_grpc, step_pb2
from services.rpc.server import until_over
from services.rpc.spans import Tracer
from services.rpc.watchdog import OnStall, Progress, Watchdog

log = structlog.get_logger()

_POLL_S = 0.005
_ROOM_TIMEOUT_S = 10.0  # for the previous dense worker to release its data region
_ROOM_RETRY_S = 0.1
_STOP_TIMEOUT_S = 10.0  # for the engine thread to end its current call

_Results = asyncio.Queue[attn_pb2.PlanAnswer | Exception]


class AttentionServicer(attn_pb2_grpc.AttentionWorkerServicer):
    """Serves one attachment at a time. `epoch` identifies this run of the process.

    The KV cache is allocated at the first attachment, because only then the weights are in memory.
    """

    def __init__(
        self,
        setup: AttentionSetup,
        epoch: int,
        wait_timeout_s: float,
        registry: CollectorRegistry,
        tracer: Tracer,
        stall_timeout_s: float,
        on_stall: OnStall,
        loading: asyncio.Task[None] | None = None,
        *,
        max_message_bytes: int,
    ) -> None:
        """`loading` loads kernels; the cache is allocated after it, as it takes what memory is left.

        `max_message_bytes`: of a plan.
        """
        self._max_message_bytes = max_message_bytes
        self._loading = loading
        self._setup, self._model = setup, setup.model
        self._engine: AttentionEngine | None = None
        self._building: asyncio.Task[AttentionEngine] | None = None
        self._limits: StepLimits | None = None  # limits that the engine is built for
        self._tracer = tracer
        self._metrics = AttentionMetrics(registry, lambda: self._engine)
        self._epoch = epoch
        self._wait_timeout_s = wait_timeout_s
        self._num_attachments = 0  # also the id of the last one
        self._attachment: Attachment | None = None
        self._attaching = asyncio.Lock()  # two attachments at once would need memory for two data regions
        self.watchdog = Watchdog("attn_worker", self._progress, on_stall, stall_timeout_s)
        self._readers: set[asyncio.Task[None]] = set()
        self._results: _Results | None = None  # set while there is a stream of plans
        self._is_leaving = False  # a dense worker that was told to leave tries again at once, and must be refused
        self.is_used = asyncio.Event()  # set when a dense worker has begun to attach
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def Attach(self, request: attn_pb2.AttachRequest, context: grpc.aio.ServicerContext) -> attn_pb2.AttachReply:
        if self._is_leaving or self._failure.done():
            raise PeerError("the attention worker is stopping")
        self.is_used.set()
        check_model(request, self._setup)
        check_limits(request, self._limits)
        learned = read_learned(request, self._model.config)
        try:
            async with self._attaching:
                return await self._attach(request, learned, context.peer())
        except Exception as error:
            if self._note_failure(error):
                raise PeerError(f"the attention worker has failed: {error}") from error
            raise

    async def _attach(self, request: attn_pb2.AttachRequest, learned: Learned, peer: str) -> attn_pb2.AttachReply:
        if self._results is not None:  # sent before the abort, which would look like a crash
            self._results.put_nowait(StaleEpoch(f"attachment {self._num_attachments} is replaced by another one"))
        self.abort()
        self._attachment = None
        self._num_attachments += 1
        if self._engine is not None:  # frees its region for the new one
            await asyncio.shield(asyncio.wrap_future(self._engine.submit(self._engine.detach)))
        channels = await self._create_channels(request, self._num_attachments)
        attachment = Attachment(self._num_attachments, channels, request.max_num_batched_tokens)
        self._attachment = attachment
        try:
            if request.takes_plan_link:
                attachment.offer = self._offer_link(attachment)
            limits = StepLimits(request.max_num_seqs, request.max_num_batched_tokens, len(channels))
            engine = await self._built_engine(limits)
        except BaseException:  # also when cancelled: the dense worker may die while it waits
            self._attachment = None
            attachment.close()
            raise
        attaching = engine.submit(engine.attach, attachment, request.weights_hash, learned)
        await asyncio.shield(asyncio.wrap_future(attaching))  # the engine owns the channels now, whatever happens
        lanes = [attn_pb2.LaneHandle(lane=lane, kind=each.kind, handle=each.handle) for lane, each in channels.items()]
        log.info("attached", attachment_id=attachment.attachment_id, peer=peer, channel=lanes[0].kind)
        cache = engine.cache
        orphaned_blocks = cache.orphaned_blocks
        return attn_pb2.AttachReply(
            epoch=self._epoch,
            attachment_id=attachment.attachment_id,
            lanes=lanes,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_free_blocks,
            open_seq_ids=orphaned_blocks.keys(),
            open_num_blocks=orphaned_blocks.values(),
            window=cache.sliding_window.window,
            num_sink_tokens=cache.sliding_window.num_sink_tokens,
            max_model_len=cache.max_model_len,
            layer_window=cache.uncounted_window,
            max_num_sequences=cache.max_num_sequences or 0,
            shared_memory=shared_memory_id(),
            is_empty=cache.is_empty,
            plan_link="" if attachment.offer is None else attachment.offer.name,
            prefix_generation=cache.prefix_generation,
            num_host_blocks=cache.tier.counts.num_slots,
        )

    def _offer_link(self, attachment: Attachment) -> LinkOffer | None:
        try:
            return LinkOffer(self._epoch, attachment.attachment_id)
        except OSError as error:
            log.warning("plans come by gRPC, which takes longer", reason=f"no socket in {SHM_DIR}: {error}")
            return None

    async def _create_channels(self, request: attn_pb2.AttachRequest, attachment_id: int) -> dict[int, Channel]:
        """The channel of each lane: all, or none."""
        channels: dict[int, Channel] = {}
        try:
            for lane in range(num_lanes(request)):
                channels[lane] = await self._create_channel(request, attachment_id, lane)
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        return channels

    async def _create_channel(self, request: attn_pb2.AttachRequest, attachment_id: int, lane: int) -> Channel:
        """Creates a channel. Waits for memory only for a short time, since it may never become free.

        A standby that takes over may find the memory of its dead predecessor in its place.
        """
        config, model = self._model.config, self._model
        spec = ChannelSpec(request.max_num_batched_tokens, config.qkv_size, config.attn_size, model.dtype)
        deadline = time.monotonic() + _ROOM_TIMEOUT_S
        is_told = False
        while True:
            try:
                return create_channel(
                    model.device,
                    request.gpu,
                    spec,
                    self._epoch,
                    attachment_id,
                    lane,
                    wait_timeout_s=self._wait_timeout_s,
                    num_lanes=num_lanes(request),
                )
            except CapacityError as error:
                if time.monotonic() > deadline:
                    raise
                if removed := remove_stale_regions():
                    log.info("removed shared memory of dead processes", names=",".join(removed))
                    continue
                if not is_told:
                    log.warning("waiting for room", reason=str(error), timeout_s=_ROOM_TIMEOUT_S)
                is_told = True
            await asyncio.sleep(_ROOM_RETRY_S)

    async def Execute(
        self, requests: AsyncIterator[step_pb2.StepPlan], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[attn_pb2.PlanAnswer]:
        metadata = dict(context.invocation_metadata())
        epoch, attachment_id = int(metadata.get("epoch", 0)), int(metadata.get("attachment-id", 0))
        if epoch != self._epoch:
            raise PeerError(f"plans are of epoch {epoch:016x}, this is epoch {self._epoch:016x}")
        if attachment_id != self._num_attachments:
            raise StaleEpoch(f"attachment {attachment_id} was replaced by attachment {self._num_attachments}")
        attachment, engine = self._attachment, self._require_engine()
        assert attachment is not None
        results = self._results = _Results()
        loop = asyncio.get_running_loop()

        def put(result: attn_pb2.PlanAnswer | Exception) -> None:
            loop.call_soon_threadsafe(self._report, results, result)

        attachment.fail = put
        assert self._limits is not None, "an engine has limits"
        make_receiver = partial(PlanReceiver, engine, attachment, self._limits.max_num_seqs, self._tracer)
        try:
            if metadata.get("plan-link") == "1":
                self._use_link(engine, attachment, make_receiver, put)
            reader = asyncio.create_task(self._read(requests, make_receiver(put), put))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
            is_last = False
            while not is_last:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                is_last = result.is_leaving
                yield result
        finally:
            # The reader ends with the call. It is not cancelled, because gRPC would write a message that is just
            # arriving into freed memory.
            attachment.abort()
            self._metrics.on_handoff_abort()
            if self._results is results:
                self._results = None
            log.info("detached", attachment_id=attachment_id)

    async def ReadBlocks(
        self, request: attn_pb2.ReadBlocksRequest, context: grpc.aio.ServicerContext
    ) -> None:
        moved_blocks = self._require_engine().moved_blocks
        if moved_blocks is None:
            raise InvalidRequest("this KV cache has more of a sequence than blocks that are found by their digests")
        await moved_blocks.sender.send(moved_blocks.digests_of(request.identity, request.digests), context.write)

    async def ForgetPrefixes(
        self, request: attn_pb2.ForgetPrefixesRequest, context: grpc.aio.ServicerContext
    ) -> attn_pb2.ForgetPrefixesReply:
        engine = self._require_engine()
        await asyncio.shield(asyncio.wrap_future(engine.submit(engine.cache.forget_prefixes, request.generation)))
        return attn_pb2.ForgetPrefixesReply()

    async def GetStatus(
        self, request: attn_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> attn_pb2.AttentionStatus:
        engine = self._require_engine()
        cache = engine.cache
        return attn_pb2.AttentionStatus(
            stall=self.watchdog.stall,
            epoch=self._epoch,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            num_free_blocks=cache.num_free_blocks,
            num_cached_blocks=cache.num_cached_blocks,
            num_sequences=cache.num_sequences,
            num_steps=engine.num_steps,
            num_computed_tokens=engine.num_computed_tokens,
            num_cached_tokens=engine.num_cached_tokens,
            num_copied_tokens=engine.num_copied_tokens,
            resident_bytes=resident_bytes(),
        )

    async def wait_failure(self) -> None:
        """Raises errors for which the process ends: see `ends_process`."""
        await asyncio.shield(self._failure)

    async def leave(self, timeout_s: float) -> None:
        """Tells the dense worker that this is no crash, and waits until it detaches; at most `timeout_s` seconds."""
        self._is_leaving = True
        if self._results is not None:
            self._results.put_nowait(attn_pb2.PlanAnswer(is_leaving=True))
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._results is not None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _progress(self) -> Progress | None:
        return None if self._engine is None else self._engine.progress(self._model.config.num_layers)

    def abort(self) -> None:
        """Releases the engine thread if it waits for the dense worker."""
        if self._attachment is not None:
            self._attachment.abort()

    def stop(self) -> None:
        """Ends the engine thread; blocks until it has ended, at most 10 s."""
        if self._engine is not None:
            self._engine.stop(_STOP_TIMEOUT_S)

    async def wait_loaded(self) -> None:
        """Waits until kernels are loaded, and raises what went wrong."""
        if self._loading is not None:
            await asyncio.shield(self._loading)

    async def _built_engine(self, limits: StepLimits) -> AttentionEngine:
        """The engine, built only once for all callers: a second KV cache would not fit."""
        await self.wait_loaded()
        if self._building is None:
            self._limits = limits
            self._building = asyncio.create_task(
                asyncio.to_thread(build_engine, self._setup, limits, self._metrics)
            )
        try:
            engine = await asyncio.shield(self._building)
            if engine is not self._engine:
                self._engine = engine
                asyncio.wrap_future(engine.failure).add_done_callback(self._end_with_thread)
        finally:
            if self._building.done() and (self._building.cancelled() or self._building.exception() is not None):
                self._building = self._limits = None  # so that the next attachment can try again
        return engine

    def _end_with_thread(self, ended: asyncio.Future[NoReturn]) -> None:
        """The engine thread has ended, which no attachment can cure, whatever the error was."""
        error = ended.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _require_engine(self) -> AttentionEngine:
        if self._engine is None:
            raise PeerError("no dense worker has attached yet")
        return self._engine

    async def _read(
        self, requests: AsyncIterator[step_pb2.StepPlan], receiver: PlanReceiver, put: PutAnswer
    ) -> None:
        """Receives every plan. Errors that end the stream go to `put`."""
        try:
            async for message in until_over(requests):
                receiver.receive(message)
        except Exception as error:  # no one awaits the reader task
            put(error)
        else:
            put(PeerError("the dense worker ended the stream of plans"))

    def _use_link(
        self,
        engine: AttentionEngine,
        attachment: Attachment,
        make_receiver: Callable[[PutAnswer], PlanReceiver],
        put_on_stream: PutAnswer,
    ) -> None:
        """Has the engine thread read every plan that comes by the link, and answer by it. Errors end the stream."""
        link = attachment.accept_link(self._max_message_bytes)

        def put(result: attn_pb2.PlanAnswer | Exception) -> None:
            if isinstance(result, Exception):
                put_on_stream(result)
                return
            try:
                link.send(result.SerializeToString())
            except PeerError as error:
                put_on_stream(error)

        receiver = make_receiver(put)

        def receive(message: bytes) -> None:
            try:
                rehearsal = engine.rehearsal
                if message:
                    plan = receiver.run(step_pb2.StepPlan.FromString(message), link.sent_s)
                    if rehearsal is not None:
                        rehearsal.note(message, plan)
                elif rehearsal is not None and (old := rehearsal.read()) is not None:  # an empty one announces another
                    engine.rehearse(attachment, old)
            except Exception as error:  # of this attachment, not of the thread
                put_on_stream(error)

        link.receive_by(engine.read, receive, put_on_stream)

    def _report(self, results: _Results, result: attn_pb2.PlanAnswer | Exception) -> None:
        if isinstance(result, Exception):
            self._note_failure(result)  # even if the dense worker, which may have failed too, no longer reads
        results.put_nowait(result)

    def _note_failure(self, error: Exception) -> bool:
        """Returns whether a new attachment cannot cure this error; if so, the worker ends with it."""
        is_failure = ends_process(error)
        if is_failure and not self._failure.done() and not self._is_leaving:
            self._failure.set_exception(error)
        return is_failure
