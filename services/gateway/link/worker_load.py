"""How busy the two workers are, read on demand. The load of a worker that does not answer is `None`, not an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from services.common.config import PeerSection
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls

ANSWER_TIMEOUT_S = 1.0  # for a worker's answer; a busy worker answers between two steps
MAX_AGE_S = 0.5  # a worker is not asked more often, however many clients ask

Status = TypeVar("Status")


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Sequences at the dense worker."""

    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """Blocks of the KV cache; blocks that only hold a cached prefix count as free."""

    num_blocks: int
    num_free_blocks: int
    block_size: int = 0  # tokens of one block


@dataclass(frozen=True, slots=True)
class Load:
    """The load of both workers; `None` if a worker did not answer."""

    requests: RequestLoad | None
    kv_cache: CacheLoad | None


class WorkerLoad:
    """Owns a channel to each worker. Used in the gateway's event loop."""

    def __init__(self, dense_address: str, attention_address: str, peers: PeerSection) -> None:
        addresses = (dense_address, attention_address)
        tls = read_peer_tls(peers)
        self._channels = [open_channel(address, peers.max_message_bytes, tls) for address in addresses]
        self._dense = dense_pb2_grpc.DenseWorkerStub(self._channels[0])
        self._attention = attn_pb2_grpc.AttentionWorkerStub(self._channels[1])
        self._reading: asyncio.Task[Load] | None = None
        self._stale_at = 0.0

    async def read(self) -> Load:
        """The load within the last `MAX_AGE_S`; takes at most `ANSWER_TIMEOUT_S`."""
        loop = asyncio.get_running_loop()
        if self._reading is None or (self._reading.done() and loop.time() >= self._stale_at):
            self._reading = asyncio.create_task(self._ask())
            self._stale_at = loop.time() + MAX_AGE_S
        return await asyncio.shield(self._reading)  # a cancelled caller does not cancel it for the others

    async def close(self) -> None:
        """Closes the channels and cancels a running request."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        for channel in self._channels:
            await channel.close()

    async def _ask(self) -> Load:
        dense, cache = await asyncio.gather(
            _answer(self._dense.GetStatus(dense_pb2.GetStatusRequest(), timeout=ANSWER_TIMEOUT_S)),
            _answer(self._attention.GetStatus(attn_pb2.GetStatusRequest(), timeout=ANSWER_TIMEOUT_S)),
        )
        return Load(
            None if dense is None else RequestLoad(dense.num_running, dense.num_waiting),
            None if cache is None else CacheLoad(cache.num_blocks, cache.num_free_blocks, cache.block_size),
        )


async def _answer(call: Awaitable[Status]) -> Status | None:
    try:
        return await call
    except grpc.aio.AioRpcError:
        return None
