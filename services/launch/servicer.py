"""The gRPC servicers of the launcher, for `ctl` and gateways, at a socket in its directory. Run on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc

from services.common.config import Config
from services.common.errors import InvalidRequest
from services.launch.addresses import control_address
from services.launch.attention_workers import AttentionWorkers
from services.launch.children import Children
from services.launch.replace import DenseReplacer
from services.launch.resumables import SERVICE_NAME as RESUMABLES_SERVICE_NAME
from services.launch.resumables import Resumables, ResumablesServicer
from services.launch.service_configs import num_gateways
from services.launch.standby import Standby
from services.pb import launch_pb2, launch_pb2_grpc, resumables_pb2_grpc
from services.rpc.server import GrpcServer

MAX_MESSAGE_BYTES = 1 << 20
SERVICE_NAME = launch_pb2.DESCRIPTOR.services_by_name["Launcher"].full_name


def make_control(
    run_dir: Path,
    children: Children,
    replacer: DenseReplacer | None,
    standbys: Sequence[Standby],
    config: Config,
    attention_workers: AttentionWorkers | None,
) -> GrpcServer:
    """Creates the server, without starting it."""
    gateway, names = config.gateway, [SERVICE_NAME]
    max_message_bytes = MAX_MESSAGE_BYTES
    if gateway.resume:
        names.append(RESUMABLES_SERVICE_NAME)
        max_message_bytes += gateway.max_message_bytes  # a record has the message of a client
    server = GrpcServer(control_address(run_dir), names, max_message_bytes)
    servicer = LauncherServicer(children, replacer, standbys, attention_workers)
    launch_pb2_grpc.add_LauncherServicer_to_server(servicer, server.server)
    if gateway.resume:
        max_number = gateway.max_resumable * num_gateways(config)  # those of dead processes beside as many that run
        resumables = Resumables(max_number, gateway.max_held_bytes, gateway.resume_timeout_s)
        resumables_pb2_grpc.add_ResumablesServicer_to_server(ResumablesServicer(resumables), server.server)
    return server


class LauncherServicer(launch_pb2_grpc.LauncherServicer):
    """Answers `ctl`. Raises errors as `TwostrokeError`, which become statuses in `services.rpc.server`."""

    def __init__(
        self,
        children: Children,
        replacer: DenseReplacer | None,
        standbys: Sequence[Standby],
        attention_workers: AttentionWorkers | None = None,
    ) -> None:
        """`replacer`: none if another launcher has the dense worker. `attention_workers`: none if there is only one."""
        self._attention_workers = attention_workers
        self._children = children
        self._replacer = replacer
        self._standbys = standbys

    async def ReplaceDense(
        self, request: launch_pb2.ReplaceDenseRequest, context: grpc.aio.ServicerContext
    ) -> launch_pb2.ReplaceDenseReply:
        """Replaces the dense worker. Cancelling the call undoes the replacement."""
        if self._replacer is None:
            raise InvalidRequest("this launcher has no dense worker (launch.services): call the one that has")
        replaced = await self._replacer.replace(
            list(request.overrides),
            drops_caches=request.drop_caches,
            keeps_caches=request.keep_caches,
            open_requests=request.open_requests,
            wait_timeout_s=request.wait_timeout_ms / 1000,
        )
        return launch_pb2.ReplaceDenseReply(
            pid=replaced.pid,
            pause_ms=replaced.pause_ms,
            backend=replaced.backend,
            has_other_weights=replaced.has_other_weights,
        )

    async def AddAttention(
        self, request: launch_pb2.AddAttentionRequest, context: grpc.aio.ServicerContext
    ) -> launch_pb2.AddAttentionReply:
        child = await self._require_attention_workers().add()
        return launch_pb2.AddAttentionReply(name=child.name, pid=child.pid or 0)

    async def DrainAttention(
        self, request: launch_pb2.DrainAttentionRequest, context: grpc.aio.ServicerContext
    ) -> launch_pb2.DrainAttentionReply:
        await self._require_attention_workers().drain(request.name, request.timeout_ms / 1000)
        return launch_pb2.DrainAttentionReply()

    def _require_attention_workers(self) -> AttentionWorkers:
        if self._attention_workers is None:
            raise InvalidRequest(
                "this launcher has no set of attention workers: start all services with it, and attention.elastic=true"
            )
        return self._attention_workers

    async def GetStatus(
        self, request: launch_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> launch_pb2.LauncherStatus:
        return launch_pb2.LauncherStatus(
            services=[
                launch_pb2.ServiceStatus(
                    role=child.role,
                    pid=child.pid or 0,
                    num_restarts=child.num_restarts,
                    last_end=child.last_end,
                    name=child.service_name,
                )
                for child in self._children
            ],
            standbys=[standby.status() for standby in self._standbys],
        )
