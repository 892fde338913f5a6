"""`Readiness`: reports to gateways, health checks and the supervisor whether this dense worker can serve.

It can serve while it is attached and its engine is ready for steps; on a GPU the engine first captures graphs. When an
attachment ends, every gateway's stream ends with a farewell that says whether it was a crash; the gateways reconnect
and submit their sequences again. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.servicer import DenseServicer
from services.pb import dense_pb2
from services.rpc.server import GrpcServer

log = structlog.get_logger()


class Readiness:
    """An `AttachmentWatcher`. `describe` gives the description of the worker for gateways."""

    def __init__(
        self, servicer: DenseServicer, server: GrpcServer, describe: Callable[[Attachment], dense_pb2.DenseInfo]
    ) -> None:
        self._servicer = servicer
        self._server = server
        self._describe = describe

    async def ready(self, attachment: Attachment) -> None:
        """Begins to serve gateways."""
        info = self._describe(attachment)
        self._servicer.set_info(info)
        self._servicer.status.state = dense_pb2.DenseStatus.SERVING
        await self._server.set_serving(True)
        log.info("serving", backend=info.backend, device=info.device, dtype=info.dtype)

    async def detached(self, end: AttachmentEnd) -> None:
        """Ends the streams of all gateways, which may reconnect."""
        (log.warning if end.is_crash else log.info)("no attention worker", reason=end.reason, is_crash=end.is_crash)
        servicer = self._servicer
        servicer.set_info(None)
        servicer.note_unattached()
        running = servicer.spans_under_way() if end.is_crash else []
        servicer.end_streams(dense_pb2.Farewell(is_crash=end.is_crash, reason=end.reason, running=running))
        await self._server.set_serving(False)
