"""`Siblings`: the other gateways at the same ports. The kernel distributes connections, not requests.

A client's Abort may reach another process than its request, and an adapter must be known to all of them. So such calls
are passed on to all siblings, at their own sockets and with the caller's credentials: each sibling checks them itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import grpc
import structlog

from services.common.errors import PeerError
from services.pb import gateway_pb2, gateway_pb2_grpc
from services.rpc.client import open_channel

log = structlog.get_logger()

PASSED_ON = "twostroke-passed-on"  # metadata key of a call that a sibling passes on
TIMEOUT_S = 2.0
ADAPTER_TIMEOUT_S = 60.0  # a sibling reads the files of an adapter

Metadata = Iterable[tuple[str, str | bytes]]
T = TypeVar("T")


class Siblings:
    """Used in the event loop. Keeps no connections, because such calls are rare and siblings may restart."""

    def __init__(self, addresses: Sequence[str], max_message_bytes: int) -> None:
        self._addresses = addresses
        self._max_message_bytes = max_message_bytes

    async def abort(self, request: gateway_pb2.AbortRequest, metadata: Metadata) -> bool:
        """Returns whether the request ran at a sibling. An Abort from a sibling is not passed on again."""
        replies = await self.pass_on(
            lambda channel, **options: gateway_pb2_grpc.GatewayStub(channel).Abort(request, **options), metadata
        )
        return any(reply.was_running for reply in replies)

    async def load_adapter(self, request: gateway_pb2.LoadAdapterRequest, metadata: Metadata) -> None:
        """Raises `PeerError` with the names and reasons of siblings that do not serve the adapter now."""
        outcomes = await self._call_all(
            lambda channel, **options: gateway_pb2_grpc.GatewayStub(channel).LoadAdapter(request, **options),
            metadata,
            ADAPTER_TIMEOUT_S,
        )
        _require_all(outcomes, f"adapter {request.name!r} is loaded, but not in", "load it again in place of this one")

    async def unload_adapter(self, request: gateway_pb2.UnloadAdapterRequest, metadata: Metadata) -> None:
        """Raises `PeerError` with the names and reasons of siblings that may still serve the adapter."""
        outcomes = await self._call_all(
            lambda channel, **options: gateway_pb2_grpc.GatewayStub(channel).UnloadAdapter(request, **options),
            metadata,
            ADAPTER_TIMEOUT_S,
        )
        failed = {address: outcome for address, outcome in outcomes.items() if not _is_not_found(outcome)}
        _require_all(failed, f"adapter {request.name!r} is forgotten, but not in", "load and unload it again")

    async def pass_on(self, call: Callable[..., Awaitable[T]], metadata: Metadata) -> list[T]:
        """The answers of all siblings that answer in time; none if a sibling has made this call.

        `call(channel, metadata=..., timeout=...)` makes the call; `metadata` is that of the client.
        """
        answers = []
        for address, outcome in (await self._call_all(call, metadata, TIMEOUT_S)).items():
            if isinstance(outcome, grpc.aio.AioRpcError):  # a sibling that is restarting has no requests
                log.warning("a sibling did not answer", address=address, reason=outcome.details())
            else:
                answers.append(outcome)
        return answers

    async def _call_all(
        self, call: Callable[..., Awaitable[T]], metadata: Metadata, timeout_s: float
    ) -> dict[str, T | grpc.aio.AioRpcError]:
        """By address; empty if a sibling has made this call."""
        by_name = dict(metadata)
        if PASSED_ON in by_name:
            return {}
        passed_on = [(PASSED_ON, "1")]
        if "authorization" in by_name:
            passed_on.append(("authorization", by_name["authorization"]))

        async def outcome(address: str) -> T | grpc.aio.AioRpcError:
            async with open_channel(address, self._max_message_bytes) as channel:
                try:
                    return await call(channel, metadata=passed_on, timeout=timeout_s)
                except grpc.aio.AioRpcError as error:
                    return error

        return dict(zip(self._addresses, await asyncio.gather(*map(outcome, self._addresses)), strict=True))


def _is_not_found(outcome: object) -> bool:
    return isinstance(outcome, grpc.aio.AioRpcError) and outcome.code() is grpc.StatusCode.NOT_FOUND


def _require_all(outcomes: Mapping[str, object], what: str, advice: str) -> None:
    failed = [
        f"the gateway at {address} ({outcome.details()})"
        for address, outcome in outcomes.items()
        if isinstance(outcome, grpc.aio.AioRpcError)
    ]
    if failed:
        raise PeerError(f"{what} {', '.join(failed)}: {advice}")
