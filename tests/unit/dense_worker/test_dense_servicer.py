"""The dense worker's servicer: which gateway's stream receives the tokens of a sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest

from services.common.errors import PeerError
from services.dense_worker.engine.sequence import Sequence, SequenceOutput
from services.dense_worker.engine.step_report import DecodedTokens, StepOutputs, StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.features.adapters.adapter_feature import AdapterFeature
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.metrics import DenseMetrics
from services.dense_worker.servicer import DenseServicer
from services.pb import dense_pb2, sampling_pb2, sequence_pb2
from services.rpc.metrics import new_registry
from services.rpc.spans import NoTracer
from services.step import SequenceSpec
from tests.support.clients.dense_stream import submit

TIMEOUT_S = 60.0
MAX_MESSAGE_BYTES = 2**20
VOCAB_SIZE = 50


class Stream:
    """The gateway's side of a stream."""

    def __init__(self, servicer: DenseServicer) -> None:
        self._requests: asyncio.Queue[dense_pb2.GatewayMessage] = asyncio.Queue()
        context: Any = Mock(peer=lambda: "test", send_initial_metadata=self._ignore)
        self._outputs = servicer.Connect(self._read(), context)
        self.next = asyncio.create_task(anext(self._outputs))

    def send(self, message: dense_pb2.Submit) -> None:
        self._requests.put_nowait(dense_pb2.GatewayMessage(submit=message))

    async def close(self) -> None:
        self.next.cancel()
        await asyncio.wait([self.next])
        await self._outputs.aclose()

    async def _read(self) -> AsyncIterator[dense_pb2.GatewayMessage]:
        while True:
            yield await self._requests.get()

    async def _ignore(self, metadata: object) -> None: ...


def test_each_stream_gets_the_tokens_of_its_sequences() -> None:
    async def run() -> None:
        submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        engine = Mock(submit=submitted.put_nowait)
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        servicer.set_engine(engine, Mock(), (), VOCAB_SIZE)
        servicer.set_info(dense_pb2.DenseInfo())
        streams, sequences = [Stream(servicer) for _ in range(3)], []
        for seq_id, stream in enumerate([0, 1, 0, 2], start=2**63):
            streams[stream].send(submit(seq_id, [5, 6], 4))
            sequences.append(await submitted.get())
        await streams[2].close()
        rows = np.empty(4, object)
        rows[:] = sequences
        decoded = DecodedTokens(
            np.array([each.stream for each in sequences]),
            np.array([each.seq_id for each in sequences], np.uint64),
            np.array([10, 11, 12, 13]),
            rows,
        )
        servicer.streams.deliver(StepReport(7, outputs=StepOutputs(decoded)))
        first, second = await streams[0].next, await streams[1].next
        assert (first.step_id, list(first.seq_ids), list(first.token_ids)) == (7, [2**63, 2**63 + 2], [10, 12])
        assert (second.step_id, list(second.seq_ids), list(second.token_ids)) == (7, [2**63 + 1], [11])
        await streams[0].close()
        await streams[1].close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_resubmitted_sequence_gets_no_tokens_of_its_first_submission() -> None:
    async def run() -> None:
        submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        engine = Mock(submit=submitted.put_nowait)
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        servicer.set_engine(engine, Mock(), (), VOCAB_SIZE)
        servicer.set_info(dense_pb2.DenseInfo())
        old, new = Stream(servicer), Stream(servicer)
        old.send(submit(1, [5, 6], 4))
        first = await submitted.get()
        new.send(submit(1, [5, 6], 4))
        second = await submitted.get()
        engine.cancel.assert_called_once_with(1)
        for sequence, token_id in ((first, 7), (second, 8)):
            outputs = StepOutputs(others=[SequenceOutput(sequence, (token_id,), None)])
            servicer.streams.deliver(StepReport(1, [], outputs))
        output = await new.next
        assert list(output.token_ids) == [8], "the gateway would count both as consecutive tokens"
        assert not old.next.done()
        await old.close()
        await new.close()
        assert engine.cancel.call_count == 2, "the old stream must not cancel the sequence again"

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_search_with_impossible_beams_is_refused_and_its_stream_goes_on() -> None:
    async def run() -> None:
        submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        engine = Mock(submit=submitted.put_nowait)
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        servicer.set_engine(engine, Mock(), (), VOCAB_SIZE)
        servicer.set_info(dense_pb2.DenseInfo(vocab_size=VOCAB_SIZE))
        stream = Stream(servicer)
        message = submit(1, [5, 6], 4)
        asked = message.spec.beam_search
        asked.num_beams = asked.num_answers = 2
        asked.options.early_stopping = sampling_pb2.EARLY_STOPPING_NEVER
        message.search.beams.add(token_ids=[50])
        stream.send(message)
        [end] = (await stream.next).ended
        assert (end.seq_id, end.reason) == (1, dense_pb2.SequenceEnd.ERROR)
        assert end.status_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert end.message == "a beam of a search has token id 50, the vocabulary has 50 tokens"
        stream.send(submit(2, [5, 6], 4))
        assert (await submitted.get()).seq_id == 2, "the stream still takes sequences"
        await stream.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_search_whose_gateway_would_lose_its_log_probabilities_is_refused() -> None:
    """A gateway of a version before rows of them."""

    async def run() -> None:
        submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        servicer.set_engine(Mock(submit=submitted.put_nowait), Mock(), (), VOCAB_SIZE)
        servicer.set_info(dense_pb2.DenseInfo(vocab_size=VOCAB_SIZE))
        stream = Stream(servicer)

        def search(seq_id: int, **fields: int) -> dense_pb2.GatewayMessage:
            message = submit(seq_id, [5, 6], 4)
            spec = message.spec
            spec.MergeFrom(sequence_pb2.SequenceSpec(**fields))
            spec.beam_search.num_beams = spec.beam_search.num_answers = 2
            spec.beam_search.options.early_stopping = sampling_pb2.EARLY_STOPPING_NEVER
            return message

        stream.send(search(1, num_logprobs=0))
        [end] = (await stream.next).ended
        assert end.seq_id == 1 and "it is of an older version" in end.message
        assert end.status_code == grpc.StatusCode.UNAVAILABLE.value[0], "it is not the client's fault"
        stream.send(search(3))
        assert (await submitted.get()).seq_id == 3, "without log-probabilities it has nothing to lose"
        reading = search(5, num_logprobs=0)
        reading.spec.beam_search.reads_logprob_rows = True
        stream.send(reading)
        assert (await submitted.get()).seq_id == 5
        await stream.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


class Asked(Feature):
    """Writes down of which sequences it is asked."""

    def __init__(self, name: str, *, sees_all: bool = False) -> None:
        self.name, self.sees_all = name, sees_all
        self.asked_of: list[str] = []

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceFeature | None:
        self.asked_of.append(spec.request_id)
        return None if self.sees_all else SequenceFeature()


def test_features_are_asked_only_of_sequences_that_ask_for_them() -> None:
    async def run() -> None:
        submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        toy, adapter, form = Asked("toy"), Asked("adapter"), Asked("structured_output")
        strict = Asked("strict", sees_all=True)
        servicer.set_engine(Mock(submit=submitted.put_nowait), Mock(), (toy, adapter, form, strict), VOCAB_SIZE)
        servicer.set_info(dense_pb2.DenseInfo(vocab_size=VOCAB_SIZE))
        stream = Stream(servicer)
        messages = {name: submit(seq_id, [5, 6], 4) for seq_id, name in enumerate(("plain", "all", "form"), start=1)}
        for name, message in messages.items():
            message.spec.request_id = name
        messages["all"].spec.features["toy"] = b""
        messages["all"].spec.adapter.hash = "ab"
        messages["form"].spec.sampling.structured_output.regex = "a+"
        num_features = []
        for message in messages.values():
            stream.send(message)
            num_features.append(len((await submitted.get()).features))
        assert num_features == [0, 2, 1]
        assert (toy.asked_of, adapter.asked_of, form.asked_of) == (["all"], ["all"], ["form"])
        assert strict.asked_of == ["plain", "all", "form"]
        unknown = submit(4, [5, 6], 4)
        unknown.spec.features["other"] = b""
        stream.send(unknown)
        [end] = (await stream.next).ended
        assert end.seq_id == 4 and "has no feature 'other'" in end.message
        await stream.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_message_for_a_feature_that_reads_none_is_refused_and_its_stream_goes_on() -> None:
    """As one for a feature that is not known: it is of a gateway of another version."""

    async def run() -> None:
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        servicer.set_engine(Mock(), Mock(), (AdapterFeature(0, None),), VOCAB_SIZE)
        servicer.set_info(dense_pb2.DenseInfo(vocab_size=VOCAB_SIZE))
        stream = Stream(servicer)
        message = submit(4, [5, 6], 4)
        message.spec.features["adapter"] = b""
        stream.send(message)
        [end] = (await stream.next).ended
        assert end.seq_id == 4 and "has no feature 'adapter'" in end.message
        await stream.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_sequences_with_tokens_or_beams_count_as_recovered() -> None:
    async def run() -> None:
        submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        registry = new_registry("dense")
        servicer = DenseServicer(DenseMetrics(registry), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        servicer.set_engine(Mock(submit=submitted.put_nowait), Mock(), (), VOCAB_SIZE)
        servicer.set_info(dense_pb2.DenseInfo(vocab_size=VOCAB_SIZE))
        stream = Stream(servicer)
        search = submit(1, [5, 6], 4)
        asked = search.spec.beam_search
        asked.num_beams = asked.num_answers = 2
        asked.options.early_stopping = sampling_pb2.EARLY_STOPPING_NEVER
        again = dense_pb2.Submit.FromString(search.SerializeToString())
        again.seq_id = 5
        again.search.beams.add(token_ids=[7])
        for message in (search, again):
            stream.send(message)
            await submitted.get()
        assert registry.get_sample_value("twostroke_dense_recovered_sequences_total") == 1
        await stream.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_message_that_cannot_be_handled_ends_only_its_own_stream() -> None:
    """Otherwise the gateway would wait for ever, because no task reads its messages."""

    async def run() -> None:
        submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        engine = Mock(submit=submitted.put_nowait)
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        servicer.set_engine(engine, Mock(), (), VOCAB_SIZE)
        servicer.set_info(dense_pb2.DenseInfo())
        bad, good = Stream(servicer), Stream(servicer)
        good.send(submit(1, [5, 6], 4))
        sequence = await submitted.get()
        engine.submit = Mock(side_effect=ArithmeticError("no such number"))
        bad.send(submit(2, [5, 6], 4))
        with pytest.raises(ArithmeticError, match="no such number"):
            await bad.next
        servicer.streams.deliver(StepReport(1, [], StepOutputs(others=[SequenceOutput(sequence, (7,), None)])))
        assert list((await good.next).token_ids) == [7]
        await good.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize("wait_ms", [0, 50, 60_000])
def test_a_gateway_may_wait_until_the_worker_serves(wait_ms: int) -> None:
    async def run() -> None:
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        servicer.set_engine(Mock(), Mock(), (), VOCAB_SIZE)
        servicer.status.state = dense_pb2.DenseStatus.ATTACHING
        asking = asyncio.create_task(servicer.GetInfo(dense_pb2.GetInfoRequest(wait_ms=wait_ms), Mock()))
        if wait_ms < 1000:
            with pytest.raises(PeerError, match="it is attaching"):
                await asking
        else:
            await asyncio.sleep(0.1)
            assert not asking.done()
            servicer.set_info(dense_pb2.DenseInfo(vocab_size=7))
            assert (await asking).vocab_size == 7

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_standby_takes_over_with_or_without_weights_but_not_while_it_loads() -> None:
    async def run() -> None:
        servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), MAX_MESSAGE_BYTES)
        request = dense_pb2.TakeOverRequest(returns_at_once=True)
        with pytest.raises(PeerError, match="has not loaded its weights yet"):
            await servicer.TakeOver(request, Mock())
        assert not servicer.may_attach.is_set()
        servicer.status.state = dense_pb2.DenseStatus.STANDBY
        await servicer.TakeOver(request, Mock())
        assert servicer.may_attach.is_set()
        waiting = asyncio.create_task(servicer.TakeOver(dense_pb2.TakeOverRequest(), Mock()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        servicer.status.state = dense_pb2.DenseStatus.SERVING
        await waiting

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
