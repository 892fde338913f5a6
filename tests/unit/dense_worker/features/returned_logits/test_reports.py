"""Messages of reports: of limited size, in order, and before the tokens that they belong to."""

from __future__ import annotations

import queue
from typing import Any
from unittest.mock import Mock

import numpy as np

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.sequence import SequenceOutput
from services.dense_worker.engine.step_report import StepOutputs, StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.features.report import MAX_PART_BYTES, TokenReport
from services.dense_worker.gateway_streams import GatewayStreams
from services.pb import dense_pb2
from services.rpc.spans import NoTracer
from tests.support.dense.sequences import new_sequence

NAME = "hidden_states"


def messages_of(*reports: TokenReport) -> list[dense_pb2.StepOutput]:
    """What a gateway gets of a step in which its sequence has these reports and a token."""
    streams = GatewayStreams(SequenceTracer(NoTracer()))
    sequence, outbox = new_sequence(1, "r", [5, 6], SamplingParams(), 4), queue.SimpleQueue[Any]()
    streams._streams[sequence.stream] = outbox
    streams.add(sequence)
    outputs = StepOutputs(others=[SequenceOutput(sequence, (9,), None)])
    streams.deliver(StepReport(7, outputs=outputs, reports=[(sequence, each) for each in reports]))
    return [outbox.get_nowait() for _ in range(outbox.qsize())]


def values(num_rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).random((num_rows, width), np.float32)


def test_large_reports_come_in_several_messages_before_the_token() -> None:
    width = 100_000
    rows = values(25, width)
    *parts, last = messages_of(TokenReport(1, NAME, 3, rows))
    assert list(last.token_ids) == [9] and not any(part.token_ids for part in parts)
    assert all(each.step_id == 7 for each in (*parts, last))
    assert all(part.ByteSize() <= MAX_PART_BYTES + 1000 for part in parts) and len(parts) > 1
    found = [each for part in (*parts, last) for each in part.reports]
    assert {(each.seq_id, each.feature) for each in found} == {(1, NAME)}
    assert [each.start for each in found] == np.cumsum([3, *(each.num_tokens for each in found)])[:-1].tolist()
    joined = b"".join(each.values for each in found)
    assert np.array_equal(np.frombuffer(joined, np.float32).reshape(-1, width), rows)


def test_what_is_small_joins_the_message_of_the_step() -> None:
    progress, hidden = TokenReport(1, "progress", 0, np.empty((5, 0), np.uint8)), TokenReport(1, NAME, 0, values(2, 8))
    [message] = messages_of(progress, hidden)
    found = [(each.feature, each.num_tokens, len(each.values)) for each in message.reports]
    assert found == [("progress", 5, 0), (NAME, 2, 64)] and list(message.token_ids) == [9]


def test_many_small_reports_do_not_become_one_large_message() -> None:
    rows = values(20_000, 6)
    messages = messages_of(*(TokenReport(1, NAME, 1 + 20_000 * i, rows) for i in range(6)))
    assert len(messages) > 2 and list(messages[-1].token_ids) == [9]
    assert all(each.ByteSize() < MAX_PART_BYTES for each in messages)
    spans = [span for each in messages for span in each.reports]
    assert [span.start for span in spans] == [1 + 20_000 * i for i in range(6)]


def test_a_long_prompt_is_divided() -> None:
    spans = [part.reports[0] for part, _ in TokenReport(1, NAME, 1, values(100_000, 20)).encode()]
    starts, sizes = [span.start for span in spans], [span.num_tokens for span in spans]
    assert len(spans) > 1 and starts == np.cumsum([1, *sizes])[:-1].tolist() and sum(sizes) == 100_000


def test_reports_of_a_cancelled_sequence_go_nowhere() -> None:
    streams, outbox = GatewayStreams(SequenceTracer(NoTracer())), Mock()
    cancelled, sequence = (new_sequence(1, "r", [5, 6], SamplingParams(), 4) for _ in range(2))
    streams._streams[sequence.stream] = outbox
    streams.add(sequence)  # under the same id
    report = TokenReport(1, NAME, 0, values(2, 8))
    streams.deliver(StepReport(7, reports=[(cancelled, report)]))
    outbox.put.assert_not_called()
    streams.deliver(StepReport(7, reports=[(sequence, report)]))
    outbox.put.assert_called_once()
