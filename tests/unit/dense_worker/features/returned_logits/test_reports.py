"""Messages of reports: of limited size, in order, and before the tokens that they belong to."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from services.common.sampling_params import SamplingParams
from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.sequence import SequenceOutput
from services.dense_worker.engine.step_outputs import StepOutputs
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.features.report import MAX_PART_BYTES
from services.dense_worker.features.returned_logits.reports import MAX_LOGITS_BYTES, Logits, PromptLogprobs
from services.dense_worker.metrics import DenseMetrics
from services.dense_worker.servicer import DenseServicer
from services.pb import dense_pb2
from services.rpc.metrics import new_registry
from services.rpc.spans import NoTracer
from tests.support.dense.sequences import new_sequence

TOKEN = TokenLogprobs(-1.0, ((3, -0.5), (4, -0.6)))


def messages_of(*reports: Logits | PromptLogprobs) -> list[dense_pb2.StepOutput]:
    """What a gateway gets of a step in which its sequence has these reports and a token."""
    servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()))
    sequence, outbox = new_sequence(1, "r", [5, 6], SamplingParams(), 4), asyncio.Queue[Any]()
    servicer._owned[1] = sequence, outbox
    outputs = StepOutputs(others=[SequenceOutput(sequence, (9,), None)])
    servicer.deliver(StepReport(7, outputs=outputs, reports=[(sequence, each) for each in reports]))
    return [outbox.get_nowait() for _ in range(outbox.qsize())]


def values(num_rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).random((num_rows, width), np.float32)


@pytest.mark.parametrize("is_output", [False, True])
def test_large_logits_come_in_several_messages_before_the_token(is_output: bool) -> None:
    width = 100_000
    rows = values(25, width)
    *parts, last = messages_of(Logits(1, 3, rows, is_output))
    assert list(last.token_ids) == [9] and not any(part.token_ids for part in parts)
    assert all(each.step_id == 7 for each in (*parts, last))
    assert all(part.ByteSize() <= MAX_LOGITS_BYTES + 1000 for part in parts) and len(parts) > 1
    found = [each for part in (*parts, last) for each in (part.logits if is_output else part.prompt_logits)]
    assert [each.start for each in found] == np.cumsum([3, *(each.num_rows for each in found)])[:-1].tolist()
    joined = b"".join(each.values for each in found)
    assert np.array_equal(np.frombuffer(joined, np.float32).reshape(-1, width), rows)


def test_what_is_small_joins_the_message_of_the_step() -> None:
    progress, hidden = Logits(1, 0, np.empty((5, 0), np.float32)), Logits(1, 0, values(2, 8))
    [message] = messages_of(progress, hidden, PromptLogprobs(1, 1, [TOKEN] * 3))
    assert [each.num_rows for each in message.prompt_logits] == [5, 2]
    assert len(message.prompt_logprobs[0].tokens) == 3 and list(message.token_ids) == [9]


def test_many_small_reports_do_not_become_one_large_message() -> None:
    tokens = [TOKEN] * 20_000
    messages = messages_of(*(PromptLogprobs(1, 1 + 20_000 * i, tokens) for i in range(6)))
    assert len(messages) > 2 and list(messages[-1].token_ids) == [9]
    assert all(each.ByteSize() < 4 * MAX_PART_BYTES for each in messages)
    spans = [span for each in messages for span in each.prompt_logprobs]
    assert [span.start for span in spans] == [1 + 20_000 * i for i in range(6)]


def test_a_long_prompt_is_divided() -> None:
    spans = [part.prompt_logprobs[0] for part, _ in PromptLogprobs(1, 1, [TOKEN] * 100_000).encode()]
    starts, sizes = [span.start for span in spans], [len(span.tokens) for span in spans]
    assert len(spans) > 1 and starts == np.cumsum([1, *sizes])[:-1].tolist() and sum(sizes) == 100_000


def test_reports_of_a_cancelled_sequence_go_nowhere() -> None:
    servicer = DenseServicer(DenseMetrics(new_registry("dense")), SequenceTracer(NoTracer()))
    sequence = new_sequence(1, "r", [5, 6], SamplingParams(), 4)
    servicer._owned[1] = new_sequence(1, "r", [5, 6], SamplingParams(), 4), Mock()
    servicer.deliver(StepReport(7, reports=[(sequence, Logits(1, 0, values(2, 8)))]))
    servicer._owned[1][1].put_nowait.assert_not_called()
