"""`HttpTransport`: requests as streamed POST /v1/completions, one connection per running request.

While the load runs, events are only separated (the gateway ends each with two line feeds), not parsed. Requests go
directly to sockets: httpx2 takes 1.0 ms for one and the first event of its answer, which would count as the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import cast

import httptools
import httpx2

from bench.load.transport import CONNECT_TIMEOUT_S, Answer, LoadError, NobodyAnswers, RequestError, TimedRequest
from services.pb import gateway_pb2

END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]"
MAX_QUOTED_CHARACTERS = 200  # of an answer that is not an error of the gateway


class HttpTransport:
    """The `Transport` over HTTP. A chunk is a server-sent event; the last one is [DONE]."""

    def __init__(self, client: httpx2.AsyncClient, address: str) -> None:
        """`client` asks for the model at `address`, the gateway's."""
        self._client, self._address = client, address
        self._host = "localhost" if address.startswith("unix:") else address
        self._idle: list[_Connection] = []

    async def model_info(self) -> gateway_pb2.ModelInfoResponse:
        with _naming_failures(CONNECT_TIMEOUT_S):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                try:
                    response = await self._client.get("/v1/models")
                except httpx2.ConnectError as error:
                    raise NobodyAnswers("HTTP") from error
        if response.status_code != httpx2.codes.OK:
            raise RequestError(_describe_refusal(response.status_code, response.content))
        try:
            [model] = response.json()["data"]
            return gateway_pb2.ModelInfoResponse(
                model=model["id"], vocab_size=model["vocab_size"], max_model_len=model["max_model_len"]
            )
        except (ValueError, TypeError, LookupError) as error:
            raise RequestError(f"/v1/models is not a gateway's: {response.text[:MAX_QUOTED_CHARACTERS]!r}") from error

    def encode(self, message: gateway_pb2.GenerateRequest) -> bytes:
        body = {
            "prompt": message.prompt if message.HasField("prompt") else list(message.prompt_token_ids.ids),
            "max_tokens": message.max_tokens,
            "temperature": message.sampling.temperature,
            "ignore_eos": message.ignore_eos,
            "cache_salt": message.cache_salt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # an event may carry several tokens, or text without a new token
        }
        return json.dumps(body).encode()

    async def send(self, request: TimedRequest, timeout_s: float, on_chunk: Callable[[bytes], None]) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\nx-request-id: {request.request_id}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(request.message)}\r\n\r\n"
        )
        with _naming_failures(timeout_s):
            async with asyncio.timeout(timeout_s):
                while self._idle and self._idle[-1].is_closed:
                    self._idle.pop()
                connection = self._idle.pop() if self._idle else await _connect(self._address)
                try:
                    status, body = await connection.ask(head.encode() + request.message, on_chunk)
                except BaseException:
                    connection.close()
                    raise
        if not connection.is_closed:
            self._idle.append(connection)
        if status != HTTPStatus.OK:
            raise RequestError(_describe_refusal(status, body))

    def close(self) -> None:
        """Closes all connections without a request."""
        for connection in self._idle:
            connection.close()

    def parse(self, chunks: Sequence[bytes]) -> Answer:
        chunk_num_tokens, usage, error = [], None, None
        for chunk in chunks:
            event = {} if chunk == DONE else json.loads(chunk.removeprefix(b"data: "))
            chunk_num_tokens.append(sum(len(choice.get("token_ids", ())) for choice in event.get("choices", ())))
            if "error" in event:
                error = f"{event['error']['code']}: {event['error']['message']}"
            if event.get("usage"):
                usage = gateway_pb2.Usage(
                    num_prompt_tokens=event["usage"]["prompt_tokens"],
                    num_output_tokens=event["usage"]["completion_tokens"],
                    num_cached_tokens=event["usage"]["prompt_tokens_details"]["cached_tokens"],
                )
        has_finish = bool(chunks) and chunks[-1] == DONE
        return Answer(chunk_num_tokens, usage if has_finish else None, error)


@contextlib.asynccontextmanager
async def open_http(address: str) -> AsyncIterator[HttpTransport]:
    """`address` is that of the gateway's HTTP server."""
    is_unix = address.startswith("unix:")
    transport = httpx2.AsyncHTTPTransport(
        uds=address.removeprefix("unix:") if is_unix else None,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),  # the load limits them itself
        trust_env=False,
    )
    try:
        base_url = httpx2.URL("http://gateway" if is_unix else f"http://{address}")
    except httpx2.InvalidURL as error:
        raise LoadError(f"gateway at {address}: {error}") from error
    timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)  # the time limit holds for the whole request
    async with httpx2.AsyncClient(transport=transport, base_url=base_url, timeout=timeout, trust_env=False) as client:
        with contextlib.closing(HttpTransport(client, address)) as http:
            yield http


class _Connection(asyncio.Protocol):
    """A connection that carries one request after the other. httptools calls the methods for parts of an answer."""

    def __init__(self) -> None:
        self.is_closed = False
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[None] | None = None
        self._on_chunk: Callable[[bytes], None]
        self._transport: asyncio.Transport
        self._begun = b""  # of an event, or of an answer that refuses the request
        self._ends_with_connection = False  # whether the answer does: it has neither chunks nor a length

    async def ask(self, request: bytes, on_chunk: Callable[[bytes], None]) -> tuple[int, bytes]:
        """Sends a request. Passes the events of a stream to `on_chunk`; returns the status, and the body of an error.

        Raises `ConnectionError` or `httptools.HttpParserError`.
        """
        self._answered = asyncio.get_running_loop().create_future()
        self._on_chunk, self._begun = on_chunk, b""
        self._transport.write(request)
        await self._answered
        return self._parser.get_status_code(), self._begun

    def close(self) -> None:
        """May be called again."""
        self.is_closed = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        broken = ConnectionError("the server closed the connection before the end of the answer")
        self._end(exc or (None if self._ends_with_connection else broken))

    def on_message_begin(self) -> None:
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._ends_with_connection &= name.lower() not in (b"content-length", b"transfer-encoding")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != HTTPStatus.OK:
            self._begun += body
            return
        *events, self._begun = (self._begun + body).split(END_OF_EVENT)
        for event in events:
            self._on_chunk(event)

    def on_message_complete(self) -> None:
        self.is_closed = self.is_closed or not self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._answered is None or self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)


async def _connect(address: str) -> _Connection:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        if address.startswith("unix:"):
            _, connection = await loop.create_unix_connection(_Connection, address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            _, connection = await loop.create_connection(_Connection, host.strip("[]"), int(port))
    return connection


@contextlib.contextmanager
def _naming_failures(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise RequestError(f"timeout: no end of the answer within {timeout_s:g} s") from error
    except (httpx2.HTTPError, httptools.HttpParserError, OSError) as error:
        raise RequestError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _describe_refusal(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        said = f"{error['code']}: {error['message']}"
    except (ValueError, TypeError, LookupError):
        said = repr(body.decode(errors="replace")[:MAX_QUOTED_CHARACTERS])
    return f"{status} {said}"
