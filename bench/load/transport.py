"""A gateway's API as a load uses it: sends requests and reads answers, over gRPC or HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.pb import gateway_pb2
from services.rpc.client import nobody_answers

PROTOCOLS = ("grpc", "http")
CONNECT_TIMEOUT_S = 10.0


class LoadError(Exception):
    """The whole load failed. The failure of a single request is in its record instead."""


class RequestError(Exception):
    """One request failed; the message begins with the server's error code."""


class NobodyAnswers(RequestError):
    """No server listens at the address; the message is the API that it was to be for, gRPC or HTTP."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request, ready to be sent."""

    index: int  # position in the workload
    due_ns: int  # since the start of the run
    request_id: str
    message: bytes  # a GenerateRequest, as `Transport.encode` made it


@dataclass(frozen=True, slots=True)
class Answer:
    """The content of one answer's chunks."""

    chunk_num_tokens: list[int]
    usage: gateway_pb2.Usage | None  # None: no finish arrived
    error: str | None  # an error within the stream


class Transport(Protocol):
    """An open connection to one gateway."""

    async def model_info(self) -> gateway_pb2.ModelInfoResponse:
        """The served model, as far as this API describes it. Raises `RequestError`, also if no server answers."""
        ...

    def encode(self, message: gateway_pb2.GenerateRequest) -> bytes:
        """Encodes a request before the run, so that the load need not do it."""
        ...

    async def send(self, request: TimedRequest, timeout_s: float, on_chunk: Callable[[bytes], None]) -> None:
        """Sends a request and returns at the end of the answer. Passes each chunk, unparsed, to `on_chunk` at once.

        Raises `RequestError` if the request is refused, breaks or takes longer than `timeout_s`.
        """

    def parse(self, chunks: Sequence[bytes]) -> Answer:
        """Parses all chunks of one request, in order."""
        ...


def open_transport(protocol: str, address: str) -> contextlib.AbstractAsyncContextManager[Transport]:
    """Opens a transport. `address` is the gateway's for this protocol (one of PROTOCOLS): host:port or unix:PATH."""
    if protocol == "http":
        from bench.load.http_transport import open_http  # it needs httpx2

        return open_http(address)
    from bench.load.grpc_transport import open_grpc  # it needs this module

    return open_grpc(address)


async def served_model(transport: Transport, address: str) -> gateway_pb2.ModelInfoResponse:
    """The model that the gateway at `address` serves. Raises `LoadError`."""
    try:
        return await transport.model_info()
    except NobodyAnswers as error:
        raise LoadError(nobody_answers(address, str(error))) from error
    except RequestError as error:
        raise LoadError(f"gateway at {address}: {error}") from error
