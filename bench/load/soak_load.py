"""The mixed load of a soak: streams, unary answers, clients that leave, and requests that must be refused.

It runs in a process of its own with one event loop. Each answer is compared with the first answer to the same prompt,
and each refusal with its expected status, so that wrong answers are noticed.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc
import httpx2
import uvloop

from bench.load.grpc_transport import CHANNEL_OPTIONS
from bench.load.stats import NS_PER_MS
from services.pb import gateway_pb2, gateway_pb2_grpc, sampling_pb2

REQUEST_TIMEOUT_S = 60.0
PROMPTS = (
    "San Francisco is a",
    "The capital of",
    "Twostroke has two",
    "The dense worker owns",
    "The attention worker",
    "Once upon a time",
)
MAX_TOKENS = (8, 24, 48)
MIX = {"stream": 0.5, "unary": 0.15, "leave": 0.2, "bad": 0.15}  # shares of all requests


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """The outcome of one request."""

    end_s: float  # since the start of the load
    protocol: str  # grpc or http
    kind: str  # of MIX
    ttft_ms: float | None  # of streams that were read to the end
    latency_ms: float
    error: str | None  # how the server misbehaved


class _Unexpected(Exception):
    """The server misbehaved."""


def run_soak_load(
    grpc_address: str, http_address: str, num_clients: int, think_s: float, seed: int, parent: Connection
) -> None:
    """In the client process: sends requests until told to stop, then sends all `SoakRequest`s to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_run(grpc_address, http_address, num_clients, think_s, seed, parent))


async def _run(
    grpc_address: str, http_address: str, num_clients: int, think_s: float, seed: int, parent: Connection
) -> None:
    start_s = time.monotonic()
    stopping = asyncio.Event()
    requests: list[SoakRequest] = []
    expected: dict[tuple[str, int], str] = {}
    limits = httpx2.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
    transport = httpx2.AsyncHTTPTransport(uds=http_address.removeprefix("unix:"), limits=limits)
    async with (
        grpc.aio.insecure_channel(grpc_address, options=CHANNEL_OPTIONS) as channel,
        httpx2.AsyncClient(transport=transport, base_url="http://gateway", timeout=REQUEST_TIMEOUT_S) as http,
    ):
        senders = {"grpc": _Grpc(channel), "http": _Http(http)}

        async def client(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            protocol = ("grpc", "http")[number % 2]
            while not stopping.is_set():
                kind = rng.choices(list(MIX), MIX.values())[0]
                begin_s = time.monotonic()
                ttft_ms, error = await _attempt(getattr(senders[protocol], kind), rng, expected)
                now_s = time.monotonic()
                latency_ms = 1e3 * (now_s - begin_s)
                requests.append(SoakRequest(now_s - start_s, protocol, kind, ttft_ms, latency_ms, error))
                await asyncio.sleep(rng.expovariate(1 / think_s))

        clients = [asyncio.create_task(client(number)) for number in range(num_clients)]
        await asyncio.to_thread(parent.recv)  # waits for the command to stop
        stopping.set()
        await asyncio.gather(*clients)
    parent.send(requests)


async def _attempt(
    send: Callable[[random.Random, dict[tuple[str, int], str]], Awaitable[float | None]],
    rng: random.Random,
    expected: dict[tuple[str, int], str],
) -> tuple[float | None, str | None]:
    try:
        return await send(rng, expected), None
    except (_Unexpected, grpc.aio.AioRpcError, httpx2.HTTPError, TimeoutError) as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"


class _Grpc:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = gateway_pb2_grpc.GatewayStub(channel)

    async def stream(self, rng: random.Random, expected: dict[tuple[str, int], str]) -> float | None:
        prompt, max_tokens = rng.choice(PROMPTS), rng.choice(MAX_TOKENS)
        start_ns, ttft_ms, pieces = time.monotonic_ns(), None, []
        async for chunk in self._stub.GenerateStream(_message(prompt, max_tokens), timeout=REQUEST_TIMEOUT_S):
            if ttft_ms is None and chunk.token_ids:
                ttft_ms = (time.monotonic_ns() - start_ns) / NS_PER_MS
            pieces.append(chunk.text)
        _check(expected, prompt, max_tokens, "".join(pieces))
        return ttft_ms

    async def unary(self, rng: random.Random, expected: dict[tuple[str, int], str]) -> None:
        prompt, max_tokens = rng.choice(PROMPTS), rng.choice(MAX_TOKENS)
        answer = await self._stub.Generate(_message(prompt, max_tokens), timeout=REQUEST_TIMEOUT_S)
        _check(expected, prompt, max_tokens, answer.completions[0].text)

    async def leave(self, rng: random.Random, expected: dict[tuple[str, int], str]) -> None:
        call = self._stub.GenerateStream(_message(rng.choice(PROMPTS), 200, ignore_eos=True), timeout=REQUEST_TIMEOUT_S)
        for _ in range(rng.randrange(6)):
            await call.read()
        call.cancel()

    async def bad(self, rng: random.Random, expected: dict[tuple[str, int], str]) -> None:
        message, code = rng.choice(
            [
                (gateway_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
                (_message("hello", 0), grpc.StatusCode.INVALID_ARGUMENT),
                (_message("word " * 20_000, 8), grpc.StatusCode.INVALID_ARGUMENT),
                (_message("hello", 8, model="another"), grpc.StatusCode.NOT_FOUND),
                (_message("hello", 8, stop=[""]), grpc.StatusCode.INVALID_ARGUMENT),
            ]
        )
        try:
            await self._stub.Generate(message, timeout=REQUEST_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not code:
                raise
        else:
            raise _Unexpected(f"{str(message)[:100]!r} was answered")


class _Http:
    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def stream(self, rng: random.Random, expected: dict[tuple[str, int], str]) -> float | None:
        prompt, max_tokens = rng.choice(PROMPTS), rng.choice(MAX_TOKENS)
        start_ns, ttft_ms, pieces = time.monotonic_ns(), None, []
        body = _body(prompt, max_tokens, stream=True)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            _check_status(response, 200)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if ttft_ms is None:
                        ttft_ms = (time.monotonic_ns() - start_ns) / NS_PER_MS
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _Unexpected(f"an error in the stream: {event['error']}")
                    pieces += [choice["text"] for choice in event["choices"]]
        _check(expected, prompt, max_tokens, "".join(pieces))
        return ttft_ms

    async def unary(self, rng: random.Random, expected: dict[tuple[str, int], str]) -> None:
        prompt, max_tokens = rng.choice(PROMPTS), rng.choice(MAX_TOKENS)
        response = await self._client.post("/v1/completions", json=_body(prompt, max_tokens))
        _check_status(response, 200)
        _check(expected, prompt, max_tokens, response.json()["choices"][0]["text"])

    async def leave(self, rng: random.Random, expected: dict[tuple[str, int], str]) -> None:
        body = _body(rng.choice(PROMPTS), 200, stream=True, ignore_eos=True)
        num_lines = rng.randrange(12)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            _check_status(response, 200)
            lines = response.aiter_lines()
            for _ in range(num_lines):
                await anext(lines, None)

    async def bad(self, rng: random.Random, expected: dict[tuple[str, int], str]) -> None:
        content, status = rng.choice(
            [
                (b"{", 400),
                (b"[]", 400),
                (json.dumps(_body("hello", 0)).encode(), 400),
                (json.dumps(_body("word " * 20_000, 8)).encode(), 400),
                (json.dumps(_body("hello", 8, model="another")).encode(), 404),
                (json.dumps(_body("hello", 8, temperature="hot")).encode(), 400),
            ]
        )
        headers = {"content-type": "application/json"}
        _check_status(await self._client.post("/v1/completions", content=content, headers=headers), status)


def _check(expected: dict[tuple[str, int], str], prompt: str, max_tokens: int, text: str) -> None:
    first = expected.setdefault((prompt, max_tokens), text)
    if text != first:
        raise _Unexpected(f"{prompt!r} was answered with {text!r}, before with {first!r}")


def _check_status(response: httpx2.Response, status: int) -> None:
    if response.status_code != status:
        raise _Unexpected(f"status {response.status_code}, expected {status}")


def _message(prompt: str, max_tokens: int, **options: object) -> gateway_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(temperature=0.0)
    return gateway_pb2.GenerateRequest(prompt=prompt, sampling=sampling, max_tokens=max_tokens, **options)


def _body(prompt: str, max_tokens: int, **options: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0} | options
