"""A slow client gets a 408. A request that arrived in time is served, even if the gateway was too busy to read it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from services.gateway import service
from services.gateway.resources.memory_budget import MemoryBudget
from tests.support.clients.http_clients import connect, connect_socket, request_bytes
from tests.support.cluster import free_port
from tests.support.running_gateway import run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense

TIMEOUT_S = 0.3
IN_TIME_S = 0.9  # a busy machine may stop this process for a while, which must not make a request late
BLOCKED_S = 1.4  # longer than all these
MAX_ROUNDS = 10
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
POST = request_bytes("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
END_OF_HEADERS = POST.index(b"\r\n\r\n") + 4


def with_connection(tmp_path: Path, test: Any, **options: float) -> None:
    async def body() -> None:
        dense = FakeDense(lambda submit: [5])  # and then no more tokens
        async with running_gateway(tmp_path, dense, **options) as gateway:
            reader, writer = await connect(gateway.http_address)
            await test(dense, reader, writer)
            writer.close()

    run(body())


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, bytes], bytes]:
    """Status line, headers and body of one answer."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
    headers = {name.decode(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    return status, headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        (b"", "headers"),
        (b"GE", "headers"),
        (HEALTH[:-2], "headers"),
        (POST[:END_OF_HEADERS], "body"),
        (POST[:-1], "body"),
    ],
    ids=["nothing", "part of the first line", "headers without end", "no body", "part of the body"],
)
def test_a_slow_client_gets_a_408(tmp_path: Path, sent: bytes, part: str) -> None:
    async def test(dense: FakeDense, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        status, headers, body = await read_answer(reader)
        assert status == b"HTTP/1.1 408 Request Timeout"
        assert headers["connection"] == b"close" and headers["x-request-id"]
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
        key = {"headers": "header_timeout_s", "body": "body_timeout_s"}[part]
        assert part in error["message"] and "0.3 s" in error["message"] and f"gateway.{key}" in error["message"]
        assert await reader.read() == b"", "the connection must be closed"

    with_connection(tmp_path, test, header_timeout_s=TIMEOUT_S, body_timeout_s=TIMEOUT_S)


async def send_and_block(bare: socket.socket, data: bytes) -> float:
    """Sends data, then blocks the gateway's event loop, so that its timers expire before it reads the data.

    Returns when the data was sent, on the monotonic clock.
    """
    loop, sent_at = asyncio.get_running_loop(), asyncio.Future[float]()
    waker, woken = socket.socketpair()

    def block() -> None:
        loop.remove_reader(woken)
        bare.sendall(data)
        now = time.monotonic()
        time.sleep(BLOCKED_S)
        sent_at.set_result(now)

    with waker, woken:
        loop.add_reader(woken, block)
        waker.send(b"x")
        return await sent_at


async def read_status(bare: socket.socket) -> int:
    """The status of a whole answer, which may arrive in pieces."""

    def read() -> int:
        with http.client.HTTPResponse(bare) as response:
            response.begin()
            response.read()
            return response.status

    return await asyncio.to_thread(read)


def check_in_time(tmp_path: Path, first: bytes, rest: bytes, **limits: float) -> None:
    """Sends `first` and soon afterwards `rest`, before which the gateway is blocked. Both must be served.

    A busy machine may stop this process in between for so long that `rest` is late. Then it is tried again.
    """

    async def body() -> None:
        async with running_gateway(tmp_path, FakeDense(lambda submit: [5]), **limits) as gateway:
            for _ in range(MAX_ROUNDS):
                start = time.monotonic()
                with connect_socket(gateway.http_address) as bare:
                    bare.sendall(first)
                    if first == HEALTH:
                        assert await read_status(bare) == 200
                    else:
                        await asyncio.sleep(TIMEOUT_S / 3)  # the gateway has read this and waits for the rest
                    sent_at = await send_and_block(bare, rest)
                    if sent_at - start < IN_TIME_S:
                        assert await read_status(bare) == 200
                        return
        raise AssertionError(f"{MAX_ROUNDS} times not sent within {IN_TIME_S} s")

    run(body())


@pytest.mark.parametrize("num_before", [0, 2, END_OF_HEADERS, len(POST) - 1])
def test_a_request_in_time_is_served_by_a_busy_gateway(tmp_path: Path, num_before: int) -> None:
    limits = {"header_timeout_s": IN_TIME_S, "body_timeout_s": IN_TIME_S}
    check_in_time(tmp_path, POST[:num_before], POST[num_before:], **limits)


def test_a_further_request_in_time_is_served_by_a_busy_gateway(tmp_path: Path) -> None:
    check_in_time(tmp_path, HEALTH, HEALTH, keep_alive_timeout_s=IN_TIME_S)


def test_an_idle_connection_is_closed_without_a_408(tmp_path: Path) -> None:
    async def test(dense: FakeDense, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEALTH)
        status, _, _ = await read_answer(reader)
        assert status == b"HTTP/1.1 200 OK"
        assert await reader.read() == b""

    with_connection(tmp_path, test, keep_alive_timeout_s=TIMEOUT_S)


def test_a_running_request_gets_no_408_for_half_a_further_request(tmp_path: Path) -> None:
    async def test(dense: FakeDense, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        endless = request_bytes("/v1/completions", {"prompt": "Hello", "max_tokens": 50})
        writer.write(endless)
        await until(lambda: len(dense.running) == 1)
        writer.write(HEALTH[:10])
        assert await reader.read() == b""

    with_connection(tmp_path, test, header_timeout_s=IN_TIME_S)


def test_a_body_gets_no_408_while_it_waits_for_memory(tmp_path: Path) -> None:
    """The gateway itself does not read it then."""
    data = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode() + b" " * 1_000_000
    large = request_bytes("/v1/completions", data)

    async def body() -> None:
        dense = FakeDense(lambda submit: [5, 6] if len(dense.submits) > 1 else [5])  # the first one goes on
        limits = {"max_held_bytes": 5_000_000, "max_held_wait_s": 60.0, "body_timeout_s": TIMEOUT_S}
        async with running_gateway(tmp_path, dense, **limits) as gateway:
            _, holder = await connect(gateway.http_address)
            holder.write(large)
            await until(lambda: len(dense.running) == 1)
            reader, writer = await connect(gateway.http_address)
            writer.write(large)
            await asyncio.sleep(4 * TIMEOUT_S)
            assert len(dense.submits) == 1, "the second one waits"
            holder.close()
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()

    run(body())


@pytest.mark.parametrize(
    ("resets", "num_sent"),
    [(True, 2_000_000), (True, 300_000), (False, 100_000)],
    ids=["reset after the whole body", "reset within it", "closed within it"],
)
def test_a_client_that_leaves_while_its_body_waits_for_memory_frees_its_place_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resets: bool, num_sent: int
) -> None:
    """Nobody gets memory meanwhile, and nothing of its connection is read.

    So the end of a connection that is closed, which comes behind what was sent, is seen if that has room in the
    system's buffer; a reset is seen in any case.
    """
    data = json.dumps({"prompt": "Hello"}).encode() + b" " * 1_000_000
    large = request_bytes("/v1/completions", data, {"host": "localhost"})

    budgets = list[MemoryBudget]()

    def make_budget(*limits: Any) -> MemoryBudget:
        budgets.append(MemoryBudget(*limits))
        return budgets[-1]

    monkeypatch.setattr(service, "MemoryBudget", make_budget)

    async def body() -> None:
        dense = FakeDense(lambda submit: [5])  # and then no more tokens
        limits: dict[str, Any] = {"max_held_bytes": 5_000_000, "max_held_wait_s": 60.0, "max_held_waiting": 1}
        port = free_port()
        async with running_gateway(tmp_path, dense, http_address=f"127.0.0.1:{port}", **limits):
            [budget] = budgets
            _, holder = await asyncio.open_connection("127.0.0.1", port)
            holder.write(large)
            await until(lambda: len(dense.running) == 1)
            for _ in range(3):  # each has the only place
                _, leaving = await asyncio.open_connection("127.0.0.1", port)
                leaving.write(large[:num_sent])
                await until(lambda: budget.num_waiting == 1)
                if resets:
                    linger = struct.pack("ii", 1, 0)
                    leaving.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                leaving.transport.abort()
                await until(lambda: budget.num_waiting == 0)
            assert len(dense.submits) == 1
            holder.close()

    run(body())
