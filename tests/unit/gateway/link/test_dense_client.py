"""The stream to the dense worker: tokens reach their sequences, even if the worker dies."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.common.config import PeerSection
from services.common.errors import (
    CapacityError,
    InvalidRequest,
    PeerError,
    RequestAborted,
    TwostrokeError,
)
from services.common.sampling_params import SamplingParams
from services.gateway.link.dense_client import FIRST_RETRY_S
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import FinishReason, JournalEntry
from services.pb import dense_pb2
from tests.support.clients.generation_requests import make_request, open_entry, take
from tests.support.running_gateway import run, until
from tests.support.workers.fake_dense import FakeDense


class Gateway:
    """A journal and a pool with one stream. `connections` is what the pool reported, in order."""

    def __init__(self, address: str, connect_timeout_s: float) -> None:
        self.journal = Journal()
        self.connections: list[bool] = []
        peers = PeerSection(connect_timeout_s=connect_timeout_s)
        self.pool = DensePool(address, peers, self.journal, self._on_connection)

    async def _on_connection(self, is_connected: bool) -> None:
        self.connections.append(is_connected)

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> JournalEntry:
        sampling = SamplingParams(temperature=0.5, top_k=None, seed=2**63 + 1)
        options = {"sampling": sampling, "stop_token_ids": (2, 3), "cache_salt": "salt"}
        request = make_request(request_id, prompt_token_ids=list(prompt), max_tokens=max_tokens, **options)
        entry = open_entry(self.journal, request)
        self.pool.submit(entry)
        return entry


@asynccontextmanager
async def connected(
    tmp_path: Path, dense: FakeDense, connect_timeout_s: float = 20.0
) -> AsyncIterator[tuple[Gateway, str]]:
    address = f"unix:{tmp_path}/dense.sock"
    await dense.start(address)
    gateway = Gateway(address, connect_timeout_s)
    task = asyncio.create_task(gateway.pool.run())
    await gateway.pool.wait_connected()
    try:
        yield gateway, address
    finally:
        task.cancel()
        await asyncio.wait([task])
        await dense.kill()


def count_up(submit: dense_pb2.Submit) -> Sequence[int]:
    """Different output tokens for every sequence: 10, 11, ... for a prompt that begins with 10."""
    return range(submit.spec.prompt_token_ids[0], submit.spec.prompt_token_ids[0] + 1000)


async def take_all(entry: JournalEntry) -> list[int]:
    token_ids: list[int] = []
    while True:
        token_ids += await take(entry)
        if entry.finish_reason is not None:
            return token_ids


def test_every_sequence_gets_its_own_tokens(tmp_path: Path) -> None:
    async def test() -> None:
        async with connected(tmp_path, FakeDense(count_up)) as (gateway, _):
            entries = [gateway.submit(str(i), [10 * i + 10, 1], max_tokens=i + 1) for i in range(20)]
            outputs = await asyncio.gather(*map(take_all, entries))
            for i, (entry, output) in enumerate(zip(entries, outputs, strict=True)):
                assert output == list(range(10 * i + 10, 10 * i + 11 + i)) == entry.output_token_ids
                assert entry.finish_reason is FinishReason.LENGTH

    run(test())


def test_the_dense_worker_gets_the_whole_request(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [7, 3])
        dense.num_cached_tokens = 5
        async with connected(tmp_path, dense) as (gateway, _):
            entry = gateway.submit("mine", [4, 5, 6], max_tokens=9)
            assert await take_all(entry) == [7, 3]
            assert entry.finish_reason is FinishReason.STOP
            assert entry.num_cached_tokens == 5
            [submit] = dense.submits
            assert submit.seq_id == entry.seq_id
            assert submit.spec.request_id == "mine"
            assert submit.spec.prompt_token_ids == [4, 5, 6]
            assert submit.output_token_ids == []
            assert submit.spec.max_tokens == 9
            assert submit.spec.stop_token_ids == [2, 3]
            assert submit.spec.cache_salt == "salt"
            assert submit.spec.sampling.temperature == 0.5
            assert submit.spec.sampling.seed == 2**63 + 1
            assert not submit.spec.sampling.HasField("top_k")

    run(test())


def test_a_restarted_worker_continues_every_open_sequence(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(count_up, step_s=0.002)
        async with connected(tmp_path, dense) as (gateway, address):
            entries = [gateway.submit(str(i), [1000 * i + 10], max_tokens=400) for i in range(5)]
            ended = gateway.submit("ended", [900], max_tokens=1)
            cancelled = gateway.submit("cancelled", [901], max_tokens=50)
            await until(lambda: len(entries[-1].output_token_ids) >= 10)
            gateway.pool.cancel(cancelled)
            gateway.journal.close(cancelled)
            await dense.kill()
            num_outputs = [len(entry.output_token_ids) for entry in entries]
            dense.submits.clear()
            await dense.start(address)
            outputs = await asyncio.gather(*map(take_all, entries))
            assert outputs == [list(range(1000 * i + 10, 1000 * i + 410)) for i in range(5)]
            assert [submit.seq_id for submit in dense.submits] == [entry.seq_id for entry in entries]
            assert ended.output_token_ids == [900]
            for submit, entry, num_output in zip(dense.submits, entries, num_outputs, strict=True):
                assert num_output <= len(submit.output_token_ids) < 400
                assert submit.output_token_ids == entry.output_token_ids[: len(submit.output_token_ids)]
                assert submit.spec.sampling.seed == 2**63 + 1
            assert gateway.connections == [True, False, True]

    run(test())


def test_cached_tokens_of_a_continued_sequence_are_those_of_its_first_run(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(count_up, step_s=0.002)
        dense.num_cached_tokens = 3
        async with connected(tmp_path, dense) as (gateway, address):
            entry = gateway.submit("r", [10, 1, 1, 1], max_tokens=40)
            while not entry.output_token_ids:
                await take(entry)
            await dense.kill()
            dense.num_cached_tokens = 20
            await dense.start(address)
            await take_all(entry)
            assert entry.num_cached_tokens == 3

    run(test())


def test_cached_tokens_of_a_lost_first_step_do_not_count(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [])  # and so no token comes of the first run
        dense.num_cached_tokens = 20
        async with connected(tmp_path, dense) as (gateway, address):
            entry = gateway.submit("r", [10, 1, 1, 1], max_tokens=4)
            await until(lambda: entry.num_cached_tokens == 20)
            await dense.kill()
            dense.script, dense.num_cached_tokens = count_up, 3
            await dense.start(address)
            await take_all(entry)
            assert entry.num_cached_tokens == 3

    run(test())


def test_requests_during_an_outage_wait_for_its_end(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(count_up)
        async with connected(tmp_path, dense) as (gateway, address):
            await dense.kill()
            await until(lambda: not gateway.connections[-1])
            entry = gateway.submit("r", [10], max_tokens=2)
            gone = gateway.submit("gone", [20], max_tokens=2)
            gateway.pool.cancel(gone)
            gateway.journal.close(gone)
            await dense.start(address)
            assert await take_all(entry) == [10, 11]
            assert [submit.spec.request_id for submit in dense.submits] == ["r"]

    run(test())


def test_a_worker_that_stays_away_fails_requests_but_not_the_gateway(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(count_up, step_s=0.001)
        async with connected(tmp_path, dense, connect_timeout_s=1.5) as (gateway, address):
            running = gateway.submit("running", [10], max_tokens=1000)
            await take(running)
            await dense.kill()
            with pytest.raises(PeerError, match=rf"no dense worker at {address} within 1.5 s: UNAVAILABLE: "):
                while True:
                    await take(running)
            late = gateway.submit("late", [10], max_tokens=5)
            with pytest.raises(PeerError, match=rf"no dense worker at {address} within 1.5 s: UNAVAILABLE: "):
                await take(late)
            await dense.start(address)
            await until(lambda: gateway.connections[-1])
            assert await take_all(gateway.submit("again", [10], max_tokens=2)) == [10, 11]

    run(test())


def test_a_wait_that_ended_in_time_does_not_fail_the_sequence_later(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(count_up, step_s=0.01)
        async with connected(tmp_path, dense, connect_timeout_s=4.0) as (gateway, address):
            loop = asyncio.get_running_loop()
            entry = gateway.submit("r", [10], max_tokens=1000)
            await take(entry)
            await dense.kill()
            latest_failure = loop.time() + 4.0
            await dense.start(address)
            await until(lambda: gateway.connections == [True, False, True])
            await until(lambda: loop.time() > latest_failure + 0.1)
            assert entry.error is None

    run(test())


def test_a_sequence_cancelled_while_it_waits_for_a_worker_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        gateway = Gateway(f"unix:{tmp_path}/dense.sock", connect_timeout_s=20.0)
        entry = gateway.submit("r", [10], max_tokens=5)
        gateway.pool.cancel(entry)
        gateway.journal.close(entry)
        gc.collect()
        kind = type(entry.updates)
        num_queues = sum(isinstance(each, kind) for each in gc.get_objects())
        del entry
        gc.collect()
        assert sum(isinstance(each, kind) for each in gc.get_objects()) == num_queues - 1

    run(test())


def test_the_error_names_the_address_of_a_missing_worker(tmp_path: Path) -> None:
    async def test() -> None:
        address = f"unix:{tmp_path}/dense.sock"
        gateway = Gateway(address, connect_timeout_s=0.2)
        task = asyncio.create_task(gateway.pool.run())
        with pytest.raises(PeerError, match=rf"no dense worker at {address} within 0.2 s: UNAVAILABLE: "):
            await gateway.pool.wait_connected()
        with pytest.raises(PeerError, match=f"{address} is not connected yet"):
            _ = gateway.pool.model
        task.cancel()
        await asyncio.wait([task])

    run(test())


def test_a_worker_with_other_weights_does_not_continue_old_answers(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(count_up, step_s=0.002)
        async with connected(tmp_path, dense) as (gateway, address):
            entry = gateway.submit("old", [10], max_tokens=1000)
            await take(entry)
            await dense.kill()
            dense.info.weights_hash = "beef"
            await dense.start(address)
            with pytest.raises(RequestAborted, match="other weights"):
                while True:
                    await take(entry)
            await gateway.pool.wait_connected()
            assert gateway.pool.model.weights_hash == "beef"
            assert await take_all(gateway.submit("new", [10], max_tokens=2)) == [10, 11]

    run(test())


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, CapacityError),
        (grpc.StatusCode.UNAVAILABLE, PeerError),
        (grpc.StatusCode.ABORTED, RequestAborted),
        (grpc.StatusCode.INTERNAL, TwostrokeError),
    ],
)
def test_an_error_reaches_its_own_sequence_only(
    code: grpc.StatusCode, error: type[TwostrokeError], tmp_path: Path
) -> None:
    async def test() -> None:
        dense = FakeDense(count_up)
        dense.errors["bad"] = (code, "what went wrong")
        async with connected(tmp_path, dense) as (gateway, _):
            good, bad = gateway.submit("good", [10], 50), gateway.submit("bad", [20], 50)
            with pytest.raises(error, match="what went wrong") as caught:
                await take(bad)
            assert caught.value.status_code is code
            assert await take_all(good) == list(range(10, 60))

    run(test())


def test_a_cancelled_sequence_is_forgotten_by_the_worker(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(count_up, step_s=0.001)
        async with connected(tmp_path, dense) as (gateway, _):
            entry = gateway.submit("r", [10], max_tokens=1000)
            await take(entry)
            gateway.pool.cancel(entry)
            gateway.journal.close(entry)
            await until(lambda: not dense.running)
            assert dense.cancelled_seq_ids == [entry.seq_id]

    run(test())


def test_a_stream_that_breaks_at_once_is_retried_with_pauses(tmp_path: Path) -> None:
    class Refusing(FakeDense):
        num_connects = 0

        async def Connect(
            self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[dense_pb2.StepOutput]:
            self.num_connects += 1
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no")
            yield dense_pb2.StepOutput()

    async def test() -> None:
        dense = Refusing(count_up)
        start = asyncio.get_running_loop().time()
        async with connected(tmp_path, dense):
            await until(lambda: dense.num_connects == 3)
            assert asyncio.get_running_loop().time() - start > FIRST_RETRY_S + 2 * FIRST_RETRY_S  # the first two pauses

    run(test())


def test_a_cancellation_works_while_the_stream_breaks(tmp_path: Path) -> None:
    class BreakingStub:
        """A worker that answers, and whose stream breaks when `is_broken` is set."""

        def __init__(self) -> None:
            self.is_broken = asyncio.Event()

        async def GetInfo(self, request: dense_pb2.GetInfoRequest, timeout: float) -> dense_pb2.DenseInfo:
            return dense_pb2.DenseInfo()

        def Connect(self) -> BreakingStub:
            return self

        async def write(self, message: dense_pb2.GatewayMessage) -> None:
            pass

        async def __aiter__(self) -> AsyncIterator[dense_pb2.StepOutput]:
            await self.is_broken.wait()
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "broken")
            yield dense_pb2.StepOutput()

    async def stop_after(num_turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        stub = BreakingStub()
        monkeypatch.setattr("services.gateway.link.dense_client.dense_pb2_grpc.DenseWorkerStub", lambda channel: stub)
        pool = Gateway(f"unix:{tmp_path}/dense.sock", connect_timeout_s=20.0).pool
        task = asyncio.create_task(pool.run())
        await pool.wait_connected()
        stub.is_broken.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=30.0)
        assert task.cancelled()

    with pytest.MonkeyPatch.context() as monkeypatch:
        for num_turns in range(12):  # turns of the event loop between the break and the cancellation
            run(stop_after(num_turns, monkeypatch))
