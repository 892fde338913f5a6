"""The stream of plans opens sequences. Each one is answered in order; if one cannot be opened, only that one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from services.attn_worker.build import AttentionSetup
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.runner.layer_runner import EagerLayerRunner
from services.attn_worker.servicer import AttentionServicer
from services.common.config import AttentionSection, ModelSection
from services.common.errors import InvalidRequest
from services.common.resolve import resolve_model
from services.pb import attn_pb2, stall_pb2, step_pb2
from services.rpc.spans import NoTracer
from services.step import PlanEntry
from services.step.codec import encode_plan
from tests.support.plans import plan_of

MAX_PLAN_BYTES = 1 << 20
EPOCH = 0x5EA1_ED5E_0000_0002
TIMEOUT_S = 60.0
NUM_BLOCKS, BLOCK_SIZE = 8, 4


class Context:
    """The context of a call by the first attachment."""

    def peer(self) -> str:
        return "test"

    def invocation_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(("epoch", str(EPOCH)), ("attachment-id", "1"))


def opening(seq_id: int, num_tokens: int) -> step_pb2.NewSequence:
    return step_pb2.NewSequence(seq_id=seq_id, token_ids=range(5, 5 + num_tokens), num_prompt_tokens=num_tokens)


async def answers_to(
    messages: list[step_pb2.StepPlan], count: int, failure: type[Exception] | None = None
) -> list[attn_pb2.PlanAnswer]:
    """Sends a stream of `messages` that stays open; returns its first `count` results.

    The worker must end with an error of type `failure`; if it is None, the worker must go on.
    """

    async def on_stall(stall: stall_pb2.Stall | None) -> None:
        raise AssertionError(stall)

    async def requests() -> AsyncIterator[step_pb2.StepPlan]:
        for message in messages:
            yield message
        await is_over.wait()

    is_over = asyncio.Event()
    model = resolve_model(ModelSection(), "cpu")
    section = AttentionSection(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    arguments = AttentionSetup(section, model), EPOCH, TIMEOUT_S, CollectorRegistry(), NoTracer(), TIMEOUT_S, on_stall
    servicer = AttentionServicer(*arguments, max_message_bytes=MAX_PLAN_BYTES)
    request = attn_pb2.AttachRequest(
        dtype="float32",
        kv_cache_dtype="model",
        model_fingerprint=model.config.fingerprint,
        weights_hash="00",
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    context: Any = Context()
    await servicer.Attach(request, context)
    results = servicer.Execute(requests(), context)
    try:
        return [await anext(results) for _ in range(count)]
    finally:
        is_over.set()
        await results.aclose()
        assert failure is None or type(servicer._failure.exception()) is failure
        assert failure is not None or not servicer._failure.done()
        servicer.abort()
        servicer.stop()


def run(
    messages: list[step_pb2.StepPlan], count: int, failure: type[Exception] | None = None
) -> list[attn_pb2.PlanAnswer]:
    return asyncio.run(asyncio.wait_for(answers_to(messages, count, failure), TIMEOUT_S))


def test_a_sequence_that_cannot_be_opened_is_refused_and_the_others_are_opened() -> None:
    too_long = NUM_BLOCKS * BLOCK_SIZE + 1
    messages = [
        step_pb2.StepPlan(new_sequences=[opening(1, 3), opening(2, too_long)]),
        step_pb2.StepPlan(new_sequences=[opening(3, 3)]),
    ]
    opened = [result.opened for result in run(messages, 3)]
    assert [each.seq_id for each in opened] == [1, 2, 3]
    assert [each.HasField("error") for each in opened] == [False, True, False]
    assert f"{too_long} tokens" in opened[1].error and opened[1].num_held_blocks == 0


def test_openings_and_closings_are_answered_in_the_order_of_the_stream() -> None:
    messages = [
        step_pb2.StepPlan(new_sequences=[opening(1, 3)]),
        step_pb2.StepPlan(step_id=1, close_seq_ids=[1], new_sequences=[opening(2, 3)]),
        step_pb2.StepPlan(new_sequences=[opening(1, 3)]),
    ]
    results = run(messages, 4)
    assert [(result.step_id, result.opened.seq_id) for result in results] == [(0, 1), (0, 2), (1, 0), (0, 1)]


def test_a_sequence_that_starts_empty_runs_in_the_plan_that_opens_it_and_only_a_refusal_is_answered() -> None:
    too_long = NUM_BLOCKS * BLOCK_SIZE + 1
    plan = encode_plan(plan_of(1, PlanEntry(1, 0, 3, 1), PlanEntry(2, 0, 3, 1)))
    plan.new_sequences.extend([opening(1, 3), opening(2, too_long)])
    for each in plan.new_sequences:
        each.starts_empty = True
    refused, accepted = run([plan], 2)
    assert refused.opened.seq_id == 2 and f"{too_long} tokens" in refused.opened.error
    assert [(each.seq_id, each.message) for each in accepted.errors] == [(2, "sequence 2 is not open")]


def test_an_unexpected_error_in_an_opening_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise MemoryError("no room for a table")

    monkeypatch.setattr(KVCache, "open_sequence", fail)
    with pytest.raises(MemoryError, match="no room for a table"):
        run([step_pb2.StepPlan(new_sequences=[opening(1, 3)])], 1, failure=MemoryError)


def test_an_unexpected_error_in_a_step_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(EagerLayerRunner, "launch", fail)
    plan = encode_plan(plan_of(1, PlanEntry(1, 0, 3, 1)))
    plan.new_sequences.append(opening(1, 3))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run([plan], 2, failure=RuntimeError)


@pytest.mark.parametrize(
    ("num_tokens", "message"), [([9, 8], "plan 1 has 17 tokens, the limit is 16"), ([1] * 5, "5 sequences, .* is 4")]
)
def test_a_plan_that_is_too_large_ends_the_stream(num_tokens: list[int], message: str) -> None:
    plan = encode_plan(plan_of(1, *(PlanEntry(seq_id, 0, n, n) for seq_id, n in enumerate(num_tokens, start=1))))
    plan.new_sequences.extend(opening(seq_id, n) for seq_id, n in enumerate(num_tokens, start=1))
    with pytest.raises(InvalidRequest, match=message):
        run([plan], len(num_tokens) + 1)


def test_a_plan_that_cannot_be_read_ends_the_stream() -> None:
    with pytest.raises(InvalidRequest, match="columns of plan 1 differ in length"):
        run([step_pb2.StepPlan(step_id=1, seq_ids=bytes(8), num_tokens=bytes(16))], 1)


def test_a_plan_for_an_unknown_lane_ends_the_stream() -> None:
    with pytest.raises(InvalidRequest, match=r"plan 1 is of lane 2, the attachment has lanes \[0\]"):
        run([step_pb2.StepPlan(step_id=1, lane=2)], 1)
