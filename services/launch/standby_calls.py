"""What a `Standby` asks of the worker and of its spare: each kind of worker says it in its own way."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.launch.child import DENSE_ROLE
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc, shard_pb2, shard_pb2_grpc
from services.rpc.start_deadline import StartDeadline

CALL_TIMEOUT_S = 2.0  # of a question to a process that may be busy


class SpareState(NamedTuple):
    """How far a spare is."""

    is_ready: bool
    has_weights: bool = False
    device_bytes: int = 0  # that it has reserved on its GPU


class StandbyCalls(Protocol):
    """Of one kind of worker. All raise an error of gRPC if nobody answers."""

    async def serves(self, channel: grpc.aio.Channel) -> bool:
        """Whether the worker is attached to the others, so that the KV cache has its memory."""

    async def state(self, spare: grpc.aio.Channel, deadline: StartDeadline) -> SpareState:
        """How far the spare is. Progress with loading extends the deadline."""

    async def take_over(self, spare: grpc.aio.Channel, timeout_s: float) -> None:
        """Tells the spare that its address leads to it now, if it must know."""


def standby_calls(role: str, rank: int) -> StandbyCalls:
    """Those of a worker."""
    if role != DENSE_ROLE:
        return AttentionCalls()
    return ShardCalls() if rank else DenseCalls()


class DenseCalls:
    """Of the dense worker, which attaches to the others by itself."""

    async def serves(self, channel: grpc.aio.Channel) -> bool:
        """Whether it has attached."""
        return (await self._status(channel)).state == dense_pb2.DenseStatus.SERVING

    async def state(self, spare: grpc.aio.Channel, deadline: StartDeadline) -> SpareState:
        """Ready in the state STANDBY, with weights or without."""
        status = await self._status(spare)
        deadline.note(status)
        is_ready = status.state == dense_pb2.DenseStatus.STANDBY
        return SpareState(is_ready, bool(status.weights_hash), status.device_bytes)

    async def take_over(self, spare: grpc.aio.Channel, timeout_s: float) -> None:
        """Lets it attach."""
        request = dense_pb2.TakeOverRequest(returns_at_once=True)
        await dense_pb2_grpc.DenseWorkerStub(spare).TakeOver(request, timeout=timeout_s)

    async def _status(self, channel: grpc.aio.Channel) -> dense_pb2.DenseStatus:
        stub = dense_pb2_grpc.DenseWorkerStub(channel)
        return await stub.GetStatus(dense_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)


class AttentionCalls:
    """Of an attention worker, which serves whoever attaches."""

    async def serves(self, channel: grpc.aio.Channel) -> bool:
        """True: it answers with an error before a dense worker has attached."""
        stub = attn_pb2_grpc.AttentionWorkerStub(channel)
        await stub.GetStatus(attn_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        return True

    async def state(self, spare: grpc.aio.Channel, deadline: StartDeadline) -> SpareState:
        """Ready when it can be attached to."""
        return SpareState(await _is_serving(spare))

    async def take_over(self, spare: grpc.aio.Channel, timeout_s: float) -> None:
        """Nothing."""


class ShardCalls:
    """Of a dense shard, which serves the first rank when that joins it."""

    async def serves(self, channel: grpc.aio.Channel) -> bool:
        """Whether the first rank runs steps with it."""
        return (await self._status(channel)).is_attached

    async def state(self, spare: grpc.aio.Channel, deadline: StartDeadline) -> SpareState:
        """Ready when it has its weights."""
        is_ready, status = await _is_serving(spare), await self._status(spare)
        deadline.note_progress(status.loading)
        return SpareState(is_ready, is_ready, status.device_bytes)

    async def take_over(self, spare: grpc.aio.Channel, timeout_s: float) -> None:
        """Nothing."""

    async def _status(self, channel: grpc.aio.Channel) -> shard_pb2.ShardStatus:
        stub = shard_pb2_grpc.DenseShardStub(channel)
        return await stub.GetStatus(shard_pb2.GetShardStatusRequest(), timeout=CALL_TIMEOUT_S)


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    check = health_pb2_grpc.HealthStub(channel).Check
    reply = await check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
