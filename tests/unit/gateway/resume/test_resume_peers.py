"""Resumable requests of a server with several gateway processes: any of them serves the client, and any may die."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common.child_options import ChildOptions
from services.gateway.access.client_address import number_of
from services.gateway.resources.repeatable import Repeatable
from services.gateway.resume.grpc_calls import fingerprint_of
from services.gateway.resume.recording import Name, Record
from services.gateway.resume.registry import Registry
from services.launch.resumables import SERVICE_NAME, Resumables, ResumablesServicer
from services.pb import gateway_pb2, resumables_pb2_grpc
from services.rpc.server import GrpcServer
from tests.support.chats.chat_models import WEATHER, make_chat_model, writes
from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_clients import async_client, socket_path
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.resume.test_grpc_resume import by_seed, joined, receive, resumable, resume, status, undisturbed
from tests.unit.gateway.resume.test_http_resume import COMPLETION, STREAMS, EventSource, post, source, text_of


@dataclass
class Server:
    """Three gateways, each with a dense worker of its own and an end of its own, and what the launcher keeps."""

    gateways: list[RunningGateway]
    workers: list[FakeDense]
    ends: list[contextlib.AsyncExitStack]
    resumables: Resumables
    control: GrpcServer


Test = Callable[[Server], Awaitable[None]]


def with_gateways(directory: Path, test: Test, script: Any = by_seed, step_s: float = 0.005, **options: Any) -> None:
    addresses = [f"unix:{directory}/peer-{index}.sock" for index in range(3)]

    @contextlib.asynccontextmanager
    async def gateway_of(index: int, dense: FakeDense) -> AsyncIterator[RunningGateway]:
        own = directory / str(index)
        own.mkdir(exist_ok=True)
        child = ChildOptions(
            peer_address=addresses[index],
            peer_addresses=tuple(each for each in addresses if each != addresses[index]),
            control_address=f"unix:{directory}/control.sock",
        )
        async with running_gateway(own, dense, options=child, **{"resume": True, **options}) as gateway:
            yield gateway

    async def body() -> None:
        resumables = Resumables(1000, 10_000_000, options.get("resume_timeout_s", 30.0))
        control = GrpcServer(f"unix:{directory}/control.sock", [SERVICE_NAME], 1 << 20)
        resumables_pb2_grpc.add_ResumablesServicer_to_server(ResumablesServicer(resumables), control.server)
        workers = [FakeDense(script, step_s=step_s) for _ in range(3)]
        ends = [contextlib.AsyncExitStack() for _ in range(3)]
        async with contextlib.AsyncExitStack() as all_ends:
            await control.start()
            all_ends.push_async_callback(control.stop, 0.0)
            gateways = []
            for index, (end, dense) in enumerate(zip(ends, workers, strict=True)):
                await all_ends.enter_async_context(end)
                gateways.append(await end.enter_async_context(gateway_of(index, dense)))
            await test(Server(gateways, workers, ends, resumables, control))

    run(body())


def test_any_process_sends_the_rest_of_a_stream_that_another_runs(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        message = resumable(n=2)
        chunks = await receive(server.gateways[0].stub.GenerateStream(message), 5)
        for gateway in (server.gateways[1], server.gateways[2], server.gateways[1]):
            chunks += await resume(gateway, chunks, 7)
        chunks += await resume(server.gateways[2], chunks)
        assert [len(each.submits) for each in server.workers] == [2, 0, 0]
        seed = next(chunk.finish.seed for chunk in chunks if chunk.HasField("finish") and not chunk.index)
        assert joined(chunks) == await undisturbed(server.gateways[1], message, seed)
        code, details = await status(resume(server.gateways[1], chunks, digest=chunks[-1].digest ^ 1))
        assert (code, "another one" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        code, _ = await status(receive(server.gateways[2].stub.GenerateStream(resumable(n=3))))
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    with_gateways(tmp_path, test)


def test_a_whole_answer_is_computed_once_by_all_processes(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        first = asyncio.create_task(post(server.gateways[0], "k"))
        await until(lambda: bool(server.workers[0].running))
        others = await asyncio.gather(*[post(gateway, "k") for gateway in server.gateways])
        assert {each.text for each in others} == {(await first).text}
        assert [len(each.submits) for each in server.workers] == [1, 0, 0]
        refused = await post(server.gateways[1], "k", {**COMPLETION, "max_tokens": 3})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")

    with_gateways(tmp_path, test)


def test_a_stream_goes_on_where_another_process_has_ended(tmp_path: Path) -> None:
    """The seed is not the client's: the record must have it."""

    async def test(server: Server) -> None:
        message = resumable(n=2, logprobs=1)
        call = server.gateways[0].stub.GenerateStream(message)
        chunks = [await call.read() for _ in range(9)]
        await server.ends[0].aclose()
        chunks += await resume(server.gateways[2], chunks, 11)
        assert [len(each.submits) for each in server.workers] == [2, 0, 2]
        chunks += await resume(server.gateways[1], chunks)  # which gets it from the other
        seed = next(chunk.finish.seed for chunk in chunks if chunk.HasField("finish") and not chunk.index)
        assert joined(chunks) == await undisturbed(server.gateways[1], message, seed)

    with_gateways(tmp_path, test)


def check_two_deaths(
    directory: Path,
    make_sources: Callable[[RunningGateway, str], dict[str, EventSource]],
    cuts: tuple[int, int],
    **options: Any,
) -> None:
    """Each stream goes on in a second and a third process; its events are those of a stream that goes on in one."""

    async def test(server: Server) -> None:
        broken = make_sources(server.gateways[0], "k")
        for index, cut in enumerate(cuts):
            await asyncio.gather(*[each.connect(cut) for each in broken.values()])
            await server.ends[index].aclose()
            for each in broken.values():
                each.address = server.gateways[index + 1].http_address
        await asyncio.gather(*[each.connect() for each in broken.values()])
        whole = make_sources(server.gateways[2], "other")
        await asyncio.gather(*[each.connect() for each in whole.values()])
        for kind, stream in broken.items():
            assert stream.objects == whole[kind].objects, kind
            assert len(stream.received) > sum(cuts), f"{kind}: it has ended before the second death"
            assert len(own_values(stream)) == len(own_values(whole[kind])), f"{kind}: another run has other ids"

    with_gateways(directory, test, **options)


def own_values(source: EventSource) -> set[str]:
    """All ids in a stream, and its time of creation."""
    text = "".join(data for _, data in source.received)
    return set(re.findall(r'"(?:id|item_id|call_id|created|created_at)":"?([^",}]+)', text))


def test_every_kind_of_stream_goes_on_event_for_event(tmp_path: Path) -> None:
    def make(gateway: RunningGateway, key: str) -> dict[str, EventSource]:
        sources = {kind: source(gateway, kind, f"{key}-{kind.replace(' ', '-')}") for kind in STREAMS}
        for each in sources.values():
            each.body = {name: value for name, value in each.body.items() if name != "stop"}
        return sources

    words = ids(" Łódź and 東京 🙂, the city\n\n and the rest of it") * 6
    check_two_deaths(tmp_path, make, (5, 9), script=lambda _: words)


THOUGHTS = "<think>They want the weather in two cities, so I call twice.</think>Let me see.\n"
CALLS = "".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}", "days": 3}}}}\n</tool_call>\n'
    for city in ("Łódź", "東京")
)


def test_reasoning_and_calls_go_on_event_for_event(tmp_path: Path) -> None:
    """Ids of calls are random numbers, which the second run must draw again."""
    function = WEATHER["function"]
    chat = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 1000}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**chat, "tools": [WEATHER], "n": 2, "logprobs": True, "top_logprobs": 1},
        "/v1/responses": {"input": "Weather?", "tools": [{"type": "function", **function}]},
        "/v1/messages": {
            **chat,
            "model": "model",
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "max_tokens": 2000,
            "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
        },
    }

    def make(gateway: RunningGateway, key: str) -> dict[str, EventSource]:
        return {
            path: EventSource(
                gateway.http_address, path, {**body, "stream": True}, {"Idempotency-Key": key + path.replace("/", "-")}
            )
            for path, body in bodies.items()
        }

    model = make_chat_model(tmp_path / "model", "qwen3")
    options = {"model": model, "reasoning_parser": "qwen3", "tool_parser": "hermes"}
    check_two_deaths(tmp_path, make, (9, 90), script=writes(THOUGHTS + CALLS), **options)


async def streams_of_a_process_that_dies(server: Server) -> tuple[EventSource, list[gateway_pb2.GenerateChunk]]:
    """Of the first process, which is dead when this returns: a stream over HTTP with some events, one over gRPC."""
    chunks = await receive(server.gateways[0].stub.GenerateStream(resumable()), 9)
    stream = source(server.gateways[0], "chat")
    stream.headers = {**stream.headers, "X-Request-ID": "h"}
    await stream.connect(6)
    await server.ends[0].aclose()
    return stream, chunks


async def check_rest(
    gateway: RunningGateway, stream: EventSource, chunks: list[gateway_pb2.GenerateChunk], rest: Awaitable[Any]
) -> None:
    """`rest` reads the rest of the stream and returns that of the chunks; together they are the whole answers."""
    chunks = chunks + await rest
    assert joined(chunks) == await undisturbed(gateway, resumable(), chunks[-1].finish.seed)
    plain = source(gateway, "chat", None)
    await plain.connect()
    assert text_of(stream) == text_of(plain)


async def read_rest(
    gateway: RunningGateway, stream: EventSource, chunks: list[gateway_pb2.GenerateChunk]
) -> list[gateway_pb2.GenerateChunk]:
    stream.address = gateway.http_address
    rest, _ = await asyncio.gather(resume(gateway, chunks), stream.connect())
    return rest


def test_a_process_that_has_just_started_waits_for_its_dense_worker(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        stream, chunks = await streams_of_a_process_that_dies(server)
        directory = tmp_path / "next"
        directory.mkdir()
        child = ChildOptions(
            peer_address=f"unix:{tmp_path}/peer-0.sock", control_address=f"unix:{tmp_path}/control.sock"
        )
        async with running_gateway(directory, None, options=child, resume=True) as gateway:
            await until(Path(socket_path(gateway.http_address)).exists)
            rest = asyncio.create_task(read_rest(gateway, stream, chunks))
            while 'event="repeated"} 2.0' not in await metrics_of(gateway):  # noqa: ASYNC110  as in `until`
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # an error would have come by now
            assert not rest.done()
            await server.workers[0].start(gateway.dense_address)
            await check_rest(gateway, stream, chunks, rest)
            await server.workers[0].kill()

    with_gateways(tmp_path, test)


@pytest.mark.parametrize("kind", ["responses", "messages"])
def test_a_stream_that_has_only_begun_goes_on(tmp_path: Path, kind: str) -> None:
    """Its first events have come without any token in the first process, and come with the first token in the next."""

    async def test(server: Server) -> None:
        server.workers[0].script = lambda _: []
        stream = source(server.gateways[0], kind)
        await stream.connect(2)
        await server.ends[0].aclose()
        stream.address = server.gateways[1].http_address
        await stream.connect()
        assert stream.status == 200
        plain = source(server.gateways[1], kind, None)
        await plain.connect()
        assert text_of(stream) == text_of(plain)

    with_gateways(tmp_path, test, lambda _: ids(" Łódź and 東京") * 10, step_s=0.0, first_token_timeout_s=0.3)


async def metrics_of(gateway: RunningGateway) -> str:
    async with async_client(gateway.http_address) as client:
        return (await client.get("/metrics")).text


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_second_run_that_fails_is_tried_again_when_its_client_comes_back(tmp_path: Path, num_tokens: int) -> None:
    """It fails after so many tokens, fewer than the client has. The client gets a 503, and the record is kept."""

    async def fail(worker: FakeDense, request_id: str) -> None:
        def counts() -> list[int]:
            running = [each for each in worker.running.values() if each.submit.spec.request_id == request_id]
            return [each.num_output_tokens for each in running]

        await until(lambda: max(counts(), default=0) >= num_tokens)
        worker.errors[request_id] = (grpc.StatusCode.UNAVAILABLE, "the worker is away")

    async def test(server: Server) -> None:
        stream, chunks = await streams_of_a_process_that_dies(server)
        for worker, gateway in zip(server.workers[1:], server.gateways[1:], strict=True):
            (code, details), failed, *_ = await asyncio.gather(
                status(resume(gateway, chunks)),
                post(gateway, "k", stream.body, stream.path, Last_Event_ID=stream.last_event_id),
                fail(worker, "r"),
                fail(worker, "h"),
            )
            assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the worker is away")
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "1"), failed.text
        for worker in server.workers:
            worker.errors.clear()
        await check_rest(server.gateways[2], stream, chunks, read_rest(server.gateways[2], stream, chunks))

    with_gateways(tmp_path, test, step_s=0.02)


def test_a_second_run_whose_answer_does_not_fit_gives_its_reader_the_rest(tmp_path: Path) -> None:
    """The memory is full before the run has reached what the client has."""

    async def test(server: Server) -> None:
        message = resumable(max_tokens=1500)
        chunks = await receive(server.gateways[0].stub.GenerateStream(message), 1200)
        await server.ends[0].aclose()
        chunks += await resume(server.gateways[1], chunks)
        assert joined(chunks) == await undisturbed(server.gateways[1], message, chunks[-1].finish.seed)

    words = ids(" Łódź and 東京 🙂, the city") * 200
    with_gateways(tmp_path, test, lambda _: words[:1500], step_s=0.0, max_held_bytes=40_000)


def test_two_deaths_one_after_the_other_are_survived(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        kinds = ("chat", "completion", "completions")
        streams = [source(server.gateways[0], kind, f"k{number}") for number, kind in enumerate(kinds)]
        await asyncio.gather(*[each.connect(6) for each in streams])
        for index in (0, 1):
            await server.ends[index].aclose()
            for each in streams:
                each.address = server.gateways[index + 1].http_address
            await asyncio.gather(*[each.connect(6) for each in streams])
        await asyncio.gather(*[each.connect() for each in streams if each.status != 204])
        for number, kind in enumerate(kinds):
            plain = source(server.gateways[2], kind, None)
            await plain.connect()
            assert text_of(streams[number]) == text_of(plain)

    with_gateways(tmp_path, test)


def test_a_client_that_comes_too_late_after_a_death_finds_nothing(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        call = server.gateways[0].stub.GenerateStream(resumable(max_tokens=1000))
        chunks = [await call.read() for _ in range(3)]
        await server.ends[0].aclose()
        await asyncio.sleep(0.3)
        code, _ = await status(resume(server.gateways[1], chunks))
        assert code is grpc.StatusCode.NOT_FOUND

    with_gateways(tmp_path, test, lambda _: ids(" a") * 1000, resume_timeout_s=0.1)


def test_nothing_is_kept_of_a_request_whose_answer_is_forgotten(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        await server.gateways[0].stub.Generate(resumable())
        assert len(server.resumables) == 1
        await until(lambda: not server.resumables)

    with_gateways(tmp_path, test, resume_timeout_s=0.2)


def test_the_death_of_all_processes_but_one_at_once_is_survived(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        message = resumable(n=2)
        chunks = await receive(server.gateways[0].stub.GenerateStream(message), 9)
        stream = source(server.gateways[1], "chat")
        await stream.connect(6)
        await asyncio.gather(*[end.aclose() for end in server.ends[:2]])
        stream.address = server.gateways[2].http_address
        rest, _ = await asyncio.gather(resume(server.gateways[2], chunks), stream.connect())
        seed = next(chunk.finish.seed for chunk in chunks + rest if chunk.HasField("finish") and not chunk.index)
        assert joined(chunks + rest) == await undisturbed(server.gateways[2], message, seed)
        plain = source(server.gateways[2], "chat", None)
        await plain.connect()
        assert text_of(stream) == text_of(plain)

    with_gateways(tmp_path, test)


def test_one_new_key_at_all_processes_at_once_is_computed_once(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        for number in range(10):
            posts = [post(gateway, f"k{number}") for gateway in server.gateways * 2]
            answers = await asyncio.gather(*posts)
            assert len({each.text for each in answers}) == 1
        assert sum(len(each.submits) for each in server.workers) == 10

    with_gateways(tmp_path, test, step_s=0.0)


def test_a_process_that_hangs_loses_its_request_and_is_told(tmp_path: Path) -> None:
    """It is hung as far as others see: it holds the request, and its address does not answer."""

    async def test(server: Server) -> None:
        deaf = await asyncio.start_unix_server(lambda reader, writer: None, f"{tmp_path}/deaf.sock")
        lost: list[Name] = []
        hung = Registry(f"unix:{tmp_path}/control.sock", f"unix:{tmp_path}/deaf.sock", 1 << 20)
        running = asyncio.create_task(hung.run(lost.append))
        try:
            name = (("", number_of("address", "unix")), "grpc.stream", "r")
            message = resumable()
            record = Record(fingerprint_of(message), Repeatable("r"), message.SerializeToString())
            assert (await hung.claim(name, record.fingerprint, record)).record is record
            [first] = await receive(server.gateways[1].stub.GenerateStream(message), 1)
            await until(lambda: lost == [name])
            rest = await resume(server.gateways[2], [first])
            assert [len(each.submits) for each in server.workers] == [0, 1, 0]
            hung.forget(name)  # what it says of the request now has no effect
            hung.release(name)
            again = await receive(server.gateways[0].stub.GenerateStream(message))
            assert again == [first, *rest]
        finally:
            running.cancel()
            deaf.close()

    with_gateways(tmp_path, test)


def test_a_process_that_wakes_up_stops_what_another_one_runs_now(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        message = resumable(max_tokens=1000)
        call = server.gateways[0].stub.GenerateStream(message)
        [*_, last] = [await call.read() for _ in range(3)]
        other = Registry(f"unix:{tmp_path}/control.sock", f"unix:{tmp_path}/other.sock", 1 << 20)
        running = asyncio.create_task(other.run(lambda name: None))
        try:
            name = (("", number_of("address", "unix")), "grpc.stream", "r")
            claim = await other.claim(name, None, None)
            assert claim.running_at == f"unix:{tmp_path}/peer-0.sock"
            claim = await other.claim(name, None, None, claim.running_at)
            assert claim.record.message == message.SerializeToString()
            code, details = await status(receive(call))
            assert (code, "another gateway process" in details) == (grpc.StatusCode.ABORTED, True)
            await until(lambda: len(server.workers[0].cancelled_seq_ids) == 1)
            assert len(server.resumables) == 1  # the other one has it
        finally:
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        rest = await resume(server.gateways[0], [last] * 3, 4)  # it may run here again
        assert len(rest) == 4

    with_gateways(tmp_path, test, lambda _: ids(" a") * 1000)


def test_a_client_that_leaves_while_its_request_is_claimed_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        for index in range(60):
            call = server.gateways[0].stub.GenerateStream(resumable(f"r{index}"))
            await asyncio.sleep(index / 10_000)
            call.cancel()
        await until(lambda: not server.resumables and not any(each.running for each in server.workers))

    with_gateways(tmp_path, test, resume_timeout_s=0.1)


def test_without_the_launchers_answer_new_requests_run_and_others_are_refused(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        await server.control.stop(0.0)
        assert len(await receive(server.gateways[0].stub.GenerateStream(resumable()))) == 40
        code, details = await status(resume(server.gateways[1], [gateway_pb2.GenerateChunk()]))
        assert (code, "try again" in details) == (grpc.StatusCode.UNAVAILABLE, True)

    with_gateways(tmp_path, test)


def test_a_clients_stream_that_ends_with_its_process_has_no_further_id(tmp_path: Path) -> None:
    """The error that a stopping process sends is no part of the answer: nothing is missing after it."""

    async def test(server: Server) -> None:
        stream = source(server.gateways[0], "chat")
        reading = asyncio.create_task(stream.connect())
        await until(lambda: len(stream.received) > 5)
        await server.ends[0].aclose()
        with contextlib.suppress(Exception):
            await reading
        rest = EventSource(
            server.gateways[1].http_address, stream.path, stream.body, stream.headers, stream.last_event_id
        )
        rest.received = [each for each in stream.received if '"error"' not in each[1]]
        await rest.connect()
        plain = source(server.gateways[1], "chat", None)
        await plain.connect()
        assert text_of(rest) == text_of(plain)

    with_gateways(tmp_path, test)
