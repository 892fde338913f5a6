"""gRPC calls that wait for their clients' messages: one client cannot end those of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.gateway.access import reception
from services.pb import gateway_pb2, triton_pb2
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

MOST = 4
GREEDY, OTHER = "198.51.100.1", "198.51.100.2"
GENERATE, STREAM = "/twostroke.v1.Gateway/Generate", "/inference.GRPCInferenceService/ModelStreamInfer"
FIRST = triton_pb2.ModelInferRequest(model_name="no_such_model", id="1").SerializeToString()


class Call:
    """Begins at once; sends messages when it is told to."""

    def __init__(self, gateway: RunningGateway, method: str, client: str) -> None:
        self._messages = asyncio.Queue[bytes | None]()
        make = gateway.channel.stream_unary if method == GENERATE else gateway.channel.stream_stream
        self.call: Any = make(method)(self._sent(), metadata=[("x-forwarded-for", client)])

    async def _sent(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            yield message

    def send(self, message: bytes | None) -> None:
        """None: no more."""
        self._messages.put_nowait(message)


async def status_of(call: Call) -> grpc.StatusCode:
    return await call.call.code()


def with_gateway(tmp_path: Path, test: Any) -> None:
    async def body() -> None:
        dense, limits = FakeDense(lambda _: [5]), {"max_receiving": MOST, "trusted_proxies": ("unix",)}
        async with running_gateway(tmp_path, dense, **limits) as gateway:
            await test(gateway)

    run(body())


def test_a_message_that_arrives_slowly_is_not_dropped_for_those_of_another_client(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        slow = Call(gateway, GENERATE, OTHER)
        await asyncio.sleep(0.1)  # so that it is the oldest
        greedy = [Call(gateway, GENERATE, GREEDY) for _ in range(3 * MOST)]
        ended = [status_of(each) for each in greedy[: 2 * MOST + 1]]
        assert set(await asyncio.gather(*ended)) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        slow.send(gateway_pb2.GenerateRequest(prompt="Hello", max_tokens=1).SerializeToString())
        slow.send(None)
        answer = gateway_pb2.GenerateResponse.FromString(await slow.call)
        assert len(answer.completions[0].token_ids) == 1
        assert not any(each.call.done() for each in greedy[2 * MOST + 1 :])
        for each in greedy:
            each.call.cancel()

    with_gateway(tmp_path, test)


def test_a_stream_that_waits_for_its_next_request_does_not_end_for_those_of_another_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "MAX_OPEN_STREAMS", MOST)

    async def open_stream(gateway: RunningGateway, client: str) -> Call:
        call = Call(gateway, STREAM, client)
        call.send(FIRST)
        answer = triton_pb2.ModelStreamInferResponse.FromString(await call.call.read())
        assert "no_such_model" in answer.error_message
        return call

    async def test(gateway: RunningGateway) -> None:
        other = await open_stream(gateway, OTHER)
        greedy = [await open_stream(gateway, GREEDY) for _ in range(3 * MOST)]
        assert await status_of(greedy[0]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        other.send(FIRST)
        answer = triton_pb2.ModelStreamInferResponse.FromString(await other.call.read())
        assert "no_such_model" in answer.error_message
        for each in (other, *greedy):
            each.call.cancel()

    with_gateway(tmp_path, test)


def test_a_message_that_has_come_is_read_although_many_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "READ_S", 0.05)

    async def body() -> None:
        calls, has_come = reception._Waiting(1), asyncio.Event()

        async def wait(until: asyncio.Event) -> None:
            async with asyncio.timeout(60) as limit:
                with calls.one_more((0, 1), limit):
                    await until.wait()

        never = asyncio.Event()
        tasks = [asyncio.create_task(wait(until)) for until in (has_come, never, asyncio.Event())]
        for _ in range(3):
            await asyncio.sleep(0)
        has_come.set()
        await tasks[0]
        with pytest.raises(TimeoutError):
            await tasks[1]
        assert not tasks[2].done()
        tasks[2].cancel()

    asyncio.run(body())


def test_a_call_whose_time_is_up_does_not_fail_the_one_that_comes_then() -> None:
    async def body() -> None:
        calls, ended = reception._Waiting(1), list[str]()
        loop = asyncio.get_running_loop()

        async def wait() -> None:
            async with asyncio.timeout(0.02) as limit:
                with calls.one_more((0, 1), limit):
                    await asyncio.sleep(60)

        def come() -> None:
            with calls.one_more((0, 1), asyncio.Timeout(None)):
                ended.append("has come")

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        loop.call_at(loop.time() + 0.021, come)  # in the same iteration, because the loop is late
        time.sleep(0.05)  # noqa: ASYNC251
        await asyncio.wait({waiting})
        assert isinstance(waiting.exception(), TimeoutError) and ended == ["has come"]

    asyncio.run(body())
