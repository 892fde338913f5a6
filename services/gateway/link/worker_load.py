"""How busy the two workers are, and how often services were restarted, read on demand.

What is not known, because a worker or the launcher does not answer, is `None`, not an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from services.common.config import PeerSection
from services.gateway.resources.shared_call import SharedCall
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc, launch_pb2, launch_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls

ANSWER_TIMEOUT_S = 1.0  # for a worker's answer; a busy worker answers between two steps
MAX_AGE_S = 0.5  # a worker is not asked more often, however many clients ask

Status = TypeVar("Status")


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Sequences at the dense worker, and what it has done since its start."""

    num_running: int
    num_waiting: int
    num_steps: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """Blocks of the KV cache; blocks that only hold a cached prefix count as free. Tokens since the worker's start."""

    num_blocks: int
    num_free_blocks: int
    block_size: int = 0  # tokens of one block
    num_cached_blocks: int = 0  # free ones with a prefix that a new sequence can reuse
    num_computed_tokens: int = 0  # of prompts, and those that were computed again
    num_cached_tokens: int = 0  # that new sequences found


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """A service of this machine's launcher. Nothing here is worth hiding: `/stats` needs no API key."""

    role: str  # attn_worker, dense_worker or gateway
    num_restarts: int
    is_running: bool
    standby: str | None  # off, starting or ready; None: it never has one


@dataclass(frozen=True, slots=True)
class Load:
    """The load of both workers; `None` if a worker did not answer."""

    requests: RequestLoad | None
    kv_cache: CacheLoad | None
    services: tuple[ServiceLoad, ...] | None = None  # None: no launcher, or no answer


class WorkerLoad:
    """Owns a channel to each worker and to the launcher. Used in the gateway's event loop."""

    def __init__(
        self, dense_address: str, attention_address: str, peers: PeerSection, launcher_address: str | None
    ) -> None:
        addresses = (dense_address, attention_address)
        tls = read_peer_tls(peers)
        self._channels = [open_channel(address, peers.max_message_bytes, tls) for address in addresses]
        self._dense = dense_pb2_grpc.DenseWorkerStub(self._channels[0])
        self._attention = attn_pb2_grpc.AttentionWorkerStub(self._channels[1])
        self._launcher = None
        if launcher_address is not None:
            self._channels.append(open_channel(launcher_address, peers.max_message_bytes))
            self._launcher = launch_pb2_grpc.LauncherStub(self._channels[-1])
        self._shared = SharedCall(self._ask, MAX_AGE_S)

    async def read(self) -> Load:
        """The load within the last `MAX_AGE_S`; takes at most `ANSWER_TIMEOUT_S`."""
        return await self._shared.read()

    async def close(self) -> None:
        """Closes the channels and cancels a running request."""
        await self._shared.close()
        for channel in self._channels:
            await channel.close()

    async def _ask(self) -> Load:
        dense, cache, launcher = await asyncio.gather(
            _answer(self._dense.GetStatus(dense_pb2.GetStatusRequest(), timeout=ANSWER_TIMEOUT_S)),
            _answer(self._attention.GetStatus(attn_pb2.GetStatusRequest(), timeout=ANSWER_TIMEOUT_S)),
            self._ask_launcher(),
        )
        return Load(
            None
            if dense is None
            else RequestLoad(dense.num_running, dense.num_waiting, dense.num_steps, dense.num_preemptions),
            None
            if cache is None
            else CacheLoad(
                cache.num_blocks,
                cache.num_free_blocks,
                cache.block_size,
                cache.num_cached_blocks,
                cache.num_computed_tokens,
                cache.num_cached_tokens,
            ),
            launcher,
        )

    async def _ask_launcher(self) -> tuple[ServiceLoad, ...] | None:
        if self._launcher is None:
            return None
        status = await _answer(self._launcher.GetStatus(launch_pb2.GetStatusRequest(), timeout=ANSWER_TIMEOUT_S))
        if status is None:
            return None
        standbys = {each.name: launch_pb2.StandbyStatus.State.Name(each.state).lower() for each in status.standbys}
        return tuple(
            ServiceLoad(each.role, each.num_restarts, each.pid > 0, standbys.get(each.name)) for each in status.services
        )


async def _answer(call: Awaitable[Status]) -> Status | None:
    try:
        return await call
    except grpc.aio.AioRpcError:
        return None
