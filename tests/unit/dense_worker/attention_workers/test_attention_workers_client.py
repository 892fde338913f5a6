"""What the client asks of several attention workers before they serve together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from services.channel import ChannelSpec
from services.common.config import PeerSection
from services.common.errors import ConfigError, InvalidRequest
from services.dense_worker.attention_workers.attention_workers_client import (
    AttentionWorkersClient,
    _cache_of_orphans,
    _check_alike,
    _Link,
)
from services.dense_worker.engine.attachment import AttachedCache
from services.dense_worker.engine.attention_client import AttachOptions, Ended, execute, receive_answers
from services.pb import attn_pb2, attn_pb2_grpc, step_pb2
from services.step import PlanAccepted, SequenceOpened, StepPlan
from services.step.codec import encode_accepted, encode_plan

SPEC = ChannelSpec(max_tokens=1, qkv_size=1, attn_size=1, dtype=torch.float32)
LIMIT_S = 30.0


class Call:
    """A stream of plans to a worker that closes what it is asked to, each of 5 blocks."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def write(self, plan: Any) -> None:
        self.closed += plan.close_seq_ids

    async def read(self) -> attn_pb2.PlanAnswer:
        return encode_accepted(PlanAccepted(0, num_freed_blocks=5 * len(self.closed)))


class Closing(attn_pb2_grpc.AttentionWorkerServicer):
    """An attention worker over gRPC that answers each plan, until one closes nothing."""

    async def Execute(
        self, request_iterator: AsyncIterator[step_pb2.StepPlan], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[attn_pb2.PlanAnswer]:
        async for plan in request_iterator:
            if not plan.close_seq_ids:
                return
            yield encode_accepted(PlanAccepted(plan.step_id, num_freed_blocks=5 * len(plan.close_seq_ids)))


@contextlib.asynccontextmanager
async def served(directory: Path) -> AsyncIterator[attn_pb2_grpc.AttentionWorkerStub]:
    server = grpc.aio.server()
    attn_pb2_grpc.add_AttentionWorkerServicer_to_server(Closing(), server)
    address = f"unix:{directory}/attn.sock"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield attn_pb2_grpc.AttentionWorkerStub(channel)
    finally:
        await server.stop(0)


def make_link(cache_id: int, orphans: dict[int, int] | None = None, **reply: int) -> _Link:
    worker: Any = SimpleNamespace(address=f"unix:/{cache_id}")
    cache = AttachedCache(cache_id, 100, 50, orphans or {})
    answer = attn_pb2.AttachReply(block_size=16, max_model_len=1600)
    for field, value in reply.items():
        setattr(answer, field, value)
    channel: Any = None
    call: Any = Call()
    return _Link(worker, cache, answer, channel, call)


def make_client() -> AttentionWorkersClient:
    options = AttachOptions("", "", 1, SPEC, torch.device("cpu"), 1.0)
    return AttentionWorkersClient(["unix:/0", "unix:/1"], options, (), PeerSection(), asyncio.Event())


def test_a_worker_with_other_blocks_is_refused_by_its_address() -> None:
    other = make_link(1, block_size=32)
    with pytest.raises(ConfigError, match="the worker at unix:/1 has block_size 32, that at unix:/0 has 16: start all"):
        _check_alike(other.reply, [make_link(0)], "the worker at unix:/1")
    _check_alike(make_link(1).reply, [make_link(0)], "the worker at unix:/1")


def test_a_sequence_that_two_workers_have_is_that_of_the_one_with_more_of_it() -> None:
    links = [make_link(0, {1: 3, 2: 8}), make_link(4, {1: 5, 3: 1})]
    assert _cache_of_orphans(links) == {1: 4, 2: 0, 3: 4}


def test_what_goes_on_elsewhere_is_closed_and_its_blocks_are_free() -> None:
    link = make_link(0, {1: 3, 2: 8, 3: 2})

    async def run() -> None:
        await make_client()._close_others(link, [2])

    asyncio.run(run())
    call: Any = link.call
    assert (call.closed, link.cache.orphaned_blocks, link.cache.num_free_blocks) == ([1, 3], {2: 8}, 60)


def test_a_worker_that_has_closed_sequences_answers_plans_by_the_same_stream(tmp_path: Path) -> None:
    answers = list[SequenceOpened | PlanAccepted]()

    async def run() -> None:
        link = make_link(0, {1: 3, 2: 8})
        async with served(tmp_path) as stub:
            link.call = execute(stub, 1, 1)
            await make_client()._close_others(link, ())
            assert (link.cache.orphaned_blocks, link.cache.num_free_blocks) == ({}, 60)
            await link.call.write(encode_plan(StepPlan(7, close_seq_ids=(9,))))
            await link.call.write(encode_plan(StepPlan(8)))
            with pytest.raises(Ended, match="the attention worker ended the stream of plans"):
                await receive_answers(link.call, answers.append)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert answers == [PlanAccepted(7, num_freed_blocks=5, errors={})]


def test_the_last_worker_is_not_taken_away_and_an_unknown_one_is_named() -> None:
    async def run() -> None:
        client = make_client()
        attachment: Any = SimpleNamespace()
        listener: Any = SimpleNamespace()
        client._attachment, client._listener, client._links = attachment, listener, {0: make_link(0)}
        with pytest.raises(InvalidRequest, match="at unix:/0 is the last one: add another one before"):
            await client.remove("unix:/0", 1.0)
        with pytest.raises(InvalidRequest, match="no attention worker at unix:/9 is attached; there are unix:/0"):
            await client.remove("unix:/9", 1.0)

    asyncio.run(run())


def test_a_plan_is_answered_when_the_last_of_its_workers_has_answered_or_gone() -> None:
    answers = list[PlanAccepted]()

    async def run() -> None:
        client = make_client()
        attachment: Any = SimpleNamespace()
        listener: Any = SimpleNamespace(
            on_answer=lambda attachment, answer: answers.append(answer), on_cache_lost=lambda *arguments: None
        )
        joined: Any = SimpleNamespace(lose=lambda cache_id: None)
        client._attachment, client._listener, client._joined = attachment, listener, joined
        client._links = {each: make_link(each) for each in (0, 1, 2)}
        client._awaited = {7: {0, 1}, 8: {1}}
        client._pass_answer(attachment, 0, PlanAccepted(7, num_freed_blocks=4))
        client._pass_answer(attachment, 2, PlanAccepted(7, errors={9: "no room"}))  # it frees nothing
        end: Any = SimpleNamespace(is_crash=True)
        client._lose(attachment, 1, end)

    asyncio.run(run())
    assert [(each.step_id, each.cache_id, each.is_last) for each in answers] == [
        (7, 0, False),
        (7, 2, False),
        (7, 1, True),
        (8, 1, True),
    ]
