"""A client with far more streams than the server has places does not keep another client waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.models import ONE_LAYER

MAX_NUM_SEQS = 8  # places in a step
NUM_QUEUED = 32
MAX_NUM_WAITING = 64
LONG, SHORT = 250, 20  # tokens of the streams that hold the places, and of those that wait for one
MAX_STEPS = 150  # of the others until a newcomer's first token; in the order of arrival it would be more than LONG
GREEDY, OTHER = "198.51.100.1", "198.51.100.2"  # addresses of clients
LIMIT_S = 120.0
MAX_ROUNDS = 5  # on a busy machine requests may come late: all streams must begin while the first ones run


pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def few_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that believes what a client at its socket says about addresses."""
    overrides = (
        ONE_LAYER,
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
        f"scheduler.max_num_waiting={MAX_NUM_WAITING}",
        'gateway.trusted_proxies=["unix"]',
    )
    with running_cluster(tmp_path_factory.mktemp("few-places"), *overrides, is_warm=True) as cluster:
        yield cluster


class Stream:
    """One request of a client; its tokens so far, and how it ended."""

    def __init__(self, stub: gateway_pb2_grpc.GatewayStub, client: str, prompt: str, max_tokens: int) -> None:
        self.token_ids: list[int] = []
        self.finish: gateway_pb2.Finish | None = None
        message = request(prompt, max_tokens, ignore_eos=True)
        self._call = stub.GenerateStream(message, metadata=(("x-forwarded-for", client),), timeout=LIMIT_S)

    async def read(self, on_first_token: Callable[[], None] = lambda: None) -> None:
        """Reads the whole answer."""
        async for chunk in self._call:
            assert self.finish is None, "nothing may follow the finish"
            is_first = not self.token_ids and chunk.token_ids
            self.token_ids += chunk.token_ids
            if chunk.HasField("finish"):
                self.finish = chunk.finish
            if is_first:
                on_first_token()


def test_a_newcomer_does_not_wait_for_the_streams_of_another_client(few_places: Cluster) -> None:
    long_prompts = [f"Count from {i} to 500." for i in range(MAX_NUM_SEQS)]
    short_prompt, other_prompt = "Who are you?", "What is the capital of France?"
    with ThreadPoolExecutor(MAX_NUM_SEQS) as threads:
        undisturbed = threads.map(lambda prompt: few_places.generate(prompt, LONG, ignore_eos=True), long_prompts)
        expected = [answer.token_ids for answer in undisturbed]
    expected += [few_places.generate(short_prompt, SHORT, ignore_eos=True).token_ids] * NUM_QUEUED
    expected.append(few_places.generate(other_prompt, SHORT, ignore_eos=True).token_ids)
    max_steps: list[int] = []  # of the others until the newcomer's first token

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not await asyncio.to_thread(condition):  # noqa: ASYNC110  the server tells no event
                await asyncio.sleep(0.005)

    async def test() -> None:
        async with grpc.aio.insecure_channel(few_places.address) as channel, asyncio.TaskGroup() as tasks:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            first_step = few_places.dense_status().num_steps
            running = [Stream(stub, GREEDY, prompt, LONG) for prompt in long_prompts]
            for stream in running:
                tasks.create_task(stream.read())
            await until(lambda: all(stream.token_ids for stream in running))
            queued = [Stream(stub, GREEDY, short_prompt, SHORT) for _ in range(NUM_QUEUED)]
            for stream in queued:
                tasks.create_task(stream.read())
            await until(
                lambda: few_places.dense_status().num_waiting == NUM_QUEUED or any(each.finish for each in running)
            )
            before = [len(stream.token_ids) for stream in running]
            newcomer = Stream(stub, OTHER, other_prompt, SHORT)
            at_first_token: list[tuple[list[int], int]] = []

            def note() -> None:
                counts = [len(stream.token_ids) for stream in (*running, *queued)]
                at_first_token.append((counts, few_places.dense_status().num_steps - first_step))

            await newcomer.read(note)
            [(counts, num_steps)] = at_first_token
            if num_steps < LONG:  # otherwise a place may have become free, also if this client has not yet read of it
                assert counts[MAX_NUM_SEQS:] == [0] * NUM_QUEUED, "a stream that waited began before the newcomer"
                max_steps.append(max(after - count for after, count in zip(counts, before, strict=False)))
        streams = [*running, *queued, newcomer]
        assert [stream.token_ids for stream in streams] == expected
        reasons = {stream.finish and stream.finish.reason for stream in streams}
        assert reasons == {gateway_pb2.FINISH_REASON_LENGTH}

    rounds = []
    for _ in range(MAX_ROUNDS):
        num_preemptions = few_places.dense_status().num_preemptions
        max_steps.clear()
        asyncio.run(test())
        few_places.wait_idle()
        num_preemptions = few_places.dense_status().num_preemptions - num_preemptions
        rounds.append((list(max_steps), num_preemptions))
        if min(max_steps, default=LONG) < MAX_STEPS and num_preemptions:  # a stream gave its place up
            return
    raise AssertionError(f"steps until the newcomer's first token, and streams that gave way to it: {rounds}")


def test_a_client_that_fills_the_queue_leaves_room_for_another_one(few_places: Cluster) -> None:
    """Its last requests are refused, all others are answered."""
    num_flooding = 3 * MAX_NUM_WAITING
    refusals: list[str] = []

    async def flood(stream: Stream) -> None:
        try:
            await stream.read()
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            refusals.append(error.details() or "")

    async def test() -> None:
        async with grpc.aio.insecure_channel(few_places.address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            flooding = [Stream(stub, GREEDY, f"Count from {i}.", SHORT) for i in range(num_flooding)]
            tasks = [asyncio.create_task(flood(stream)) for stream in flooding]
            async with asyncio.timeout(LIMIT_S):
                while not refusals:  # noqa: ASYNC110  the server tells no event
                    await asyncio.sleep(0.005)
            other = Stream(stub, OTHER, "Who are you?", SHORT)
            await other.read()
            await asyncio.gather(*tasks)
        answered = [stream for stream in flooding if stream.finish is not None]
        assert len(answered) + len(refusals) == num_flooding and len(answered) >= MAX_NUM_SEQS
        assert all("kept for clients with at most" in text for text in refusals), refusals[:3]
        assert [len(stream.token_ids) for stream in answered] == [SHORT] * len(answered)
        assert len(other.token_ids) == SHORT and other.finish is not None

    asyncio.run(test())
    few_places.wait_idle()
