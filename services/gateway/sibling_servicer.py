"""What a gateway does for its siblings: see `protos/siblings.proto` and `services.gateway.link.siblings`."""

from __future__ import annotations

import grpc

from services.gateway.apis.triton.inference import Triton
from services.gateway.core.request_service import RequestService
from services.gateway.link.siblings import decode_owner
from services.pb import siblings_pb2, siblings_pb2_grpc

SIBLINGS_SERVICE_NAME = siblings_pb2.DESCRIPTOR.services_by_name["Siblings"].full_name


class SiblingServicer(siblings_pb2_grpc.SiblingsServicer):
    """Believes its callers: they are processes of the same user. Errors become statuses in `services.rpc.server`."""

    def __init__(self, service: RequestService, triton: Triton) -> None:
        self._service = service
        self._triton = triton

    async def AbortHere(
        self, request: siblings_pb2.AbortHereRequest, context: grpc.aio.ServicerContext
    ) -> siblings_pb2.AbortHereResponse:
        was_running = self._service.abort(request.request_id, decode_owner(request.owner))
        return siblings_pb2.AbortHereResponse(was_running=was_running)

    async def StopHere(
        self, request: siblings_pb2.StopHereRequest, context: grpc.aio.ServicerContext
    ) -> siblings_pb2.StopHereResponse:
        self._triton.stop(request.id, decode_owner(request.owner))
        return siblings_pb2.StopHereResponse()

    async def StageAdapter(
        self, request: siblings_pb2.SiblingAdapter, context: grpc.aio.ServicerContext
    ) -> siblings_pb2.StageAdapterResponse:
        await self._service.adapters.stage(request)
        return siblings_pb2.StageAdapterResponse()

    async def UnstageAdapter(
        self, request: siblings_pb2.UnstageAdapterRequest, context: grpc.aio.ServicerContext
    ) -> siblings_pb2.UnstageAdapterResponse:
        self._service.adapters.unstage()
        return siblings_pb2.UnstageAdapterResponse()

    async def ServeAdapter(
        self, request: siblings_pb2.SiblingAdapter, context: grpc.aio.ServicerContext
    ) -> siblings_pb2.ServeAdapterResponse:
        await self._service.adapters.serve(request)
        return siblings_pb2.ServeAdapterResponse()

    async def ForgetAdapter(
        self, request: siblings_pb2.ForgetAdapterRequest, context: grpc.aio.ServicerContext
    ) -> siblings_pb2.ForgetAdapterResponse:
        self._service.adapters.forget(request.owner, request.name)
        return siblings_pb2.ForgetAdapterResponse()
