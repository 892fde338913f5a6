"""A sequence with a form, or with beams, reaches the engine when these are ready; others do not wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest

from services.common.errors import InvalidRequest
from services.dense_worker.engine.sequence import FinishReason, Sequence
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.features import installed
from services.dense_worker.features.beams.add_beams import prepare_beams
from services.dense_worker.features.grammar.grammar_feature import GrammarFeature
from services.dense_worker.metrics import DenseMetrics
from services.dense_worker.servicer import DenseServicer
from services.pb import dense_pb2, sampling_pb2
from services.rpc.metrics import new_registry
from services.rpc.spans import NoTracer
from services.step import SequenceSpec
from tests.support.clients.dense_stream import submit
from tests.support.dense.sequences import new_sequence
from tests.support.running_gateway import until

TIMEOUT_S = 60.0
GATEWAY = 7


class LateGrammars:
    """Makes each matcher when the test says so, with the result that it gives."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[object]] = []  # in the order of their sequences

    async def make(self, spec: SequenceSpec, output_token_ids: tuple[int, ...]) -> object:
        self.waiting.append(asyncio.get_running_loop().create_future())
        return await self.waiting[-1]


class Front:
    """A servicer with one gateway's stream."""

    def __init__(self) -> None:
        self.grammars, self.engine = LateGrammars(), Mock()
        grammars: Any = self.grammars
        dense = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()), 2**20)
        dense.set_engine(self.engine, Mock(), [GrammarFeature(grammars)], 50)
        dense.set_info(dense_pb2.DenseInfo(vocab_size=32))
        self._requests: asyncio.Queue[dense_pb2.GatewayMessage] = asyncio.Queue()
        context: Any = Mock(peer=lambda: "test", send_initial_metadata=self._ignore)
        self.outputs = dense.Connect(self._read(), context)
        self.next = asyncio.create_task(anext(self.outputs))

    async def send(self, **message: Any) -> None:
        self._requests.put_nowait(dense_pb2.GatewayMessage(**message))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def submitted(self) -> list[int]:
        return [call.args[0].seq_id for call in self.engine.submit.call_args_list]

    async def _read(self) -> AsyncIterator[dense_pb2.GatewayMessage]:
        while True:
            yield await self._requests.get()

    async def _ignore(self, metadata: object) -> None: ...


def formed(seq_id: int) -> dense_pb2.Submit:
    return submit(seq_id, [5, 6], 4, structured_output=sampling_pb2.StructuredOutput(regex="a"))


def run(test: Callable[[Front], Awaitable[None]]) -> None:
    async def body() -> None:
        front = Front()
        await front.settle()
        await test(front)
        front.next.cancel()
        await asyncio.wait([front.next])
        await front.outputs.aclose()

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))


def test_others_do_not_wait_for_its_grammar() -> None:
    async def test(front: Front) -> None:
        await front.send(submit=formed(1))
        await front.send(submit=submit(2, [5, 6], 4))
        assert front.submitted == [2]
        front.grammars.waiting[0].set_result("grammar")
        await front.settle()
        assert front.submitted == [2, 1]
        assert [each.matcher for each in front.engine.submit.call_args.args[0].features] == ["grammar"]

    run(test)


def test_a_form_that_cannot_be_compiled_fails_its_sequence_alone() -> None:
    async def test(front: Front) -> None:
        for seq_id, error in ((1, InvalidRequest("the form is bad")), (2, ArithmeticError("a bug"))):
            await front.send(submit=formed(seq_id))
            front.grammars.waiting[-1].set_exception(error)
            [end] = (await front.next).ended
            front.next = asyncio.create_task(anext(front.outputs))
            assert (end.seq_id, end.reason) == (seq_id, dense_pb2.SequenceEnd.ERROR)
            assert str(error) in end.message
        await front.send(submit=submit(3, [5, 6], 4))
        assert front.submitted == [3]

    run(test)


def test_a_sequence_cancelled_meanwhile_is_never_submitted() -> None:
    async def test(front: Front) -> None:
        await front.send(submit=formed(1))
        await front.send(cancel=dense_pb2.Cancel(seq_id=1))
        front.grammars.waiting[0].set_result("grammar")
        await front.settle()
        assert front.submitted == []

    run(test)


def test_a_resumed_gateway_claims_the_blocks_of_sequences_that_wait_for_grammars() -> None:
    async def test(front: Front) -> None:
        await front.send(submit=formed(1))
        await front.send(resumed=dense_pb2.Resumed(gateway=GATEWAY))
        front.engine.close_orphans.assert_not_called()
        front.grammars.waiting[0].set_result("grammar")
        await front.settle()
        assert front.submitted == [1]
        front.engine.close_orphans.assert_called_once_with(GATEWAY)
        names = [call[0] for call in front.engine.method_calls]
        assert names.index("submit") < names.index("close_orphans")

    run(test)


def test_the_beams_of_a_search_are_read_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front) -> None:
        started, may_end, threads = threading.Event(), threading.Event(), list[threading.Thread]()

        def slow(sequence: Sequence, message: dense_pb2.Submit, vocab_size: int) -> None:
            threads.append(threading.current_thread())
            started.set()
            assert may_end.wait(TIMEOUT_S)
            prepare_beams(sequence, message, vocab_size)

        monkeypatch.setattr(installed, "prepare_beams", slow)
        options = {"early_stopping": "EARLY_STOPPING_NEVER"}
        beams = [dense_pb2.Beam(token_ids=[token_id]) for token_id in (7, 8)]
        options = {"num_beams": 2, "num_answers": 2, "options": options}
        search = dense_pb2.BeamProgress(beams=beams)
        await front.send(submit=submit(1, [5, 6], 4, beam_search=options, search=search))
        await front.send(submit=submit(2, [5, 6], 4))
        assert await asyncio.to_thread(started.wait, TIMEOUT_S) and front.submitted == [2]
        may_end.set()
        await until(lambda: len(front.submitted) == 2)
        assert front.submitted == [2, 1] and threads[0] is not threading.current_thread()
        assert front.engine.submit.call_args.args[0].output_token_ids == [7]

    run(test)


def test_beams_that_no_search_has_fail_their_sequence_alone() -> None:
    async def test(front: Front) -> None:
        beams = [dense_pb2.Beam(token_ids=[7] * length) for length in (1, 2)]
        options = {"num_beams": 2, "num_answers": 2, "options": {"early_stopping": "EARLY_STOPPING_NEVER"}}
        search = dense_pb2.BeamProgress(beams=beams)
        await front.send(submit=submit(1, [5, 6], 4, beam_search=options, search=search))
        [end] = (await front.next).ended
        front.next = asyncio.create_task(anext(front.outputs))
        assert (end.seq_id, end.reason) == (1, dense_pb2.SequenceEnd.ERROR) and "[1, 2] tokens" in end.message
        await front.send(submit=submit(2, [5, 6], 4))
        assert front.submitted == [2]

    run(test)


def sequence(max_tokens: int) -> Sequence:
    return new_sequence(1, "r", [5], Mock(), max_tokens, stop_token_ids=frozenset([2]))


def test_a_form_that_ends_with_the_last_allowed_token_is_complete() -> None:
    each = sequence(2)
    assert each.append([7]) is None
    assert each.append([8], is_complete=True) is FinishReason.STOP
    assert sequence(1).append([7]) is FinishReason.LENGTH
    assert sequence(5).append([7], is_complete=True) is FinishReason.STOP
