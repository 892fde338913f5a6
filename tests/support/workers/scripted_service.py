"""A process in the place of a service that the launcher starts: it says that it serves, or is ready, and does nothing.

    python -m tests.support.workers.scripted_service --config FILE --child OPTIONS

It listens at the address of its role, which the name of its config file begins with.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.child_options import ChildOptions
from services.common.config import Config, load_config
from services.common.process import end_at_signals
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc

State = dense_pb2.DenseStatus


class ScriptedService(health_pb2_grpc.HealthServicer, dense_pb2_grpc.DenseWorkerServicer):
    """Every role at once."""

    def __init__(self, options: ChildOptions) -> None:
        self._state = State.SERVING if options.standby is None else State.STANDBY

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def GetStatus(
        self, request: dense_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseStatus:
        return dense_pb2.DenseStatus(state=self._state)

    async def TakeOver(
        self, request: dense_pb2.TakeOverRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.TakeOverReply:
        self._state = State.SERVING
        return dense_pb2.TakeOverReply()


class ScriptedAttention(attn_pb2_grpc.AttentionWorkerServicer):
    """An attention worker to which a dense worker has attached."""

    async def GetStatus(
        self, request: attn_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> attn_pb2.AttentionStatus:
        return attn_pb2.AttentionStatus()


def address_of(name: str, config: Config) -> str:
    if name.startswith("gateway"):
        assert config.gateway.local_address is not None
        return config.gateway.local_address
    return config.dense.address if name.startswith("dense_worker") else config.attention.address


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--child", type=ChildOptions.model_validate_json)
    arguments = parser.parse_args()
    service = ScriptedService(arguments.child)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    dense_pb2_grpc.add_DenseWorkerServicer_to_server(service, server)
    attn_pb2_grpc.add_AttentionWorkerServicer_to_server(ScriptedAttention(), server)
    server.add_insecure_port(address_of(arguments.config.stem, load_config(arguments.config)))
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    end_at_signals()
    asyncio.run(main())
