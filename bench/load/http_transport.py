"""`HttpTransport`: requests as streamed POST /v1/completions, one connection per running request.

While the load runs, events are only separated (the gateway ends each with two line feeds), not parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import httpx2

from bench.load.transport import CONNECT_TIMEOUT_S, Answer, LoadError, NobodyAnswers, RequestError, TimedRequest
from services.pb import gateway_pb2

END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]"
MAX_QUOTED_CHARACTERS = 200  # of an answer that is not an error of the gateway


class HttpTransport:
    """The `Transport` over HTTP. A chunk is a server-sent event; the last one is [DONE]."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def model_info(self) -> gateway_pb2.ModelInfoResponse:
        with _naming_failures(CONNECT_TIMEOUT_S):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                try:
                    response = await self._client.get("/v1/models")
                except httpx2.ConnectError as error:
                    raise NobodyAnswers("HTTP") from error
        _check_status(response)
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
        headers = {"content-type": "application/json", "x-request-id": request.request_id}
        with _naming_failures(timeout_s):
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", "/v1/completions", content=request.message, headers=headers) as response,
            ):
                if response.status_code != httpx2.codes.OK:
                    await response.aread()
                    _check_status(response)
                begun = b""
                async for data in response.aiter_raw():
                    *events, begun = (begun + data).split(END_OF_EVENT)
                    for event in events:
                        on_chunk(event)

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
        yield HttpTransport(client)


@contextlib.contextmanager
def _naming_failures(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise RequestError(f"timeout: no end of the answer within {timeout_s:g} s") from error
    except httpx2.HTTPError as error:
        raise RequestError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _check_status(response: httpx2.Response) -> None:
    if response.status_code == httpx2.codes.OK:
        return
    try:
        error = response.json()["error"]
        said = f"{error['code']}: {error['message']}"
    except (ValueError, TypeError, LookupError):
        said = repr(response.text[:MAX_QUOTED_CHARACTERS])
    raise RequestError(f"{response.status_code} {said}")
