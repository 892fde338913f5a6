"""What a gateway does for its peers: see `protos/gateway_peers.proto` and `services.gateway.link.gateway_peers`."""

from __future__ import annotations

import grpc

from services.gateway.apis.triton.inference import Triton
from services.gateway.core.request_service import RequestService
from services.gateway.link.gateway_peers import decode_owner
from services.pb import gateway_peers_pb2, gateway_peers_pb2_grpc

PEERS_SERVICE_NAME = gateway_peers_pb2.DESCRIPTOR.services_by_name["GatewayPeers"].full_name


class PeerServicer(gateway_peers_pb2_grpc.GatewayPeersServicer):
    """Believes its callers: they are processes of the same user. Errors become statuses in `services.rpc.server`."""

    def __init__(self, service: RequestService, triton: Triton) -> None:
        self._service = service
        self._triton = triton

    async def AbortHere(
        self, request: gateway_peers_pb2.AbortHereRequest, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.AbortHereResponse:
        was_running = self._service.abort(request.request_id, decode_owner(request.owner))
        return gateway_peers_pb2.AbortHereResponse(was_running=was_running)

    async def StopHere(
        self, request: gateway_peers_pb2.StopHereRequest, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.StopHereResponse:
        self._triton.stop(request.id, decode_owner(request.owner))
        return gateway_peers_pb2.StopHereResponse()

    async def StageAdapter(
        self, request: gateway_peers_pb2.PeerAdapter, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.StageAdapterResponse:
        await self._service.adapters.stage(request)
        return gateway_peers_pb2.StageAdapterResponse()

    async def UnstageAdapter(
        self, request: gateway_peers_pb2.UnstageAdapterRequest, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.UnstageAdapterResponse:
        self._service.adapters.unstage()
        return gateway_peers_pb2.UnstageAdapterResponse()

    async def ServeAdapter(
        self, request: gateway_peers_pb2.PeerAdapter, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.ServeAdapterResponse:
        await self._service.adapters.serve(request)
        return gateway_peers_pb2.ServeAdapterResponse()

    async def ForgetAdapter(
        self, request: gateway_peers_pb2.ForgetAdapterRequest, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.ForgetAdapterResponse:
        self._service.adapters.forget(request.owner, request.name)
        return gateway_peers_pb2.ForgetAdapterResponse()
