"""HTTP clients for tests: a usual one, a reader of server-sent events, and bare sockets for wrong requests."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

import httpx2

CLIENT_TIMEOUT_S = 60.0
VERIFY = False  # Unix sockets have no TLS; to read all certificate authorities takes 20 ms


def socket_path(address: str) -> str:
    """The path of `unix:PATH`."""
    assert address.startswith("unix:")
    return address.removeprefix("unix:")


def async_client(address: str) -> httpx2.AsyncClient:
    """An HTTP client for a gateway at `unix:PATH`."""
    transport = httpx2.AsyncHTTPTransport(uds=socket_path(address), verify=VERIFY)
    return httpx2.AsyncClient(transport=transport, base_url="http://gateway", timeout=CLIENT_TIMEOUT_S)


def client(address: str) -> httpx2.Client:
    """The same as `async_client`, without an event loop."""
    transport = httpx2.HTTPTransport(uds=socket_path(address), verify=VERIFY)
    return httpx2.Client(transport=transport, base_url="http://gateway", timeout=CLIENT_TIMEOUT_S)


def events(text: str) -> list[Any]:
    """The objects of a stream of events without the final [DONE]. Fails if the stream is incomplete."""
    *parts, rest = text.split("\n\n")
    assert rest == "", "an event was cut"
    assert all(part.startswith("data: ") for part in parts), text
    datas = [part.removeprefix("data: ") for part in parts]
    assert datas[-1] == "[DONE]", datas[-1]
    return [json.loads(data) for data in datas[:-1]]


def named_events(text: str) -> list[Any]:
    """The objects of a stream of events whose names are the types of the objects. Fails if the stream is incomplete."""
    *parts, rest = text.split("\n\n")
    assert rest == "", "an event was cut"
    objects = []
    for part in parts:
        name, data = part.split("\n")
        objects.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {objects[-1]['type']}", part
    return objects


def request_bytes(path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a POST request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "gateway", "content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


class KeptConnection:
    """Sends thousands of requests one after another, each for a fraction of what it costs a usual client.

    Answers have a length. Where the server closes the connection, the next request opens another one.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> KeptConnection:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._close()

    async def get(self, path: str) -> Any:
        """The JSON of a good answer."""
        status, body = await self._ask(f"GET {path} HTTP/1.1\r\nhost: gateway\r\n\r\n".encode())
        assert status == 200, body
        return json.loads(body)

    async def post(self, path: str, content: bytes) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        return await self._ask(request_bytes(path, content))

    async def _ask(self, data: bytes) -> tuple[int, bytes]:
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            if self._streams is None:
                self._streams = await connect(self._address)
            reader, writer = self._streams
            writer.write(data)
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            if headers.get("connection") == "close":
                await self._close()
        return int(status.split()[1]), body

    async def _close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()
            self._streams = None


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection."""
    return await asyncio.open_unix_connection(socket_path(address))


def connect_socket(address: str) -> socket.socket:
    """A bare connection, without an event loop. Waits while the server's backlog is full."""
    bare = socket.socket(socket.AF_UNIX)
    bare.settimeout(CLIENT_TIMEOUT_S)
    deadline = time.monotonic() + CLIENT_TIMEOUT_S
    while True:
        try:
            bare.connect(socket_path(address))
        except BlockingIOError:
            assert time.monotonic() < deadline, "the server accepts no connection"
            time.sleep(0.01)
        else:
            return bare
