"""`Siblings`: the other gateways at the same ports. The kernel distributes connections, not requests.

A client's Abort may reach another process than its request. So it is passed on to all siblings, at their own sockets
and with the caller's credentials: each sibling checks itself whether the request belongs to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import grpc
import structlog

from services.pb import gateway_pb2, gateway_pb2_grpc
from services.rpc.client import open_channel

log = structlog.get_logger()

PASSED_ON = "twostroke-passed-on"  # metadata key of an Abort that a sibling passes on
TIMEOUT_S = 2.0

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

    async def pass_on(self, call: Callable[..., Awaitable[T]], metadata: Metadata) -> list[T]:
        """The answers of all siblings that answer in time; none if a sibling has made this call.

        `call(channel, metadata=..., timeout=...)` makes the call; `metadata` is that of the client.
        """
        by_name = dict(metadata)
        if PASSED_ON in by_name:
            return []
        passed_on = [(PASSED_ON, "1")]
        if "authorization" in by_name:
            passed_on.append(("authorization", by_name["authorization"]))
        answers = await asyncio.gather(*(self._call_at(address, call, passed_on) for address in self._addresses))
        return [answer for answer in answers if answer is not None]

    async def _call_at(
        self, address: str, call: Callable[..., Awaitable[T]], metadata: Sequence[tuple[str, str | bytes]]
    ) -> T | None:
        async with open_channel(address, self._max_message_bytes) as channel:
            try:
                return await call(channel, metadata=metadata, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:  # a sibling that is restarting has no requests
                log.warning("a sibling did not answer", address=address, reason=error.details())
                return None
