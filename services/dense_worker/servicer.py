"""gRPC front of the dense worker: one multiplexed stream per gateway. Runs on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator

import grpc
import structlog

from services.common.errors import PeerError
from services.common.process import resident_bytes
from services.common.sampling_messages import decode_sampling
from services.common.token_logprobs import TokenLogprobs, encode_logprobs
from services.dense_worker.engine import Engine, StepReport
from services.dense_worker.metrics import DenseMetrics
from services.dense_worker.prompt_logprobs import PromptLogprobs
from services.dense_worker.scheduler import SequenceOutput
from services.dense_worker.sequence import FinishReason, Sequence
from services.dense_worker.tracing import SequenceTracer
from services.pb import dense_pb2, dense_pb2_grpc

log = structlog.get_logger()

_REASONS = {
    FinishReason.STOP: dense_pb2.SequenceEnd.STOP,
    FinishReason.LENGTH: dense_pb2.SequenceEnd.LENGTH,
    FinishReason.ERROR: dense_pb2.SequenceEnd.ERROR,
}

_Outbox = asyncio.Queue[dense_pb2.StepOutput]


class DenseServicer(dense_pb2_grpc.DenseWorkerServicer):
    """Knows which gateway owns which sequence; the engine does not."""

    def __init__(self, metrics: DenseMetrics, tracer: SequenceTracer) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._ready: tuple[Engine, dense_pb2.DenseInfo] | None = None
        self._outboxes: dict[int, _Outbox] = {}  # by seq_id

    def set_ready(self, engine: Engine, info: dense_pb2.DenseInfo) -> None:
        """From now on calls are answered; before, they are refused as UNAVAILABLE."""
        self._ready = engine, info

    async def GetInfo(
        self, request: dense_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseInfo:
        return self._require_ready()[1]

    async def GetStatus(
        self, request: dense_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseStatus:
        engine, _ = self._require_ready()
        counts = engine.counts
        return dense_pb2.DenseStatus(
            num_waiting=counts.num_waiting,
            num_running=counts.num_running,
            num_steps=counts.num_steps,
            num_preemptions=counts.num_preemptions,
            resident_bytes=resident_bytes(),
        )

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        engine, _ = self._require_ready()
        outbox: _Outbox = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, engine, outbox))
        peer = context.peer()  # when the call has ended, to ask gRPC for it ends the process
        log.info("gateway connected", peer=peer)
        try:
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            orphans = [seq_id for seq_id, owner in self._outboxes.items() if owner is outbox]
            for seq_id in orphans:
                del self._outboxes[seq_id]
                self._tracer.end(seq_id, "gateway_gone")
                engine.cancel(seq_id)
            log.info("gateway gone", peer=peer, cancelled=len(orphans))

    def deliver(self, report: StepReport) -> None:
        """Sends a step's news to the gateways, one message each. Called on the event loop."""
        messages: dict[_Outbox, dense_pb2.StepOutput] = defaultdict(
            lambda: dense_pb2.StepOutput(step_id=report.step_id)
        )
        for sequence in report.started:
            if outbox := self._outboxes.get(sequence.seq_id):
                messages[outbox].started.add(
                    seq_id=sequence.seq_id,
                    num_cached_tokens=sequence.num_cached_tokens or 0,
                    queue_us=round(1e6 * (sequence.started_s - sequence.arrival_s)),
                )
        for stretch in report.prompt_logprobs:
            if outbox := self._outboxes.get(stretch.sequence.seq_id):
                messages[outbox].prompt_logprobs.append(encode_prompt_logprobs(stretch))
        for output in report.outputs:
            if outbox := self._outboxes.get(output.sequence.seq_id):
                _append(messages[outbox], output, report.logprobs.get(output.sequence.seq_id))
                if output.finish_reason is not None:
                    del self._outboxes[output.sequence.seq_id]
                    error = None if output.error is None else str(output.error)
                    self._tracer.end(output.sequence.seq_id, output.finish_reason.name.lower(), error)
        for outbox, message in messages.items():
            outbox.put_nowait(message)

    def _require_ready(self) -> tuple[Engine, dense_pb2.DenseInfo]:
        if self._ready is None:
            raise PeerError("the dense worker is starting: no weights or no attention worker yet")
        return self._ready

    async def _read(self, requests: AsyncIterator[dense_pb2.GatewayMessage], engine: Engine, outbox: _Outbox) -> None:
        async for request in requests:
            if request.WhichOneof("message") == "submit":
                sequence = decode_sequence(request.submit)
                log.debug("submitted", request_id=sequence.request_id, seq_id=f"{sequence.seq_id:x}")
                if sequence.seq_id in self._outboxes:
                    engine.cancel(sequence.seq_id)  # submitted again before its old stream was seen to break
                self._outboxes[sequence.seq_id] = outbox
                self._metrics.on_submitted(sequence)
                self._tracer.begin(sequence, request.submit.traceparent)
                engine.submit(sequence)
            else:
                self._outboxes.pop(request.cancel.seq_id, None)
                self._tracer.end(request.cancel.seq_id, "cancelled")
                engine.cancel(request.cancel.seq_id)


def decode_sequence(submit: dense_pb2.Submit) -> Sequence:
    """The sequence that a gateway, which has validated it, wants to run."""
    return Sequence(
        seq_id=submit.seq_id,
        request_id=submit.request_id,
        prompt_token_ids=list(submit.prompt_token_ids),
        output_token_ids=list(submit.output_token_ids),
        sampling=decode_sampling(submit.sampling),
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        cache_salt=submit.cache_salt,
        num_logprobs=submit.num_logprobs if submit.HasField("num_logprobs") else None,
        num_prompt_logprobs=submit.num_prompt_logprobs if submit.HasField("num_prompt_logprobs") else None,
        priority=submit.priority,
        arrival_s=time.monotonic(),
        queue_timeout_s=submit.queue_timeout_ms / 1000 if submit.queue_timeout_ms else None,
    )


def encode_prompt_logprobs(stretch: PromptLogprobs) -> dense_pb2.PromptLogprobs:
    """One message a step and prompt."""
    return dense_pb2.PromptLogprobs(
        seq_id=stretch.sequence.seq_id,
        start=stretch.start,
        tokens=[encode_logprobs(token) for token in stretch.tokens],
    )


def _append(message: dense_pb2.StepOutput, output: SequenceOutput, logprobs: TokenLogprobs | None) -> None:
    seq_id = output.sequence.seq_id
    if output.token_id is not None:
        message.seq_ids.append(seq_id)
        message.token_ids.append(output.token_id)
        if logprobs is not None:
            message.logprobs.add(seq_id=seq_id, token=encode_logprobs(logprobs))
    if output.finish_reason is not None:
        end = message.ended.add(seq_id=seq_id, reason=_REASONS[output.finish_reason])
        if output.error is not None:
            end.status_code = output.error.status_code.value[0]
            end.message = str(output.error)
