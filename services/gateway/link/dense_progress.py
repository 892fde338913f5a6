"""`DenseProgress`: the dense worker's progress, for the gateway's watchdog. Runs in the gateway's event loop.

Every message counts as progress. But during a long prompt, or with a full queue, no message may arrive for minutes. So
while there is work, the gateway also checks the dense worker's health, which depends on the worker's own watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import PeerSection
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.journal import Journal
from services.rpc.client import open_channel, read_peer_tls
from services.rpc.watchdog import CHECKS_PER_BOUND, Progress


class DenseProgress:
    """The progress that a gateway's `Watchdog` reads."""

    def __init__(
        self, address: str, peers: PeerSection, journal: Journal, dense: DensePool, stall_timeout_s: float
    ) -> None:
        self._address = address
        self._max_message_bytes = peers.max_message_bytes
        self._tls = read_peer_tls(peers)
        self._journal = journal
        self._dense = dense
        self._interval_s = stall_timeout_s / CHECKS_PER_BOUND
        self._num_answers = 0  # health checks answered with SERVING

    def progress(self) -> Progress | None:
        """None without open requests, and without a stream, which the gateway reports anyway."""
        if not self._dense.is_connected:
            return None
        request_ids = tuple(dict.fromkeys(entry.spec.request_id for entry in self._journal.unfinished()))
        if not request_ids:
            return None
        return Progress(
            (self._dense.num_messages, self._num_answers), request_ids=request_ids, waits_for="dense_worker"
        )

    async def run(self) -> None:
        """Checks the health until cancelled."""
        async with open_channel(self._address, self._max_message_bytes, self._tls) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while True:
                await asyncio.sleep(self._interval_s)
                if self.progress() is None:
                    continue
                with contextlib.suppress(grpc.aio.AioRpcError):  # no answer is no progress
                    reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=self._interval_s)
                    self._num_answers += reply.status == health_pb2.HealthCheckResponse.SERVING
