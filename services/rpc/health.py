"""`HealthServicer`: `grpc.health.v1` in a service's event loop.

That of grpcio-health-checking writes to a watcher while it holds the lock that a change of status needs: one client
that takes nothing (a flow-control window of 0) keeps every change, and the server's stop, waiting for ever.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.shorten import quote

Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Nobody who asks or watches delays `set`."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # of one change; then there is a new one
        self._is_shut = False

    def set(self, names: list[str], status: int) -> None:
        """What is answered for the services `names` from now on; nothing after `shut`."""
        if not self._is_shut:
            self._statuses.update(dict.fromkeys(names, status))
            self._changed.set()
            self._changed = asyncio.Event()

    def shut(self) -> None:
        """NOT_SERVING for all, whatever is set later."""
        self.set(list(self._statuses), Status.NOT_SERVING)
        self._is_shut = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> Status:
        """The status of a service, or NOT_FOUND."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {quote(request.service)}")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        """Writes the status of a service, then each that differs; a slow reader gets the latest."""
        last_status = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status != last_status:
                await context.write(Status(status=status))
                last_status = status
            await changed.wait()
