"""The gRPC servicer of the dense worker: one multiplexed stream per gateway. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial

import grpc
import structlog
import torch

from services.common.dense_info import dense_info_metadata
from services.common.errors import InvalidRequest, PeerError, RequestAborted, TwostrokeError
from services.common.memory_file import can_read
from services.common.process import resident_bytes
from services.dense_worker.attention_workers.attention_workers_client import AttentionWorkersClient
from services.dense_worker.engine.attention_client import AttentionClient
from services.dense_worker.engine.gateway_engine import GatewayEngine
from services.dense_worker.engine.sequence import Sequence, SequenceOutput
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.installed import has_progress, prepare_policy
from services.dense_worker.gateway_streams import GatewayStreams, Outbox
from services.dense_worker.metrics import DenseMetrics
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.server import until_over
from services.rpc.stream_socket import SocketOffer
from services.rpc.watchdog import Watchdog
from services.step.sequence_spec import FEATURES_BY_FIELD, decode_spec

log = structlog.get_logger()

_POLL_S = 0.005
_LEAVE_TIMEOUT_S = 10.0  # for the running step to end


class DenseServicer(dense_pb2_grpc.DenseWorkerServicer):
    """Serves gateways, and the launcher."""

    def __init__(self, metrics: DenseMetrics, tracer: SequenceTracer, max_message_bytes: int) -> None:
        """`max_message_bytes`: of a gateway's message."""
        self._metrics = metrics
        self._tracer = tracer
        self._max_message_bytes = max_message_bytes
        self._preparing: dict[asyncio.Task[None], Outbox] = {}  # of sequences that are not ready for the queue
        self.status = dense_pb2.DenseStatus(state=dense_pb2.DenseStatus.LOADING)  # `Readiness` updates it
        self.may_attach = asyncio.Event()  # set while this worker may attach
        self.attention: AttentionClient | None = None  # None: there is no KV cache, or none yet
        self._engine: GatewayEngine | None = None
        self._watchdog: Watchdog | None = None
        self._features: SequenceOf[Feature] = ()
        self._receivers: dict[str, Feature] = {}  # by the kind of their messages
        self._known: set[str] = set()  # what a spec may ask for by messages
        self._info: dense_pb2.DenseInfo | None = None  # None: refuse gateways
        self._is_ready = asyncio.Event()  # set while there is an info
        self._streams = GatewayStreams(tracer)
        self._tasks: set[asyncio.Task[None]] = set()  # those that nobody waits for

    def set_engine(self, engine: GatewayEngine, watchdog: Watchdog, features: SequenceOf[Feature]) -> None:
        """Called when the model is loaded. features: those of the engine"""
        self._engine, self._watchdog, self._features = engine, watchdog, features
        self._receivers = {feature.message: feature for feature in features if feature.message}
        names = {name for feature in features for name in (feature.name, *feature.further_names)}
        self._known = names - FEATURES_BY_FIELD

    def set_info(self, info: dense_pb2.DenseInfo | None) -> None:
        """Makes the worker serve gateways, or with None refuse them as UNAVAILABLE."""
        self._info = info
        if info is None:
            self._is_ready.clear()
        else:
            info.offers_socket = True
            self._is_ready.set()

    def note_unattached(self) -> None:
        """Says in the status that the worker tries to attach, or waits until it may."""
        states = dense_pb2.DenseStatus
        self.status.state = states.ATTACHING if self.may_attach.is_set() else states.STANDBY

    def spans_under_way(self) -> list[dense_pb2.SequenceSpan]:
        """The engine's running spans as messages; none before the engine exists."""
        spans = {} if self._engine is None else self._engine.spans_under_way()
        return [dense_pb2.SequenceSpan(seq_id=key, start=span.start, end=span.stop) for key, span in spans.items()]

    def deliver(self, report: StepReport) -> None:
        """Sends the results of a step to the gateways. Called on the event loop."""
        self._streams.deliver(report)

    def end_streams(self, farewell: dense_pb2.Farewell) -> None:
        """Ends every gateway's stream with this message, after all messages delivered before."""
        self._streams.send_all(dense_pb2.StepOutput(farewell=farewell))

    async def stop_serving(self, timeout_s: float) -> None:
        """The worker was asked to stop: ends all streams, and waits up to `timeout_s` seconds for that."""
        self.set_info(None)
        self.end_streams(dense_pb2.Farewell(is_crash=False, reason="the dense worker was asked to stop"))
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._streams and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def GetInfo(
        self, request: dense_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseInfo:
        with contextlib.suppress(TimeoutError):  # then it is refused with the reason
            async with asyncio.timeout(request.wait_ms / 1000):
                await self._is_ready.wait()
        info = dense_pb2.DenseInfo()
        info.CopyFrom(self._require_ready()[1])
        info.reads_memory_files = can_read(request.example)
        return info

    async def Leave(self, request: dense_pb2.LeaveRequest, context: grpc.aio.ServicerContext) -> dense_pb2.LeaveReply:
        engine, _ = self._require_ready()
        self.may_attach.clear()
        engine.leave()
        deadline = asyncio.get_running_loop().time() + _LEAVE_TIMEOUT_S
        while self.status.state != dense_pb2.DenseStatus.STANDBY or self._streams:
            if asyncio.get_running_loop().time() > deadline:
                self.may_attach.set()
                raise PeerError(f"the step under way has not ended within {_LEAVE_TIMEOUT_S} s")
            await asyncio.sleep(_POLL_S)
        return dense_pb2.LeaveReply()

    async def Drain(self, request: dense_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> dense_pb2.DrainReply:
        engine, _ = self._require_ready()
        engine.drain(True)
        timeout_s = request.timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                while engine.counts.num_running or engine.counts.num_opening:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except BaseException as error:  # also when the caller goes away
            engine.drain(False)
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"{engine.counts.num_running} requests still run after {timeout_s:g} s, the limit of the wait"
                ) from error
            raise
        return dense_pb2.DrainReply()

    async def TakeOver(
        self, request: dense_pb2.TakeOverRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.TakeOverReply:
        if self.status.state == dense_pb2.DenseStatus.LOADING:
            raise PeerError("the dense worker is starting: it has not loaded its weights yet")
        self.may_attach.set()
        if self._engine is not None:
            self._engine.drain(False)  # it may have been about to leave
        if request.returns_at_once:
            return dense_pb2.TakeOverReply()
        while self.status.state != dense_pb2.DenseStatus.SERVING:  # noqa: ASYNC110  the caller's deadline bounds it
            await asyncio.sleep(_POLL_S)
        return dense_pb2.TakeOverReply()

    async def AddAttentionWorker(
        self, request: dense_pb2.AddAttentionWorkerRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.AddAttentionWorkerReply:
        await self._require_attention_workers().add(request.address, request.timeout_ms / 1000)
        return dense_pb2.AddAttentionWorkerReply()

    async def RemoveAttentionWorker(
        self, request: dense_pb2.RemoveAttentionWorkerRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.RemoveAttentionWorkerReply:
        await self._require_attention_workers().remove(request.address, request.timeout_ms / 1000)
        return dense_pb2.RemoveAttentionWorkerReply()

    def _require_attention_workers(self) -> AttentionWorkersClient:
        self._require_ready()
        if not isinstance(self.attention, AttentionWorkersClient):
            raise InvalidRequest(
                "this dense worker has a single attention worker: start it with attention.elastic, or with several"
            )
        return self.attention

    async def GetStatus(
        self, request: dense_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseStatus:
        status = dense_pb2.DenseStatus(resident_bytes=resident_bytes(), device_bytes=torch.cuda.memory_reserved())
        status.MergeFrom(self.status)
        if self._watchdog is not None and self._watchdog.stall is not None:
            status.stall.CopyFrom(self._watchdog.stall)
        if self._engine is not None:
            counts = self._engine.counts
            status.num_waiting = counts.num_waiting
            status.num_running = counts.num_running
            status.num_steps = counts.num_steps
            status.num_preemptions = counts.num_preemptions
            if isinstance(self.attention, AttentionWorkersClient):
                status.attention_workers.extend(self._describe_attention_workers(self.attention.addresses))
        return status

    def _describe_attention_workers(self, addresses: Mapping[int, str]) -> Iterator[dense_pb2.AttentionWorkerStatus]:
        for each in [] if self._engine is None else self._engine.caches:
            if each.cache_id in addresses:
                yield dense_pb2.AttentionWorkerStatus(
                    address=addresses[each.cache_id],
                    num_sequences=each.num_sequences,
                    num_blocks=each.num_blocks,
                    num_free_blocks=each.num_free_blocks,
                )

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        engine, info = self._require_ready()
        outbox = self._streams.open()
        handle = partial(self._handle_or_end, engine, outbox, info.vocab_size)
        outbox.offer = offer = self._offer_socket(handle, outbox)
        peer = context.peer()  # reading it after the end of the call would crash
        log.info("gateway connected", peer=peer)
        try:
            own_metadata = () if offer is None else offer.metadata
            await context.send_initial_metadata((*dense_info_metadata(info), *own_metadata))
            self._keep(asyncio.create_task(_read(requests, handle, outbox)))
            is_last = False
            while not is_last:
                output = await outbox.take()
                if isinstance(output, Exception):
                    raise output
                is_last = output.HasField("farewell")
                if offer is not None and offer.connected is not None:
                    offer.connected.send(output.SerializeToString())
                    await offer.connected.drain()
                else:
                    yield output
            if offer is not None:
                await offer.close()  # which waits until the farewell is written
        finally:
            # The reader ends with the call. It is not cancelled, because gRPC would write a message that is just
            # arriving into freed memory.
            orphans = self._streams.close(outbox)
            if offer is not None:
                self._keep(asyncio.create_task(offer.close()))
            for feature in self._features:
                feature.end_stream(outbox.number)
            for seq_id in orphans:
                engine.cancel(seq_id)
            log.info("gateway gone", peer=peer, cancelled=len(orphans))

    def _offer_socket(self, handle: Callable[[dense_pb2.GatewayMessage], None], outbox: Outbox) -> SocketOffer | None:
        """A socket for the messages of a stream whose gateway is on this host; None: there can be none."""

        def receive(message: bytes) -> None:
            handle(dense_pb2.GatewayMessage.FromString(message))

        try:
            return SocketOffer(receive, outbox.put, self._max_message_bytes)
        except OSError as error:
            log.warning("messages go by gRPC, a socket cannot be opened", reason=str(error))
            return None

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Keeps a task until it has ended, which the event loop does not."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _require_ready(self) -> tuple[GatewayEngine, dense_pb2.DenseInfo]:
        if self._engine is None or self._info is None:
            state = dense_pb2.DenseStatus.State.Name(self.status.state).lower()
            raise PeerError(f"the dense worker does not serve now: it is {state}")
        return self._engine, self._info

    def _handle_or_end(
        self, engine: GatewayEngine, outbox: Outbox, vocab_size: int, request: dense_pb2.GatewayMessage
    ) -> None:
        """Handles a message of a stream that has not ended. An error ends it."""
        if self._streams.outbox(outbox.number) is None:
            return
        try:
            self._handle(request, engine, outbox, vocab_size)
        except Exception as error:  # nobody waits for it
            outbox.put(error)

    def _handle(
        self, request: dense_pb2.GatewayMessage, engine: GatewayEngine, outbox: Outbox, vocab_size: int
    ) -> None:
        kind = request.WhichOneof("message")
        if kind == "submit":
            self._handle_submit(request.submit, engine, outbox, vocab_size)
        elif kind == "resumed":
            self._keep(asyncio.create_task(self._close_orphans(engine, request.resumed.gateway, outbox)))
        elif kind == "forget_prefixes":
            self._keep(asyncio.create_task(self._forget_prefixes(engine, request.forget_prefixes.generation, outbox)))
        elif kind == "cancel":
            self._streams.remove(request.cancel.seq_id)
            engine.cancel(request.cancel.seq_id)
        elif kind == "announcement":
            engine.expect()
        elif (feature := self._receivers.get(kind)) is not None:
            feature.receive(request, outbox.number)

    def _handle_submit(
        self, submit: dense_pb2.Submit, engine: GatewayEngine, outbox: Outbox, vocab_size: int
    ) -> None:
        sequence = decode_sequence(submit, outbox.number)
        log.debug("submitted", request_id=sequence.spec.request_id, seq_id=f"{sequence.seq_id:x}")
        if self._streams.add(sequence):
            engine.cancel(sequence.seq_id)
        is_recovered = has_progress(submit)
        self._metrics.on_submitted(is_recovered=is_recovered)
        self._tracer.begin(sequence, is_recovered=is_recovered)
        try:
            preparations = self._admit(sequence, submit)
        except InvalidRequest as error:
            self._refuse(sequence, error)
            return
        if (preparation := prepare_policy(sequence, submit, vocab_size)) is not None:
            preparations.append(preparation)
        if preparations:
            task = asyncio.create_task(self._submit_prepared(sequence, preparations, engine))
            self._preparing[task] = outbox
            task.add_done_callback(self._preparing.pop)
        else:
            engine.submit(sequence)

    async def _forget_prefixes(self, engine: GatewayEngine, wanted: int, outbox: Outbox) -> None:
        try:
            generation = await asyncio.wrap_future(engine.forget_prefixes(wanted or None))
            if self.attention is not None:
                await self.attention.forget_prefixes(generation)
            outbox.put(dense_pb2.StepOutput(prefix_generation=generation))
        except Exception as error:  # no one awaits this task
            outbox.put(error)

    async def _close_orphans(self, engine: GatewayEngine, gateway: int, outbox: Outbox) -> None:
        preparing = [task for task, owner in self._preparing.items() if owner is outbox]
        if preparing:  # their blocks are claimed, too
            await asyncio.wait(preparing)
        try:
            engine.close_orphans(gateway)
        except Exception as error:  # no one awaits this task
            outbox.put(error)

    def _admit(self, sequence: Sequence, submit: dense_pb2.Submit) -> list[Awaitable[None]]:
        """Gives a sequence its features, and returns what has to end before it is submitted; mostly nothing.

        Raises `InvalidRequest` if it cannot have one.
        """
        spec = sequence.spec
        if unknown := spec.features.keys() - self._known:
            raise InvalidRequest(f"this dense worker has no feature {min(unknown)!r}: it is of another version")
        asked = spec.asked_features
        for feature in self._features:
            if feature.name in asked or feature.sees_all:
                admitted = feature.admit(spec, submit, sequence.stream)
                sequence.features += () if admitted is None else (admitted,)
        preparations = [each.prepare() for each in sequence.features]
        return [each for each in preparations if each is not None]

    async def _submit_prepared(
        self, sequence: Sequence, preparations: SequenceOf[Awaitable[None]], engine: GatewayEngine
    ) -> None:
        """Submits a sequence when all that it needs is ready. An error ends only this sequence."""
        try:
            for result in await asyncio.gather(*preparations, return_exceptions=True):
                if result is not None:
                    raise result
        except Exception as error:  # whatever a client's request does here, it concerns no other sequence
            if not isinstance(error, TwostrokeError):
                log.exception("a sequence cannot be prepared", request_id=sequence.spec.request_id)
                error = RequestAborted(f"the sequence cannot be prepared: {error}")
            self._refuse(sequence, error)
            return
        if self._streams.outbox_of(sequence) is not None:
            engine.submit(sequence)

    def _refuse(self, sequence: Sequence, error: TwostrokeError) -> None:
        self.deliver(StepReport.between_steps([SequenceOutput.failed(sequence, error)]))


def decode_sequence(submit: dense_pb2.Submit, stream: int) -> Sequence:
    """The sequence of a gateway's message, which the gateway has validated; without features and row policy.

    stream: the number of the stream by which it came
    """
    spec = decode_spec(submit.spec)
    return Sequence(
        seq_id=submit.seq_id,
        spec=spec,
        output_token_ids=list(submit.output_token_ids),
        arrival_s=time.monotonic(),
        queue_timeout_s=submit.queue_timeout_ms / 1000 if submit.queue_timeout_ms else None,
        num_crashes=submit.num_crashes,
        group_id=submit.group_id,
        stream=stream,
    )


async def _read(
    requests: AsyncIterator[dense_pb2.GatewayMessage],
    handle: Callable[[dense_pb2.GatewayMessage], None],
    outbox: Outbox,
) -> None:
    try:
        async for request in until_over(requests):
            handle(request)
    except Exception as error:  # no one awaits this task
        outbox.put(error)

