"""The gRPC servicer of the dense worker: one multiplexed stream per gateway. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial

import grpc
import structlog
import torch

from services.common.dense_info import dense_info_metadata
from services.common.errors import InvalidRequest, PeerError
from services.common.memory_file import can_read
from services.common.process import resident_bytes
from services.dense_worker.attention_workers.attention_workers_client import AttentionWorkersClient
from services.dense_worker.engine.attention_client import AttentionClient
from services.dense_worker.engine.gateway_engine import GatewayEngine
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.features.feature import Feature
from services.dense_worker.gateway_messages import GatewayMessages
from services.dense_worker.gateway_streams import GatewayStreams, Outbox
from services.dense_worker.metrics import DenseMetrics
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.server import until_over
from services.rpc.stream_socket import SocketOffer
from services.rpc.watchdog import Watchdog

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
        self.status = dense_pb2.DenseStatus(state=dense_pb2.DenseStatus.LOADING)  # the worker updates it
        self.may_attach = asyncio.Event()  # set while this worker may attach
        self.attention: AttentionClient | None = None  # None: there is no KV cache, or none yet
        self._engine: GatewayEngine | None = None
        self._watchdog: Watchdog | None = None
        self._messages: GatewayMessages | None = None  # None: there is no engine yet
        self._info: dense_pb2.DenseInfo | None = None  # None: refuse gateways
        self._is_ready = asyncio.Event()  # set while there is an info
        self.streams = GatewayStreams(tracer)
        self._tasks: set[asyncio.Task[None]] = set()  # those that nobody waits for

    def set_engine(
        self, engine: GatewayEngine, watchdog: Watchdog, features: SequenceOf[Feature], vocab_size: int
    ) -> None:
        """Called when the model is loaded. features: those of the engine"""
        self._engine, self._watchdog = engine, watchdog
        self._messages = GatewayMessages(
            engine, features, vocab_size, self.attention, self.streams, self._metrics, self._tracer
        )

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

    def end_streams(self, farewell: dense_pb2.Farewell) -> None:
        """Ends every gateway's stream with this message, after all messages delivered before."""
        self.streams.send_all(dense_pb2.StepOutput(farewell=farewell))

    async def stop_serving(self, timeout_s: float) -> None:
        """The worker was asked to stop: ends all streams, and waits up to `timeout_s` seconds for that."""
        self.set_info(None)
        self.end_streams(dense_pb2.Farewell(is_crash=False, reason="the dense worker was asked to stop"))
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.streams and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
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
        while self.status.state != dense_pb2.DenseStatus.STANDBY or self.streams:
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
        _, info = self._require_ready()
        messages, outbox = self._messages, self.streams.open()
        assert messages is not None, "a worker that is ready has an engine"
        handle = partial(messages.handle, outbox)
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
            if offer is not None:
                self._keep(asyncio.create_task(offer.close()))
            log.info("gateway gone", peer=peer, cancelled=messages.end_stream(outbox))

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
