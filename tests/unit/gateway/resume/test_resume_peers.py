"""Resumable requests of a server with several gateway processes: any of them serves the client, and any may die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from services.common.child_options import ChildOptions
from services.gateway.access.client_address import number_of
from services.pb import gateway_peers_pb2
from services.pb.gateway_peers_pb2_grpc import GatewayPeersStub
from tests.support.clients.gateway_calls import ids
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.resume.test_grpc_resume import by_seed, joined, receive, resumable, resume, status, undisturbed
from tests.unit.gateway.resume.test_http_resume import COMPLETION, EventSource, post, source, text_of

Ends = list[contextlib.AsyncExitStack]
Test = Callable[[list[RunningGateway], list[FakeDense], Ends], Awaitable[None]]


def with_gateways(directory: Path, test: Test, script: Any = by_seed, step_s: float = 0.005, **options: Any) -> None:
    """Runs `test` against three gateways, each with a dense worker of its own and an end of its own."""
    addresses = [f"unix:{directory}/peer-{index}.sock" for index in range(3)]

    @contextlib.asynccontextmanager
    async def gateway_of(index: int, dense: FakeDense) -> AsyncIterator[RunningGateway]:
        own = directory / str(index)
        own.mkdir(exist_ok=True)
        child = ChildOptions(
            peer_address=addresses[index], peer_addresses=tuple(each for each in addresses if each != addresses[index])
        )
        async with running_gateway(own, dense, options=child, **{"resume": True, **options}) as gateway:
            yield gateway

    async def body() -> None:
        workers = [FakeDense(script, step_s=step_s) for _ in range(3)]
        ends = [contextlib.AsyncExitStack() for _ in range(3)]
        async with contextlib.AsyncExitStack() as all_ends:
            gateways = []
            for index, (end, dense) in enumerate(zip(ends, workers, strict=True)):
                await all_ends.enter_async_context(end)
                gateways.append(await end.enter_async_context(gateway_of(index, dense)))
            await test(gateways, workers, ends)

    run(body())


async def guarded(directory: Path, kind: str = "grpc.stream", name: str = "r") -> None:
    """Returns once a peer keeps a record of the request."""
    owner = {"client": number_of("address", "unix")}
    request = gateway_peers_pb2.FindResumableRequest(name={"owner": owner, "kind": kind, "name": name})
    while True:
        for index in range(3):
            async with grpc.aio.insecure_channel(f"unix:{directory}/peer-{index}.sock") as channel:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if (await GatewayPeersStub(channel).FindResumable(request)).is_guarded:
                        return
        await asyncio.sleep(0.01)


def test_any_process_sends_the_rest_of_a_stream_that_another_runs(tmp_path: Path) -> None:
    async def test(gateways: list[RunningGateway], workers: list[FakeDense], ends: Ends) -> None:
        message = resumable(n=2)
        chunks = await receive(gateways[0].stub.GenerateStream(message), 5)
        for gateway in (gateways[1], gateways[2], gateways[1]):
            chunks += await resume(gateway, chunks, 7)
        chunks += await resume(gateways[2], chunks)
        assert [len(each.submits) for each in workers] == [2, 0, 0]
        seed = next(chunk.finish.seed for chunk in chunks if chunk.HasField("finish") and not chunk.index)
        assert joined(chunks) == await undisturbed(gateways[1], message, seed)
        code, details = await status(resume(gateways[1], chunks, digest=chunks[-1].digest ^ 1))
        assert (code, "another one" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        code, _ = await status(receive(gateways[2].stub.GenerateStream(resumable(n=3))))
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    with_gateways(tmp_path, test)


def test_a_whole_answer_is_computed_once_by_all_processes(tmp_path: Path) -> None:
    async def test(gateways: list[RunningGateway], workers: list[FakeDense], ends: Ends) -> None:
        first = asyncio.create_task(post(gateways[0], "k"))
        await until(lambda: bool(workers[0].running))
        others = await asyncio.gather(*[post(gateway, "k") for gateway in gateways])
        assert {each.text for each in others} == {(await first).text}
        assert [len(each.submits) for each in workers] == [1, 0, 0]
        refused = await post(gateways[1], "k", {**COMPLETION, "max_tokens": 3})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")

    with_gateways(tmp_path, test)


def test_a_stream_goes_on_where_another_process_has_ended(tmp_path: Path) -> None:
    """The seed is not the client's: the record must have it."""

    async def test(gateways: list[RunningGateway], workers: list[FakeDense], ends: Ends) -> None:
        await until_guarded_at_start(gateways)
        message = resumable(n=2, logprobs=1)
        call = gateways[0].stub.GenerateStream(message)
        chunks = [await call.read() for _ in range(9)]
        await guarded(tmp_path)
        await ends[0].aclose()
        chunks += await resume(gateways[2], chunks, 11)
        assert [len(each.submits) for each in workers] == [2, 0, 2]
        chunks += await resume(gateways[1], chunks)  # which gets it from the other
        seed = next(chunk.finish.seed for chunk in chunks if chunk.HasField("finish") and not chunk.index)
        assert joined(chunks) == await undisturbed(gateways[1], message, seed)

    with_gateways(tmp_path, test)


async def until_guarded_at_start(gateways: list[RunningGateway]) -> None:
    """Waits for the connections between the gateways, which are made in the background."""
    await asyncio.sleep(0.5)


def test_two_deaths_one_after_the_other_are_survived(tmp_path: Path) -> None:
    async def test(gateways: list[RunningGateway], workers: list[FakeDense], ends: Ends) -> None:
        await until_guarded_at_start(gateways)
        streams = [source(gateways[0], kind, f"k{i}") for i, kind in enumerate(("chat", "completion", "completions"))]
        await asyncio.gather(*[each.connect(6) for each in streams])
        for index in (0, 1):
            for number in range(3):
                await guarded(tmp_path, "http", f"k{number}")
            await ends[index].aclose()
            for each in streams:
                each.address = gateways[index + 1].http_address
            await asyncio.gather(*[each.connect(6) for each in streams])
        await asyncio.gather(*[each.connect() for each in streams if each.status != 204])
        for number, kind in enumerate(("chat", "completion", "completions")):
            plain = source(gateways[2], kind, None)
            await plain.connect()
            assert text_of(streams[number]) == text_of(plain)

    with_gateways(tmp_path, test)


def test_a_client_that_comes_too_late_after_a_death_finds_nothing(tmp_path: Path) -> None:
    async def test(gateways: list[RunningGateway], workers: list[FakeDense], ends: Ends) -> None:
        await until_guarded_at_start(gateways)
        call = gateways[0].stub.GenerateStream(resumable(max_tokens=1000))
        chunks = [await call.read() for _ in range(3)]
        await guarded(tmp_path)
        await ends[0].aclose()
        await asyncio.sleep(0.3)
        code, _ = await status(resume(gateways[1], chunks))
        assert code is grpc.StatusCode.NOT_FOUND

    with_gateways(tmp_path, test, lambda _: ids(" a") * 1000, resume_timeout_s=0.1)


def test_nothing_is_kept_of_a_request_whose_answer_is_forgotten(tmp_path: Path) -> None:
    async def test(gateways: list[RunningGateway], workers: list[FakeDense], ends: Ends) -> None:
        await until_guarded_at_start(gateways)
        await gateways[0].stub.Generate(resumable())
        await guarded(tmp_path, "grpc.whole")
        await asyncio.sleep(0.4)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(guarded(tmp_path, "grpc.whole"), 0.2)
            raise AssertionError("a record is left")

    with_gateways(tmp_path, test, resume_timeout_s=0.2)


def test_a_clients_stream_that_ends_with_its_process_has_no_further_id(tmp_path: Path) -> None:
    """The error that a stopping process sends is no part of the answer: nothing is missing after it."""

    async def test(gateways: list[RunningGateway], workers: list[FakeDense], ends: Ends) -> None:
        await until_guarded_at_start(gateways)
        stream = source(gateways[0], "chat")
        reading = asyncio.create_task(stream.connect())
        await until(lambda: len(stream.received) > 5)
        await guarded(tmp_path, "http", "k")
        await ends[0].aclose()
        with contextlib.suppress(Exception):
            await reading
        rest = EventSource(gateways[1].http_address, stream.path, stream.body, stream.headers, stream.last_event_id)
        rest.received = [each for each in stream.received if '"error"' not in each[1]]
        await rest.connect()
        plain = source(gateways[1], "chat", None)
        await plain.connect()
        assert text_of(rest) == text_of(plain)

    with_gateways(tmp_path, test)
