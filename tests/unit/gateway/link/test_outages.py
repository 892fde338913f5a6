"""A gateway whose dense worker dies, is missing or starts late, and a gateway that stops."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest

from services.common.errors import ConfigError, PeerError
from tests.support.clients.gateway_calls import (
    ANSWER,
    NOT_SERVING,
    SERVING,
    ids,
    request,
    say,
    stream,
    with_gateway,
)
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense


def test_streams_survive_the_death_of_the_dense_worker(tmp_path: Path) -> None:
    token_ids = ids(ANSWER * 10)

    async def test(gateway: RunningGateway) -> None:
        fields = {"max_tokens": len(token_ids), "stop": ["nothing like this"]}
        plain = asyncio.create_task(stream(gateway, max_tokens=len(token_ids)))
        stopping = asyncio.create_task(stream(gateway, **fields))
        await until(lambda: sum(each.num_output_tokens > 20 for each in dense.running.values()) == 2)
        await dense.kill()
        await gateway.wait_health(NOT_SERVING)
        dense.submits.clear()
        await dense.start(gateway.dense_address)
        for answer in (await plain, await stopping):
            assert answer.text == ANSWER * 10
            assert answer.token_ids == token_ids
        assert all(len(submit.output_token_ids) > 0 for submit in dense.submits)
        await gateway.wait_health(SERVING)

    dense = FakeDense(say(token_ids), step_s=0.002)
    with_gateway(tmp_path, dense, test)


def test_streams_fail_when_the_dense_worker_does_not_return(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        running = asyncio.create_task(stream(gateway))
        await until(lambda: len(dense.running) == 1)
        await dense.kill()
        expected = rf"no dense worker at {gateway.dense_address} within 1.5 s: UNAVAILABLE: "
        with pytest.raises(grpc.aio.AioRpcError, match=expected) as caught:
            await running
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not gateway.service.done()

    dense = FakeDense(say(ids("word " * 1000)), step_s=0.001)
    with_gateway(tmp_path, dense, test, connect_timeout_s=1.5)


def test_without_a_dense_worker_the_gateway_reports_it_and_gives_up(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, dense=None, connect_timeout_s=3.0) as gateway:
            await gateway.wait_health(NOT_SERVING)
            with pytest.raises(grpc.aio.AioRpcError, match=r"dense.sock is not connected yet") as caught:
                await gateway.stub.Generate(request())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(PeerError, match=f"no dense worker at {gateway.dense_address} within 3 s: "):
                await gateway.service

    run(test())


def test_a_dense_worker_may_start_after_the_gateway(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(say(ids("late")))
        async with running_gateway(tmp_path, dense=None) as gateway:
            await gateway.wait_health(NOT_SERVING)
            await dense.start(gateway.dense_address)
            await gateway.wait_serving()
            assert (await stream(gateway, max_tokens=len(ids("late")))).text == "late"
        await dense.kill()

    run(test())


def test_a_taken_address_is_an_error_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, dense=None, address=address) as second:
            with pytest.raises(ConfigError, match=address):
                await second.service

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run(test())


def test_a_gateway_that_stops_ends_its_requests(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        running = asyncio.create_task(stream(gateway))
        await until(lambda: len(dense.running) == 1)
        gateway.service.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await running
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(asyncio.CancelledError):
            await gateway.service
        assert dense.num_streams == 0

    dense = FakeDense(say(ids("word " * 1000)), step_s=0.001)
    with_gateway(tmp_path, dense, test)
