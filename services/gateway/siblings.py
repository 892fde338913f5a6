"""`Siblings`: the other gateways at the same ports. The kernel distributes connections, not requests.

A client's Abort may reach another process than its request. So it is passed on to all siblings, at their own sockets
and with the caller's credentials: each sibling checks itself whether the request belongs to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import grpc
import structlog

from services.pb import gateway_pb2, gateway_pb2_grpc
from services.rpc.client import open_channel

log = structlog.get_logger()

PASSED_ON = "twostroke-passed-on"  # metadata key of an Abort that a sibling passes on
TIMEOUT_S = 2.0

Metadata = Iterable[tuple[str, str | bytes]]


class Siblings:
    """Used in the event loop. Keeps no connections, because an Abort is rare and siblings may restart."""

    def __init__(self, addresses: Sequence[str], max_message_bytes: int) -> None:
        self._addresses = addresses
        self._max_message_bytes = max_message_bytes

    async def abort(self, request: gateway_pb2.AbortRequest, metadata: Metadata) -> bool:
        """Returns whether the request ran at a sibling. An Abort from a sibling is not passed on again."""
        by_name = dict(metadata)
        if PASSED_ON in by_name:
            return False
        passed_on = [(PASSED_ON, "1")]
        if "authorization" in by_name:
            passed_on.append(("authorization", by_name["authorization"]))
        answers = await asyncio.gather(*(self._abort_at(address, request, passed_on) for address in self._addresses))
        return any(answers)

    async def _abort_at(
        self, address: str, request: gateway_pb2.AbortRequest, metadata: Sequence[tuple[str, str | bytes]]
    ) -> bool:
        async with open_channel(address, self._max_message_bytes) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            try:
                reply = await stub.Abort(request, metadata=metadata, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:  # a sibling that is restarting has no requests
                log.warning("a sibling was not asked to abort", address=address, reason=error.details())
                return False
            return reply.was_running
