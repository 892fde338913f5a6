"""`ResumePeers`: reads answers from the other gateway processes of this server (`protos/gateway_peers.proto`)."""

from __future__ import annotations

import asyncio

import grpc

from services.common.config import MAX_MESSAGE_BYTES
from services.common.errors import PeerError
from services.gateway.resume.recording import Beginning, Name, Received
from services.gateway.resume.registry import encode_name
from services.pb import gateway_peers_pb2, gateway_peers_pb2_grpc
from services.rpc.client import open_channel
from services.rpc.error_details import error_of

TIMEOUT_S = 2.0  # after which a peer that has not begun to answer is taken for hung


class ResumePeers:
    """Used in the event loop. Keeps a connection to each peer that it has read from."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Closes all connections."""
        for channel in self._channels.values():
            await channel.close()

    async def open(
        self, address: str, name: Name, fingerprint: bytes | None, received: Received | None
    ) -> RemoteReader | None:
        """Reads the answer of a request that a peer runs. None: it does not know it, is gone, or does not answer.

        Raises what `Resumption.read_here` raises there.
        """
        request = gateway_peers_pb2.ReadResumableRequest(name=encode_name(name), fingerprint=fingerprint)
        if received is not None:
            request.num_received = received.num_items
            if received.digest is not None:
                request.digest = received.digest
        if address not in self._channels:
            self._channels[address] = open_channel(address, MAX_MESSAGE_BYTES)
        call = gateway_peers_pb2_grpc.GatewayPeersStub(self._channels[address]).ReadResumable(request)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await call.wait_for_connection()  # in fact for the metadata of the answer
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
                return None
            raise error_of(error) or PeerError(f"another gateway process has failed ({error.details()})") from error
        except TimeoutError:
            call.cancel()
            return None
        return RemoteReader(call)


class RemoteReader:
    """An `AnswerReader` of a request that a peer runs."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self._call = call

    async def begin(self) -> Beginning:
        """See `AnswerReader`."""
        piece = await self._read()
        assert piece is not None, "the beginning is always sent"
        return Beginning(piece.head, piece.is_stream, piece.is_at_end)

    async def next(self) -> bytes | None:
        """See `AnswerReader`."""
        piece = await self._read()
        return None if piece is None else piece.item

    def close(self) -> None:
        """See `AnswerReader`."""
        self._call.cancel()

    async def _read(self) -> gateway_peers_pb2.ResumablePiece | None:
        try:
            piece = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_of(error) or PeerError(
                f"the gateway process that ran this request is gone ({error.details()}): resume it again"
            ) from error
        return None if piece is grpc.aio.EOF else piece
