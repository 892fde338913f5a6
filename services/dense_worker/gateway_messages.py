"""`GatewayMessages`: what gateways send by their streams. Passes their sequences to the engine. On the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from collections.abc import Sequence as SequenceOf

import structlog

from services.common.errors import InvalidRequest, RequestAborted, TwostrokeError
from services.dense_worker.engine.attention_client import AttentionClient
from services.dense_worker.engine.gateway_engine import GatewayEngine
from services.dense_worker.engine.sequence import Sequence, SequenceOutput
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.installed import has_progress, prepare_policy
from services.dense_worker.gateway_streams import GatewayStreams, Outbox
from services.dense_worker.metrics import DenseMetrics
from services.pb import dense_pb2
from services.step.sequence_spec import FEATURES_BY_FIELD, decode_spec

log = structlog.get_logger()


class GatewayMessages:
    """Of all streams. No method blocks."""

    def __init__(
        self,
        engine: GatewayEngine,
        features: SequenceOf[Feature],
        vocab_size: int,
        attention: AttentionClient | None,
        streams: GatewayStreams,
        metrics: DenseMetrics,
        tracer: SequenceTracer,
    ) -> None:
        """features: those of the engine; attention: None: there is no KV cache"""
        self._engine = engine
        self._features = features
        self._receivers = {feature.message: feature for feature in features if feature.message}  # by kind of message
        names = {name for feature in features for name in (feature.name, *feature.further_names)}
        self._known = names - FEATURES_BY_FIELD  # what a spec may ask for by messages
        self._vocab_size = vocab_size
        self._attention = attention
        self._streams = streams
        self._metrics = metrics
        self._tracer = tracer
        self._preparing: dict[asyncio.Task[None], Outbox] = {}  # of sequences that are not ready for the queue
        self._tasks: set[asyncio.Task[None]] = set()  # those that nobody waits for

    def handle(self, outbox: Outbox, message: dense_pb2.GatewayMessage) -> None:
        """Handles a message of a stream, unless that has ended. An error ends it."""
        if self._streams.outbox(outbox.number) is None:
            return
        try:
            self._handle(outbox, message)
        except Exception as error:  # nobody waits for it
            outbox.put(error)

    def end_stream(self, outbox: Outbox) -> int:
        """A stream has ended: cancels its sequences, and returns how many."""
        orphans = self._streams.close(outbox)
        for feature in self._features:
            feature.end_stream(outbox.number)
        for seq_id in orphans:
            self._engine.cancel(seq_id)
        return len(orphans)

    def _handle(self, outbox: Outbox, message: dense_pb2.GatewayMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(outbox, message.submit)
        elif kind == "resumed":
            self._begin(outbox, self._close_orphans(outbox, message.resumed.gateway))
        elif kind == "forget_prefixes":
            self._begin(outbox, self._forget_prefixes(outbox, message.forget_prefixes.generation))
        elif kind == "cancel":
            self._streams.remove(message.cancel.seq_id)
            self._engine.cancel(message.cancel.seq_id)
        elif kind == "announcement":
            self._engine.expect()
        elif (feature := self._receivers.get(kind)) is not None:
            feature.receive(message, outbox.number)

    def _submit(self, outbox: Outbox, submit: dense_pb2.Submit) -> None:
        sequence = decode_sequence(submit, outbox.number)
        if self._streams.add(sequence):
            self._engine.cancel(sequence.seq_id)
        is_recovered = has_progress(submit)
        self._metrics.on_submitted(is_recovered=is_recovered)
        self._tracer.begin(sequence, is_recovered=is_recovered)
        try:
            preparations = self._admit(sequence, submit)
        except InvalidRequest as error:
            self._refuse(sequence, error)
            return
        if (preparation := prepare_policy(sequence, submit, self._vocab_size)) is not None:
            preparations.append(preparation)
        if preparations:
            task = asyncio.create_task(self._submit_prepared(sequence, preparations))
            self._preparing[task] = outbox
            task.add_done_callback(self._preparing.pop)
        else:
            self._engine.submit(sequence)
        log.debug("submitted", request_id=sequence.spec.request_id, seq_id=f"{sequence.seq_id:x}")

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

    async def _submit_prepared(self, sequence: Sequence, preparations: SequenceOf[Awaitable[None]]) -> None:
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
            self._engine.submit(sequence)

    def _refuse(self, sequence: Sequence, error: TwostrokeError) -> None:
        self._streams.deliver(StepReport.between_steps([SequenceOutput.failed(sequence, error)]))

    async def _close_orphans(self, outbox: Outbox, gateway: int) -> None:
        preparing = [task for task, owner in self._preparing.items() if owner is outbox]
        if preparing:  # their blocks are claimed, too
            await asyncio.wait(preparing)
        self._engine.close_orphans(gateway)

    async def _forget_prefixes(self, outbox: Outbox, wanted: int) -> None:
        generation = await asyncio.wrap_future(self._engine.forget_prefixes(wanted or None))
        if self._attention is not None:
            await self._attention.forget_prefixes(generation)
        outbox.put(dense_pb2.StepOutput(prefix_generation=generation))

    def _begin(self, outbox: Outbox, handling: Coroutine[None, None, None]) -> None:
        """Runs what handles a message and has to wait for something. An error ends the stream."""

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                outbox.put(error)

        task = asyncio.create_task(handling)
        self._tasks.add(task)
        task.add_done_callback(end)


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
