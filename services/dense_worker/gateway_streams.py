"""`GatewayStreams`: the streams of gateways, who owns which sequence, and the messages of steps. On the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np

from services.common.token_logprobs import TokenLogprobs, encode_logprobs
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceOutput
from services.dense_worker.engine.step_report import DecodedTokens, StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.pb import dense_pb2
from services.rpc.stream_socket import SocketOffer

_REASONS = {
    FinishReason.STOP: dense_pb2.SequenceEnd.STOP,
    FinishReason.LENGTH: dense_pb2.SequenceEnd.LENGTH,
    FinishReason.ERROR: dense_pb2.SequenceEnd.ERROR,
}

MAX_REPORT_BYTES = 2**20  # of reports in a step's message, about; a larger one has a message of its own


class Outbox:
    """The messages to one gateway."""

    def __init__(self, number: int) -> None:
        """`number`: of its stream, which no other one gets."""
        self.number = number
        self.offer: SocketOffer | None = None  # of the socket by which they go; None: they go by gRPC
        self._waiting = asyncio.Queue[dense_pb2.StepOutput | Exception]()
        self._has_sent = False  # in this iteration of the event loop

    def put(self, output: dense_pb2.StepOutput | Exception) -> None:
        """Sends a message: one at once, by the socket, in an iteration of the event loop. An error ends the stream."""
        socket = None if self.offer is None else self.offer.connected
        is_last = isinstance(output, Exception) or output.HasField("farewell")
        if socket is None or is_last or self._has_sent or not (self._waiting.empty() and socket.is_read):
            self._waiting.put_nowait(output)
            return
        self._has_sent = True
        asyncio.get_running_loop().call_soon(self._begin_iteration)
        socket.send(output.SerializeToString())

    def _begin_iteration(self) -> None:
        self._has_sent = False

    async def take(self) -> dense_pb2.StepOutput | Exception:
        """Waits for the next one that could not be sent at once."""
        return await self._waiting.get()


class GatewayStreams:
    """Open streams, and the live sequences that came by them. `deliver` makes one message a step for each."""

    def __init__(self, tracer: SequenceTracer) -> None:
        self._tracer = tracer
        self._owned: dict[int, tuple[Sequence, Outbox]] = {}  # by seq_id
        self._streams: dict[int, Outbox] = {}  # by number
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self) -> Outbox:
        """The outbox of a new stream."""
        outbox = Outbox(next(self._numbers))
        self._streams[outbox.number] = outbox
        return outbox

    def close(self, outbox: Outbox) -> list[int]:
        """Forgets a stream and its sequences, whose seq_ids it returns."""
        del self._streams[outbox.number]
        orphans = [seq_id for seq_id, (_, owner) in self._owned.items() if owner is outbox]
        for seq_id in orphans:
            del self._owned[seq_id]
            self._tracer.end(seq_id, "gateway_gone")
        return orphans

    def outbox(self, number: int) -> Outbox | None:
        """That of a stream; None: it has ended."""
        return self._streams.get(number)

    def send_all(self, message: dense_pb2.StepOutput) -> None:
        """Sends a message by every stream, after all that were delivered before."""
        for outbox in self._streams.values():
            outbox.put(message)

    def add(self, sequence: Sequence) -> bool:
        """A sequence has come by its stream. Returns whether one with the same seq_id was live, which is forgotten."""
        is_again = sequence.seq_id in self._owned  # it was submitted again before its old stream broke
        self._owned[sequence.seq_id] = sequence, self._streams[sequence.stream]
        return is_again

    def remove(self, seq_id: int) -> None:
        """Forgets a sequence that was cancelled; unknown ones are ignored."""
        self._owned.pop(seq_id, None)
        self._tracer.end(seq_id, "cancelled")

    def deliver(self, report: StepReport) -> None:
        """Sends the results of a step to the gateways, one message each. Called on the event loop."""
        messages: dict[Outbox, dense_pb2.StepOutput] = defaultdict(
            lambda: dense_pb2.StepOutput(step_id=report.step_id)
        )
        if report.reports:
            self._deliver_reports(report, messages)
        for sequence in report.started:
            if outbox := self.outbox_of(sequence):
                messages[outbox].started.add(
                    seq_id=sequence.seq_id,
                    num_cached_tokens=sequence.num_cached_tokens or 0,
                    queue_us=round(1e6 * (sequence.started_s - sequence.arrival_s)),
                )
        for outbox, seq_ids, token_ids in self._split(report.outputs.decoded):
            messages[outbox].seq_ids.extend(seq_ids.tolist())
            messages[outbox].token_ids.extend(token_ids.tolist())
        for output in report.outputs.others:
            if outbox := self.outbox_of(output.sequence):
                _append(messages[outbox], output, report.logprobs.get(output.sequence.seq_id, ()))
                if output.finish_reason is not None:
                    del self._owned[output.sequence.seq_id]
                    error = None if output.error is None else str(output.error)
                    self._tracer.end(output.sequence.seq_id, output.finish_reason.name.lower(), error)
        for sequence in report.admitted:
            if outbox := self.outbox_of(sequence):
                messages[outbox].admitted.append(sequence.seq_id)
        for outbox, message in messages.items():
            outbox.put(message)

    def _split(self, decoded: DecodedTokens) -> Iterator[tuple[Outbox, np.ndarray, np.ndarray]]:
        """The tokens for each stream: its outbox, seq_ids and tokens. A gateway ignores those of ended sequences."""
        numbers = decoded.streams
        if not len(numbers):
            return
        is_first = numbers == numbers[0]
        is_one = np.count_nonzero(is_first) == len(numbers)  # mostly there is one gateway
        for number in [numbers.item(0)] if is_one else np.unique(numbers).tolist():
            if (outbox := self._streams.get(number)) is not None:
                is_own = slice(None) if is_one else numbers == number
                yield outbox, decoded.seq_ids[is_own], decoded.token_ids[is_own]

    def _deliver_reports(self, report: StepReport, messages: dict[Outbox, dense_pb2.StepOutput]) -> None:
        """Sends reports before the tokens that they belong to, in messages of limited size. Small ones join the step's
        message.
        """
        num_bytes = defaultdict[Outbox, int](int)  # of the reports in each message
        for sequence, each in report.reports:
            if outbox := self.outbox_of(sequence):
                for part, num_part_bytes in each.encode():
                    if num_part_bytes >= MAX_REPORT_BYTES:  # copying it would take long
                        part.step_id = report.step_id
                        outbox.put(part)
                        continue
                    messages[outbox].MergeFrom(part)
                    num_bytes[outbox] += num_part_bytes
                    if num_bytes[outbox] >= MAX_REPORT_BYTES:
                        outbox.put(messages.pop(outbox))
                        num_bytes[outbox] = 0

    def outbox_of(self, sequence: Sequence) -> Outbox | None:
        """The outbox of a sequence; None if it was cancelled, even if its seq_id has been submitted again since."""
        current, outbox = self._owned.get(sequence.seq_id, (None, None))
        return outbox if current is sequence else None


def _append(message: dense_pb2.StepOutput, output: SequenceOutput, logprobs: SequenceOf[TokenLogprobs]) -> None:
    seq_id = output.sequence.seq_id
    for token_id in output.token_ids:
        message.seq_ids.append(seq_id)
        message.token_ids.append(token_id)
    for _, value in zip(output.token_ids, logprobs, strict=False):  # the sequence may end before the step's last token
        message.logprobs.add(seq_id=seq_id, token=encode_logprobs(value))
    if output.finish_reason is not None:
        reason = _REASONS[output.finish_reason]
        end = message.ended.add(seq_id=seq_id, reason=reason)
        if output.error is not None:
            end.status_code = output.error.status_code.value[0]
            end.message = str(output.error)
            end.param = output.error.param or ""
    if output.report is not None:
        output.report.add_to(message)
