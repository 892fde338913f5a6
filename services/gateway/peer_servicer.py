"""What a gateway does for its peers: see `protos/gateway_peers.proto` and `services.gateway.link.gateway_peers`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from services.common.errors import InvalidRequest
from services.gateway.apis.triton.inference import Triton
from services.gateway.core.request_service import RequestService
from services.gateway.link.gateway_peers import decode_owner
from services.gateway.metrics.all_processes import AllProcesses
from services.gateway.resume.recording import Received
from services.gateway.resume.registry import decode_name
from services.gateway.resume.resumption import Resumption
from services.pb import gateway_peers_pb2, gateway_peers_pb2_grpc

PEERS_SERVICE_NAME = gateway_peers_pb2.DESCRIPTOR.services_by_name["GatewayPeers"].full_name


class PeerServicer(gateway_peers_pb2_grpc.GatewayPeersServicer):
    """Believes its callers: they are processes of the same user. Errors become statuses in `services.rpc.server`."""

    def __init__(
        self, service: RequestService, triton: Triton, measured: AllProcesses, resumption: Resumption | None
    ) -> None:
        """`resumption`: None if requests cannot be resumed."""
        self._service = service
        self._measured = measured
        self._triton = triton
        self._resumption = resumption

    async def AbortHere(
        self, request: gateway_peers_pb2.AbortHereRequest, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.AbortHereResponse:
        request_id = None if request.all else request.request_id
        owner = decode_owner(request.owner)
        was_running = self._service.abort(request_id, owner, with_batch=request.with_batch)
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

    async def Measure(
        self, request: gateway_peers_pb2.MeasureRequest, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.MeasureResponse:
        return await self._measured.own(has_metrics=request.has_metrics)

    async def ReadResumable(
        self, request: gateway_peers_pb2.ReadResumableRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_peers_pb2.ResumablePiece]:
        received = Received(request.num_received, request.digest if request.HasField("digest") else None)
        fingerprint = request.fingerprint if request.HasField("fingerprint") else None
        if self._resumption is None:
            raise InvalidRequest("requests cannot be resumed here: gateway.resume is off")
        reader = await self._resumption.read_here(decode_name(request.name), fingerprint, received)
        context.add_done_callback(lambda _: reader.close())
        await context.send_initial_metadata(())  # says that this process is awake; the answer may take its time
        beginning = await reader.begin()
        yield gateway_peers_pb2.ResumablePiece(
            head=beginning.head, is_stream=beginning.is_stream, is_at_end=beginning.is_at_end
        )
        while (item := await reader.next()) is not None:
            yield gateway_peers_pb2.ResumablePiece(item=item)
