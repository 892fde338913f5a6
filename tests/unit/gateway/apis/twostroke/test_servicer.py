"""Streamed and whole answers over a real channel, from a whole gateway with a scripted dense worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from services.gateway.resources.heavy_work import HeavyWork
from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.support.clients.gateway_calls import (
    ANSWER,
    EOS,
    REFERENCE,
    ids,
    request,
    say,
    stream,
    text_of,
    with_gateway,
)
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense, fake_logprob


def test_streamed_text_is_the_decoded_text(tmp_path: Path) -> None:
    token_ids = ids(ANSWER)
    assert len(token_ids) > len(ANSWER.split())

    async def test(gateway: RunningGateway) -> None:
        answer = await stream(gateway, max_tokens=len(token_ids), sampling={"seed": 77})
        assert answer.text == text_of(token_ids) == ANSWER
        assert answer.token_ids == token_ids
        assert answer.finish.timings.total_ms >= answer.finish.timings.first_token_ms > 0
        answer.finish.ClearField("timings")
        assert answer.finish == gateway_pb2.Finish(
            reason=gateway_pb2.FINISH_REASON_LENGTH,
            usage=gateway_pb2.Usage(
                num_prompt_tokens=len(REFERENCE("Tell me about")["input_ids"]),
                num_cached_tokens=3,
                num_output_tokens=len(token_ids),
            ),
            seed=77,
        )

    dense = FakeDense(say(token_ids))
    dense.num_cached_tokens = 3
    with_gateway(tmp_path, dense, test)


def test_a_chunk_never_ends_within_a_character(tmp_path: Path) -> None:
    token_ids = ids(ANSWER)

    async def test(gateway: RunningGateway) -> None:
        call = gateway.stub.GenerateStream(request(max_tokens=len(token_ids)))
        texts = [chunk.text async for chunk in call]
        assert len(texts) > 1
        assert "\ufffd" not in "".join(texts)

    with_gateway(tmp_path, FakeDense(say(token_ids), step_s=0.01), test)


def test_the_whole_answer_equals_the_streamed_one(tmp_path: Path) -> None:
    token_ids = ids(ANSWER)

    async def test(gateway: RunningGateway) -> None:
        whole = await gateway.stub.Generate(request(max_tokens=len(token_ids), request_id="mine"))
        assert whole.request_id == "mine"
        [completion] = whole.completions
        assert completion.text == ANSWER
        assert completion.token_ids == token_ids
        assert completion.finish.reason == gateway_pb2.FINISH_REASON_LENGTH
        assert completion.finish.usage.num_output_tokens == len(token_ids)

    with_gateway(tmp_path, FakeDense(say(token_ids)), test)


def test_each_of_many_streams_gets_its_own_answer(tmp_path: Path) -> None:
    answers = {f"r{i}": f"Answer {i} is {'very ' * i}short. 東{i}京" for i in range(40)}

    async def test(gateway: RunningGateway) -> None:
        streams = (
            stream(gateway, request_id=name, max_tokens=len(ids(text))) for name, text in answers.items()
        )
        received = await asyncio.gather(*streams)
        assert [answer.text for answer in received] == list(answers.values())

    with_gateway(tmp_path, FakeDense(lambda submit: ids(answers[submit.spec.request_id])), test)


def test_eos_ends_the_answer_and_is_not_part_of_its_text(tmp_path: Path) -> None:
    token_ids = [*ids("Hello."), EOS]

    async def test(gateway: RunningGateway) -> None:
        answer = await stream(gateway, max_tokens=20, skip_special_tokens=False)
        assert answer.text == "Hello."
        assert answer.token_ids == token_ids
        assert answer.finish.reason == gateway_pb2.FINISH_REASON_STOP
        assert answer.finish.stop_token_id == EOS
        assert not answer.finish.HasField("stop_string")
        assert answer.finish.usage.num_output_tokens == len(token_ids)

    with_gateway(tmp_path, FakeDense(say([*token_ids, *ids("never")])), test)


def test_ignored_eos_is_like_any_other_token(tmp_path: Path) -> None:
    token_ids = [*ids("Hello."), EOS, *ids(" More")]

    async def test(gateway: RunningGateway) -> None:
        hidden = await stream(gateway, max_tokens=len(token_ids), ignore_eos=True)
        assert hidden.text == "Hello. More"
        shown = await stream(
            gateway, max_tokens=len(token_ids), ignore_eos=True, skip_special_tokens=False
        )
        assert shown.text == f"Hello.{REFERENCE.eos_token} More"
        assert shown.finish.reason == gateway_pb2.FINISH_REASON_LENGTH

    with_gateway(tmp_path, FakeDense(say(token_ids)), test)


def test_a_stop_token_is_not_part_of_the_text(tmp_path: Path) -> None:
    token_ids = ids("one two three four")
    stop_token_id = token_ids[-2]
    assert stop_token_id not in token_ids[:-2]

    async def test(gateway: RunningGateway) -> None:
        answer = await stream(gateway, max_tokens=50, stop_token_ids=[stop_token_id])
        assert answer.text == text_of(token_ids[:-2])
        assert answer.token_ids == token_ids[:-1]
        assert answer.finish.stop_token_id == stop_token_id

    with_gateway(tmp_path, FakeDense(say(token_ids)), test)


@pytest.mark.parametrize("step_s", [0.0, 0.001])
def test_a_stop_string_cuts_the_text_exactly(step_s: float, tmp_path: Path) -> None:
    text = "Tokio, 東京, 🙂🙃\n \n\nTokyo is big."
    token_ids = ids(text)

    async def test(gateway: RunningGateway) -> None:
        cases = itertools.product(["\n\n", "Tokyo is", "東京", "🙂🙃", "k"], [False, True])
        for num_answers, (stop, is_included) in enumerate(cases, start=1):
            end = text.index(stop)
            tokens_needed = next(n for n in range(len(token_ids) + 1) if stop in text_of(token_ids[:n]))
            answer = await stream(
                gateway, max_tokens=1900, stop=["absent", stop], include_stop_str_in_output=is_included
            )
            assert answer.text == text[: end + len(stop) if is_included else end], stop
            assert answer.finish.reason == gateway_pb2.FINISH_REASON_STOP
            assert answer.finish.stop_string == stop
            assert not answer.finish.HasField("stop_token_id")
            assert answer.token_ids == token_ids[:tokens_needed], stop
            assert answer.finish.usage.num_output_tokens == tokens_needed
            await until(lambda: not dense.running)
            assert len(dense.cancelled_seq_ids) == num_answers

    dense = FakeDense(say([*token_ids, *ids(" and so on" * 600)]), step_s=step_s)
    with_gateway(tmp_path, dense, test)


def test_text_that_only_begins_like_a_stop_string_is_kept(tmp_path: Path) -> None:
    token_ids = ids("The end is nea")

    async def test(gateway: RunningGateway) -> None:
        answer = await stream(gateway, max_tokens=len(token_ids), stop=["near"])
        assert answer.text == "The end is nea"
        assert answer.finish.reason == gateway_pb2.FINISH_REASON_LENGTH

    with_gateway(tmp_path, FakeDense(say(token_ids)), test)


def test_a_cancelled_call_is_cancelled_at_the_dense_worker(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        streaming = gateway.stub.GenerateStream(request(request_id="streaming"))
        whole = gateway.stub.Generate(request(request_id="whole"))
        async for _ in streaming:
            break
        await until(lambda: len(dense.running) == 2)
        streaming.cancel()
        whole.cancel()
        await until(lambda: len(dense.cancelled_seq_ids) == 2)
        assert not dense.running
        assert (await stream(gateway, request_id="streaming", max_tokens=3)).token_ids  # the request_id is free again

    dense = FakeDense(say(ids("word " * 5000)), step_s=0.001)
    with_gateway(tmp_path, dense, test)


@asynccontextmanager
async def unread_call(
    gateway: RunningGateway, dense: FakeDense, max_tokens: int
) -> AsyncIterator[grpc.aio.UnaryStreamCall]:
    """A stream that the client has read only once. All its tokens are at the gateway, more than it can send."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]  # small buffers
    async with grpc.aio.insecure_channel(gateway.address, options=options) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).GenerateStream(
            request(prompt_token_ids={"ids": [5]}, max_tokens=max_tokens, request_id="r" * 128)
        )
        await call.read()
        await until(lambda: all(each.num_output_tokens == NUM_UNREAD for each in dense.running.values()))
        yield call


NUM_UNREAD = 1000


def test_a_slow_reader_gets_the_rest_in_few_chunks(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        async with unread_call(gateway, dense, max_tokens=NUM_UNREAD) as call:
            chunks = []
            while (chunk := await call.read()) is not grpc.aio.EOF:
                chunks.append(chunk)
            assert len(chunks) < NUM_UNREAD / 2
            assert sum(len(chunk.token_ids) for chunk in chunks) == NUM_UNREAD - 1
            assert chunks[-1].finish.usage.num_output_tokens == NUM_UNREAD

    dense = FakeDense(say(ids("x") * NUM_UNREAD), max_model_len=2 * NUM_UNREAD)
    with_gateway(tmp_path, dense, test)


def test_a_call_that_nobody_reads_can_be_cancelled(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        with capture_logs() as events:
            async with unread_call(gateway, dense, max_tokens=NUM_UNREAD + 1) as call:
                call.cancel()
                await until(lambda: not dense.running)
        [end] = [event for event in events if event["event"] == "request ended"]
        assert end["reason"] == "cancelled"
        assert end["num_output_tokens"] < NUM_UNREAD  # the handler was waiting to send

    dense = FakeDense(say(ids("x") * NUM_UNREAD), max_model_len=2 * NUM_UNREAD)
    with_gateway(tmp_path, dense, test)


@pytest.mark.parametrize("reads_on", [True, False])
def test_a_call_that_nobody_reads_is_ended(reads_on: bool, tmp_path: Path) -> None:
    def num_aborts() -> int:
        return sum("SlowReaders" in repr(task.get_coro()) for task in asyncio.all_tasks())

    async def test(gateway: RunningGateway) -> None:
        with capture_logs() as events:
            async with unread_call(gateway, dense, max_tokens=NUM_UNREAD + 1) as call:
                await until(lambda: not dense.running)
                await until(lambda: num_aborts() == 1)
                if reads_on:
                    with pytest.raises(grpc.aio.AioRpcError, match=r"not read for 0\.5 s") as caught:
                        while await call.read() is not grpc.aio.EOF:
                            pass
                    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                else:
                    call.cancel()
                await until(lambda: num_aborts() == 0)
        assert [event["request_id"] for event in events if event["event"] == "call cut"] == ["r" * 128]
        assert (await stream(gateway, max_tokens=3)).token_ids  # others are served

    dense = FakeDense(say(ids("x") * NUM_UNREAD), max_model_len=2 * NUM_UNREAD)
    with_gateway(tmp_path, dense, test, slow_reader_timeout_s=0.5)


def test_a_deadline_cancels_the_request(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        while not dense.submits:  # on a busy machine the deadline may come before the request
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await gateway.stub.Generate(request(), timeout=1.0)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: dense.cancelled_seq_ids == [submit.seq_id for submit in dense.submits])

    dense = FakeDense(say(ids("hangs")))
    with_gateway(tmp_path, dense, test)


@pytest.mark.parametrize(
    ("fields", "details"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt_token_ids": {"ids": [10**6]}}, r"must be in \[0, 32000\)"),
        ({"sampling": {"min_tokens": 4096}}, "model's maximum context length is 2048 tokens"),
        ({"sampling": {"top_p": 2.0}}, "top_p is 2"),
        ({"request_id": "running"}, "in use"),
    ],
)
def test_a_wrong_request_is_refused_while_another_one_runs(
    fields: dict[str, Any], details: str, tmp_path: Path
) -> None:
    token_ids = ids("word " * 100)
    given = token_ids[:10]  # the others come when the wrong requests are over

    async def test(gateway: RunningGateway) -> None:
        running = asyncio.create_task(stream(gateway, request_id="running", max_tokens=len(token_ids)))
        await until(lambda: len(dense.running) == 1)
        for method in (gateway.stub.Generate, gateway.stub.GenerateStream):
            with pytest.raises(grpc.aio.AioRpcError, match=details) as caught:
                call = method(request(**fields))
                await (call if method is gateway.stub.Generate else call.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(dense.submits) == 1 and not running.done()
        given.extend(token_ids[10:])
        await stream(gateway, max_tokens=1)  # which wakes the dense worker
        assert (await running).token_ids == token_ids

    dense = FakeDense(say(given))
    with_gateway(tmp_path, dense, test)


def test_an_error_of_the_dense_worker_reaches_its_client_only(tmp_path: Path) -> None:
    token_ids = ids(ANSWER)

    async def test(gateway: RunningGateway) -> None:
        dense.errors["bad"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "needs 9 blocks, there are 8")
        good = asyncio.create_task(stream(gateway, request_id="good", max_tokens=len(token_ids)))
        with pytest.raises(grpc.aio.AioRpcError, match="needs 9 blocks") as caught:
            await stream(gateway, request_id="bad")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await good).text == ANSWER

    dense = FakeDense(say(token_ids))
    with_gateway(tmp_path, dense, test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_log_probabilities_of_a_whole_vocabulary_are_encoded_in_a_turn_for_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """A prompt may have four million of them, which would take a second at once."""
    turn, num_turns, vocab_size, token_ids = HeavyWork.turn, 0, 32_000, list(range(100, 112))

    async def counted(work: HeavyWork) -> None:
        nonlocal num_turns
        num_turns += 1
        await turn(work)

    monkeypatch.setattr(HeavyWork, "turn", counted)

    async def test(gateway: RunningGateway) -> None:
        asked = request(max_tokens=1, prompt_logprobs=vocab_size)
        asked.prompt_token_ids.ids.extend(token_ids)
        if is_stream:
            [prompt] = [each.prompt async for each in gateway.stub.GenerateStream(asked) if each.HasField("prompt")]
        else:
            prompt = (await gateway.stub.Generate(asked)).prompt
        for token_id, row in zip(token_ids[1:], prompt.logprobs, strict=True):
            assert (row.logprob, row.rank) == (fake_logprob(token_id), token_id + 1)
            assert list(row.top_token_ids) == list(range(vocab_size))
            assert list(row.top_logprobs) == list(map(fake_logprob, range(vocab_size)))
        assert num_turns >= len(prompt.logprobs)

    with_gateway(tmp_path, FakeDense(say([EOS]), vocab_size=vocab_size), test)
