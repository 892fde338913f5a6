"""If a stream of plans ends with an error, the attention worker and its cache continue."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from services.attn_worker.build import AttentionSetup
from services.attn_worker.service import SERVICE_NAME
from services.attn_worker.servicer import AttentionServicer
from services.channel import message_link
from services.channel.message_link import MessageLink
from services.common.config import AttentionSection, ModelSection
from services.common.errors import PeerError
from services.common.resolve import resolve_model
from services.pb import attn_pb2, attn_pb2_grpc, stall_pb2, step_pb2
from services.rpc.server import GrpcServer
from services.rpc.spans import NoTracer
from services.step import PlanEntry
from services.step.codec import encode_plan
from tests.support.plans import plan_of

MAX_PLAN_BYTES = 1 << 20
EPOCH = 0x5EA1_ED5E_0000_0003
TEST_LIMIT_S = 60.0
WAIT_TIMEOUT_S = 0.2  # time limit of a step for a dense worker that does nothing
BLOCK_SIZE, MAX_NUM_TOKENS = 4, 16
PROMPT = range(5, 5 + 3 * BLOCK_SIZE)


@asynccontextmanager
async def attention_worker(directory: Path) -> AsyncIterator[tuple[AttentionServicer, Any]]:
    """The servicer, and a stub of it over a real connection."""

    async def on_stall(stall: stall_pb2.Stall | None) -> None:
        raise AssertionError(stall)

    address = f"unix:{directory}/attention.sock"
    server = GrpcServer(address, [SERVICE_NAME], max_message_bytes=1 << 20)
    section = AttentionSection(num_blocks=8, block_size=BLOCK_SIZE)
    model = resolve_model(ModelSection(), "cpu")
    setup = AttentionSetup(section, model)
    arguments = setup, EPOCH, WAIT_TIMEOUT_S, CollectorRegistry(), NoTracer(), TEST_LIMIT_S, on_stall
    servicer = AttentionServicer(*arguments, max_message_bytes=MAX_PLAN_BYTES)
    attn_pb2_grpc.add_AttentionWorkerServicer_to_server(servicer, server.server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield servicer, attn_pb2_grpc.AttentionWorkerStub(channel)
    finally:
        servicer.abort()
        await server.stop(0.0)
        servicer.stop()


class Plans:
    """The dense worker's end: plans go by gRPC or by the link, and answers come the same way."""

    def __init__(self, stub: Any, reply: attn_pb2.AttachReply) -> None:
        metadata = [("epoch", str(reply.epoch)), ("attachment-id", str(reply.attachment_id))]
        self._answers: asyncio.Queue[attn_pb2.PlanAnswer] = asyncio.Queue()
        self.link = None
        self.errors: list[PeerError] = []
        if reply.plan_link:
            self.link = MessageLink.connect(reply.plan_link, MAX_PLAN_BYTES)
            loop = asyncio.get_running_loop()
            self.link.receive(lambda message: loop.call_soon_threadsafe(self._put, message), self.errors.append)
            metadata.append(("plan-link", "1"))
        self.call = stub.Execute(metadata=metadata)

    def _put(self, message: bytes) -> None:
        self._answers.put_nowait(attn_pb2.PlanAnswer.FromString(message))

    async def write(self, plan: step_pb2.StepPlan) -> None:
        if self.link is None:
            await self.call.write(plan)
        else:
            self.link.send(plan.SerializeToString())

    async def read(self) -> attn_pb2.PlanAnswer:
        return await (self.call.read() if self.link is None else self._answers.get())


async def attach(stub: Any, *, takes_plan_link: bool = False) -> attn_pb2.AttachReply:
    return await stub.Attach(
        attn_pb2.AttachRequest(
            takes_plan_link=takes_plan_link,
            dtype="float32",
            kv_cache_dtype="model",
            model_fingerprint=resolve_model(ModelSection(), "cpu").config.fingerprint,
            weights_hash="00",
            max_num_seqs=4,
            max_num_batched_tokens=MAX_NUM_TOKENS,
        )
    )


async def open_one(stub: Any, reply: attn_pb2.AttachReply, seq_id: int = 1) -> tuple[Plans, attn_pb2.SequenceOpened]:
    """Begins a stream of plans and opens a sequence with PROMPT."""
    call = Plans(stub, reply)
    new = step_pb2.NewSequence(seq_id=seq_id, token_ids=PROMPT, num_prompt_tokens=len(PROMPT))
    await call.write(step_pb2.StepPlan(new_sequences=[new]))
    return call, (await call.read()).opened


def plan(num_tokens: int) -> step_pb2.StepPlan:
    return encode_plan(plan_of(1, PlanEntry(1, 0, num_tokens, 1)))


async def stall(call: Plans, stub: Any) -> None:
    """Begins a step for which the dense worker never signals that its queries, keys and values are ready."""
    await call.write(plan(len(PROMPT)))


async def attach_again(call: Plans, stub: Any) -> None:
    await attach(stub)


async def exceed_a_limit(call: Plans, stub: Any) -> None:
    await call.write(plan(MAX_NUM_TOKENS + 1))


@pytest.mark.parametrize("takes_plan_link", [False, True], ids=["gRPC", "link"])
@pytest.mark.parametrize(
    ("end", "status"),
    [
        (stall, grpc.StatusCode.UNAVAILABLE),
        (attach_again, grpc.StatusCode.FAILED_PRECONDITION),
        (exceed_a_limit, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_the_worker_continues_after_a_stream_ends_with_an_error(
    end: Callable[[Plans, Any], Coroutine[Any, Any, None]],
    status: grpc.StatusCode,
    takes_plan_link: bool,
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with attention_worker(tmp_path) as (servicer, stub):
            failure = asyncio.create_task(servicer.wait_failure())
            plans, opened = await open_one(stub, await attach(stub, takes_plan_link=takes_plan_link))
            assert (plans.link is not None) == takes_plan_link and opened.seq_id == 1
            await end(plans, stub)
            assert await plans.call.code() is status
            while servicer._readers:  # noqa: ASYNC110  the test's limit bounds it
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)  # for the task to notice
            assert not failure.done(), failure.exception()
            reply = await attach(stub)
            assert list(reply.open_seq_ids) == [1], "the sequence must be kept for the next attachment"
            await open_one(stub, reply, seq_id=2)
            failure.cancel()

    asyncio.run(asyncio.wait_for(run(), TEST_LIMIT_S))


def test_a_plan_that_is_too_large_for_the_link_ends_the_stream(tmp_path: Path) -> None:
    async def run() -> None:
        async with attention_worker(tmp_path) as (_, stub):
            plans, _ = await open_one(stub, await attach(stub, takes_plan_link=True))
            assert plans.link is not None
            plans.link._socket.sendall(struct.pack("!Id", MAX_PLAN_BYTES + 1, 0.0))  # its length comes first
            assert await plans.call.code() is grpc.StatusCode.UNAVAILABLE
            assert str(MAX_PLAN_BYTES) in await plans.call.details()

    asyncio.run(asyncio.wait_for(run(), TEST_LIMIT_S))


def test_the_stream_ends_when_nobody_has_connected_to_the_link(tmp_path: Path) -> None:
    """And the attachment with it: a worker that leaves then waits for nobody."""

    async def run() -> None:
        async with attention_worker(tmp_path) as (servicer, stub):
            reply = await attach(stub, takes_plan_link=True)
            metadata = {"epoch": str(reply.epoch), "attachment-id": str(reply.attachment_id), "plan-link": "1"}
            call = stub.Execute(metadata=tuple(metadata.items()))
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert "nobody has connected" in await call.details()
            await servicer.leave(2 * TEST_LIMIT_S)

    asyncio.run(asyncio.wait_for(run(), TEST_LIMIT_S))


def test_plans_come_by_grpc_where_there_can_be_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_link, "SHM_DIR", tmp_path / "missing")

    async def run() -> None:
        async with attention_worker(tmp_path) as (_, stub):
            plans, opened = await open_one(stub, await attach(stub, takes_plan_link=True))
            assert plans.link is None and opened.seq_id == 1

    asyncio.run(asyncio.wait_for(run(), TEST_LIMIT_S))


def test_the_worker_ends_with_its_engine_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls nobody waits for the thread, so nobody but the worker itself can notice."""

    async def body() -> None:
        async with attention_worker(tmp_path) as (servicer, stub):
            await attach(stub)
            failing = asyncio.create_task(servicer.wait_failure())
            assert not (await asyncio.wait([failing], timeout=0.1))[0]

            def fail() -> bool:
                raise PeerError("the thread has a fault")

            engine = servicer._require_engine()
            monkeypatch.setattr(engine._thread, "_work", fail)
            await asyncio.wrap_future(engine.submit(int))
            with pytest.raises(PeerError, match="the thread has a fault"):
                await asyncio.wait_for(failing, TEST_LIMIT_S)
            with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
                await attach(stub)

    asyncio.run(body())
