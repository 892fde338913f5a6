"""`HealthServicer`: `grpc.health.v1` in a service's event loop.

The servicer of grpcio-health-checking holds a lock while it writes to a watcher, and every change of status needs that
lock. One client that reads nothing (a flow-control window of 0) then blocks all changes, and the server's stop, for
ever.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.shorten import quote

Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The health service. `set` never waits for a client that checks or watches."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # set by one change, then replaced by a new event
        self._is_shut = False

    def set(self, names: list[str], status: int) -> None:
        """Sets the status of the services `names`. Does nothing after `shut`."""
        if not self._is_shut:
            self._statuses.update(dict.fromkeys(names, status))
            self._changed.set()
            self._changed = asyncio.Event()

    def shut(self) -> None:
        """Sets all services to NOT_SERVING for good."""
        self.set(list(self._statuses), Status.NOT_SERVING)
        self._is_shut = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> Status:
        """Answers with the status of a service, or with the error NOT_FOUND."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {quote(request.service)}")
        return Status(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        """Answers with the status of every service."""
        statuses = {name: Status(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        """Streams the status of a service and each change of it. A slow reader gets only the latest status."""
        last_status = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status != last_status:
                await context.write(Status(status=status))
                last_status = status
            await changed.wait()
