"""How the first rank attaches to all others: what it asks before what, and what ends an attempt."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2

from services.channel import ChannelSpec
from services.common.config import PeerSection
from services.common.errors import ConfigError, PeerError, StaleEpoch, TwostrokeError
from services.common.rank import Rank
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.engine.attention_client import AttachOptions
from services.dense_worker.engine.session import NO_ATTACHMENT
from services.dense_worker.ranks.ranked_attention_client import OtherRank, RankedAttentionClient
from services.pb import attn_pb2
from services.rpc.error_details import rich_status

CPU = torch.device("cpu")
SPEC = ChannelSpec(max_tokens=1, qkv_size=1, attn_size=1, dtype=torch.float32)
LIMIT_S = 10.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Process:
    """The stub of an attention worker or a shard. Calls are counted; those that raise nothing may take long."""

    def __init__(self, error: Exception | None = None, status: int = SERVING, takes_s: float = 0.0) -> None:
        self.num_calls = self.num_cancelled = 0
        self._error, self._status, self._takes_s = error, status, takes_s

    async def Check(self, request: object, timeout: float) -> Any:
        return SimpleNamespace(status=self._status)

    async def _call(self) -> attn_pb2.AttachReply:
        self.num_calls += 1
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return attn_pb2.AttachReply(block_size=16)

    async def Attach(self, request: object, timeout: float) -> attn_pb2.AttachReply:
        return await self._call()

    async def Join(self, request: object, timeout: float) -> attn_pb2.AttachReply:
        return await self._call()


def as_call_fails(error: TwostrokeError) -> grpc.aio.AioRpcError:
    """What a client gets from a server that raises `error`."""
    status = rich_status(error)
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )


def attach(attention: list[Process], shard: Process) -> Attachment:
    """Tries once with two ranks. The first one's attachment has no channels."""

    async def run() -> Attachment:
        options = AttachOptions("", "", 1, SPEC, CPU, LIMIT_S)
        other = OtherRank("127.0.0.1:9", "127.0.0.1:10", options)
        client: Any = RankedAttentionClient("127.0.0.1:8", options, PeerSection(), asyncio.Event(), Rank(0, 2), [other])
        client._attention_stubs, client._shard_stubs = attention, [shard]
        client._health_stubs = dict(zip(("attention 0", "attention 1", "shard 1"), [*attention, shard], strict=True))
        client._map = lambda reply: NO_ATTACHMENT
        return await asyncio.wait_for(client._attach_once(), LIMIT_S)

    return asyncio.run(run())


def test_nobody_is_asked_to_attach_before_all_are_ready() -> None:
    attention = [Process(), Process(status=NOT_SERVING)]
    with pytest.raises(PeerError, match="attention 1 is not ready"):
        attach(attention, Process())
    assert attention[0].num_calls == attention[1].num_calls == 0


def test_an_attach_that_fails_ends_the_others() -> None:
    attention = [Process(takes_s=60.0), Process(error=as_call_fails(PeerError("it stops")))]
    with pytest.raises(grpc.aio.AioRpcError):
        attach(attention, Process())
    assert attention[0].num_calls == attention[0].num_cancelled == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StaleEpoch("its region does not exist"), PeerError),
        (PeerError("it has not loaded its weights"), PeerError),
        (ConfigError("it has other weights"), ConfigError),
    ],
)
def test_a_join_that_fails_is_named_and_retried_where_that_may_help(
    error: TwostrokeError, kind: type[TwostrokeError]
) -> None:
    """And the first rank's thread does not go on waiting for it: the test would take its 10 s."""
    with pytest.raises(kind, match=f"the dense shard of rank 1 at 127.0.0.1:10: .*: {error}"):
        attach([Process(), Process()], Process(error=as_call_fails(error)))
