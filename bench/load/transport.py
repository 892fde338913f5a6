"""What a load needs of a gateway's API: to send a request and to read what came back, over gRPC or over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.pb import gateway_pb2

PROTOCOLS = ("grpc", "http")
CONNECT_TIMEOUT_S = 10.0


class LoadError(Exception):
    """The load could not be run at all; single requests that fail are in their records instead."""


class RequestError(Exception):
    """One request failed; the message begins with the server's word for it."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request, ready to be sent."""

    index: int  # position in the workload
    due_ns: int  # since the start of the run
    request_id: str
    message: bytes  # a GenerateRequest, as `Transport.encode` made it


@dataclass(frozen=True, slots=True)
class Answer:
    """What the chunks of one answer say."""

    chunk_num_tokens: list[int]
    usage: gateway_pb2.Usage | None  # None: no finish came
    error: str | None  # that the stream itself told


class Transport(Protocol):
    """An open way to one gateway."""

    async def model_info(self) -> gateway_pb2.ModelInfoResponse:
        """What is served, as far as this API tells. Raises `RequestError`, also where nothing answers."""
        ...

    def encode(self, message: gateway_pb2.GenerateRequest) -> bytes:
        """The request as it will be sent, so that nothing is left to do while the load runs."""
        ...

    async def send(self, request: TimedRequest, timeout_s: float, on_chunk: Callable[[bytes], None]) -> None:
        """Returns at the end of the answer, each chunk of which goes to `on_chunk`, unparsed, as soon as it is there.

        Raises `RequestError` if it is refused, breaks or takes longer than `timeout_s`.
        """

    def parse(self, chunks: Sequence[bytes]) -> Answer:
        """Of all chunks of one request, in order."""
        ...


def open_transport(protocol: str, address: str) -> contextlib.AbstractAsyncContextManager[Transport]:
    """`protocol` is one of PROTOCOLS, `address` its own one of the gateway: host:port or unix:PATH."""
    if protocol == "http":
        from bench.load.http_transport import open_http  # it needs httpx2

        return open_http(address)
    from bench.load.grpc_transport import open_grpc  # it needs this module

    return open_grpc(address)


async def served_model(transport: Transport, address: str) -> gateway_pb2.ModelInfoResponse:
    """The first thing to ask of the gateway at `address`. Raises `LoadError`."""
    try:
        return await transport.model_info()
    except RequestError as error:
        raise LoadError(f"gateway at {address}: {error}") from error
