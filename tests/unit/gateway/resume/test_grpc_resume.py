"""Streams over gRPC that break anywhere and are resumed: together the parts are the answer of an ordinary request."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.pb import dense_pb2, gateway_pb2
from tests.support.clients.gateway_calls import ANSWER, ids, request
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense

KEYS = {"ann": "ann-ann-ann-ann-ann", "bob": "bob-bob-bob-bob-bob"}
WORDS = [ids(word) for word in (" Łódź", " 東京", " 🙂", " and", ", the", " city", "\n\n")]

Test = Callable[[RunningGateway, FakeDense], Awaitable[None]]


def by_seed(submit: dense_pb2.Submit) -> list[int]:
    """Words that depend on the seed alone, as a sampler's tokens do."""
    random = Random(submit.spec.sampling.seed)
    return [token_id for _ in range(60) for token_id in random.choice(WORDS)]


def with_gateway(directory: Path, test: Test, script: Any = by_seed, step_s: float = 0.0, **options: Any) -> None:
    async def body() -> None:
        dense = FakeDense(script, step_s=step_s)
        async with running_gateway(directory, dense, **{"resume": True, **options}) as gateway:
            await test(gateway, dense)

    run(body())


def resumable(request_id: str = "r", **fields: Any) -> gateway_pb2.GenerateRequest:
    return request(**{"max_tokens": 40, "request_id": request_id, "resumable": True, **fields})


async def receive(call: Any, count: int | None = None) -> list[gateway_pb2.GenerateChunk]:
    """The first `count` messages of a stream, which is then cut; or all of them."""
    chunks = []
    while (count is None or len(chunks) < count) and (chunk := await call.read()) is not grpc.aio.EOF:
        chunks.append(chunk)
    call.cancel()
    return chunks


async def resume(
    gateway: RunningGateway, received: Sequence[gateway_pb2.GenerateChunk], count: int | None = None, **fields: Any
) -> list[gateway_pb2.GenerateChunk]:
    wish = gateway_pb2.ResumeRequest(**{"request_id": "r", "num_received": len(received), **fields})
    if received and "digest" not in fields:
        wish.digest = received[-1].digest
    return await receive(gateway.stub.Resume(wish), count)


def joined(chunks: Sequence[gateway_pb2.GenerateChunk]) -> dict[int, Any]:
    """The answers by index: text, tokens, log-probabilities, and finishes without times."""
    answers: dict[int, Any] = {}
    for chunk in chunks:
        answer = answers.setdefault(chunk.index, {"text": "", "token_ids": [], "logprobs": [], "finish": None})
        assert answer["finish"] is None, "nothing may follow the finish"
        answer["text"] += chunk.text
        answer["token_ids"] += chunk.token_ids
        answer["logprobs"] += [each.SerializeToString() for each in chunk.logprobs]
        if chunk.HasField("finish"):
            answer["finish"] = gateway_pb2.Finish()
            answer["finish"].CopyFrom(chunk.finish)
            answer["finish"].ClearField("timings")
    return answers


async def undisturbed(gateway: RunningGateway, message: gateway_pb2.GenerateRequest, seed: int) -> dict[int, Any]:
    """What an ordinary request with this seed is answered."""
    plain = gateway_pb2.GenerateRequest()
    plain.CopyFrom(message)
    plain.resumable, plain.request_id, plain.sampling.seed = False, "plain", seed
    return joined([chunk async for chunk in gateway.stub.GenerateStream(plain)])


async def status(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(0, 20), max_size=6),
    fields=st.sampled_from(
        [{}, {"n": 3}, {"logprobs": 2}, {"stop": [" city"]}, {"n": 2, "stop": ["the"], "logprobs": 0}, {"echo": True}]
    ),
)
def test_a_stream_that_breaks_anywhere_is_resumed_exactly(
    tmp_path: Path, cuts: list[int], fields: dict[str, Any]
) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        message = resumable(**fields)
        chunks = await receive(gateway.stub.GenerateStream(message), (cuts or [7])[0])
        for cut in cuts[1:]:
            if not chunks:
                break  # nothing received: the call may not even have arrived
            chunks += await resume(gateway, chunks, cut)
        if chunks:
            chunks += await resume(gateway, chunks)
        else:
            chunks = await receive(gateway.stub.GenerateStream(message))
        seed = next(chunk.finish.seed for chunk in chunks if chunk.HasField("finish") and not chunk.index)
        assert joined(chunks) == await undisturbed(gateway, message, seed)

    with_gateway(tmp_path, test)


def test_the_digest_is_that_of_all_tokens_so_far(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        digest = 0
        for chunk in await receive(gateway.stub.GenerateStream(resumable(n=2))):
            assert len(chunk.token_ids) == 1
            digest = zlib.crc32(b"".join(each.to_bytes(4, "little") for each in chunk.token_ids), digest)
            assert chunk.digest == digest

    with_gateway(tmp_path, test)


def test_the_request_goes_on_while_its_client_is_away(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        chunks = await receive(gateway.stub.GenerateStream(resumable()), 3)
        await until(lambda: not dense.running)
        assert not dense.cancelled_seq_ids
        chunks += await resume(gateway, chunks)
        assert chunks[-1].finish.usage.num_output_tokens == 40
        assert await resume(gateway, chunks) == []  # nothing is left, which is no error

    with_gateway(tmp_path, test, step_s=0.001)


def test_a_client_that_stays_away_loses_its_request(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        chunks = await receive(gateway.stub.GenerateStream(resumable(max_tokens=1000)), 3)
        [seq_id] = dense.running
        await until(lambda: dense.cancelled_seq_ids == [seq_id])
        code, details = await status(resume(gateway, chunks))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "gateway.resume_timeout_s" in details

    with_gateway(tmp_path, test, lambda _: ids(" a") * 1000, step_s=0.002, resume_timeout_s=0.05)


def test_the_later_of_two_clients_takes_the_stream_over(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        message = resumable()
        call = gateway.stub.GenerateStream(message)
        chunks = [await call.read() for _ in range(3)]
        rest = await resume(gateway, chunks)
        code, details = await status(receive(call))
        assert code is grpc.StatusCode.ABORTED
        assert "taken" in details
        seed = rest[-1].finish.seed
        assert joined(chunks + rest) == await undisturbed(gateway, message, seed)

    with_gateway(tmp_path, test, step_s=0.02)


def test_a_request_that_comes_again_is_computed_once(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        message = resumable(max_tokens=20)
        answers = await asyncio.gather(*[gateway.stub.Generate(message) for _ in range(5)])
        answers.append(await gateway.stub.Generate(message))
        assert len(dense.submits) == 1
        assert answers == answers[:1] * 6
        [completion] = answers[0].completions
        plain = request(max_tokens=20, sampling={"seed": completion.finish.seed})
        [expected] = (await gateway.stub.Generate(plain)).completions
        assert (completion.text, completion.token_ids) == (expected.text, expected.token_ids)

    with_gateway(tmp_path, test, step_s=0.002)


def test_wrong_wishes_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))

    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        ann, bob = ([("authorization", f"Bearer {KEYS[name]}")] for name in KEYS)
        stub = gateway.stub
        chunks = await receive(stub.GenerateStream(resumable(), metadata=ann), 5)

        async def outcome(metadata: Any, **fields: Any) -> tuple[grpc.StatusCode, str]:
            return await status(receive(stub.Resume(gateway_pb2.ResumeRequest(**fields), metadata=metadata)))

        unknown = await outcome(ann, request_id="s")
        assert unknown[0] is grpc.StatusCode.NOT_FOUND
        others = await outcome(bob, request_id="r", num_received=5)
        assert others == (unknown[0], unknown[1].replace("'s'", "'r'")), "nobody learns that it exists"
        await until(lambda: not dense.running)
        assert (await outcome(ann, request_id="r", num_received=41))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert (await outcome(ann, request_id="r", num_received=2**32 - 1))[0] is grpc.StatusCode.INVALID_ARGUMENT
        wrong = await outcome(ann, request_id="r", num_received=5, digest=chunks[-1].digest ^ 1)
        assert wrong[0] is grpc.StatusCode.FAILED_PRECONDITION
        other_body = resumable(max_tokens=41)
        code, details = await status(receive(stub.GenerateStream(other_body, metadata=ann)))
        assert (code, "'r' is the name of another request" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        nameless = await status(receive(stub.GenerateStream(resumable(""), metadata=ann)))
        assert nameless == (grpc.StatusCode.INVALID_ARGUMENT, "a resumable request needs a request_id")
        long = await outcome(ann, request_id="x" * 129)
        assert (long[0], "129 characters" in long[1]) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert len(await receive(stub.GenerateStream(resumable(max_tokens=9), metadata=bob))) == 9

    with_gateway(tmp_path, test, api_keys_file=keys)


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        dense.errors["r"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        for _ in range(2):
            assert (await status(receive(gateway.stub.GenerateStream(resumable()))))[1] == "no room"
        assert (await status(gateway.stub.Generate(resumable(n=99))))[0] is grpc.StatusCode.INVALID_ARGUMENT
        del dense.errors["r"]
        assert len(await receive(gateway.stub.GenerateStream(resumable()))) == 40

    with_gateway(tmp_path, test)


def test_without_the_option_nothing_is_resumable(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        for call in (gateway.stub.GenerateStream(resumable()), gateway.stub.Resume(gateway_pb2.ResumeRequest())):
            code, details = await status(receive(call))
            assert (code, "gateway.resume is off" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)

    with_gateway(tmp_path, test, resume=False)


def test_hundreds_of_names_leave_a_bounded_number(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        for start in range(0, 400, 40):
            calls = [gateway.stub.Generate(resumable(f"{start + i}", max_tokens=1)) for i in range(40)]
            await asyncio.gather(*calls)
        assert len(dense.submits) == 400
        await gateway.stub.Generate(resumable("399", max_tokens=1))
        assert len(dense.submits) == 400  # one of the last, which are still there
        await gateway.stub.Generate(resumable("7", max_tokens=1))
        assert len(dense.submits) == 401

    with_gateway(tmp_path, test, max_resumable=60)


def test_running_requests_are_not_dropped_for_new_ones(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        calls = [gateway.stub.GenerateStream(resumable(f"{i}")) for i in range(3)]
        for call in calls:
            await call.read()
        code, details = await status(receive(gateway.stub.GenerateStream(resumable("3"))))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "3 resumable requests are running" in details
        assert "gateway.max_resumable" in details

    with_gateway(tmp_path, test, lambda _: ids(" a"), max_resumable=3)


def test_an_answer_that_does_not_fit_is_not_resumable_but_complete_for_its_reader(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        message = resumable(max_tokens=1500)
        call = gateway.stub.GenerateStream(message)
        chunks = [await call.read() for _ in range(1200)]
        code, details = await status(resume(gateway, chunks))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "gateway.max_held_bytes" in details
        chunks += await receive(call)
        assert chunks[-1].finish.usage.num_output_tokens == 1500
        assert joined(chunks) == await undisturbed(gateway, message, chunks[-1].finish.seed)

    words = ids(ANSWER) * 200
    with_gateway(tmp_path, test, lambda _: words[:1500], max_held_bytes=40_000)


def test_an_absent_client_whose_answer_does_not_fit_loses_it(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        chunks = await receive(gateway.stub.GenerateStream(resumable(max_tokens=1500)), 5)
        await until(lambda: bool(dense.cancelled_seq_ids))
        code, details = await status(resume(gateway, chunks))
        assert (code, "gateway.max_held_bytes" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)

    with_gateway(tmp_path, test, lambda _: ids(" a") * 1500, step_s=0.001, max_held_bytes=40_000)
