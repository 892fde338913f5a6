"""`DenseStream`: one call of `Connect`. Its messages go by a socket if the worker is on this machine, else by gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc
import structlog

from services.common.errors import PeerError
from services.gateway.link.served_model import peer_error, wait_info
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.message_stream import MessageStream, StreamOffer, is_taken

log = structlog.get_logger()

END_S = 1.0  # that the call may end later than the socket, or the other way round


class DenseStream:
    """Opened by `opening`, then `begin` comes before all else. `write` and `outputs` are for one task each."""

    def __init__(self, call: grpc.aio.StreamStreamCall, offer: StreamOffer | None, max_message_bytes: int) -> None:
        self._call = call
        self._offer = offer
        self._max_message_bytes = max_message_bytes
        self._messages: MessageStream | None = None  # None: they go by the call

    @classmethod
    @contextlib.contextmanager
    def opening(
        cls, stub: dense_pb2_grpc.DenseWorkerStub, max_message_bytes: int, *, offers_socket: bool
    ) -> Iterator[DenseStream]:
        """A context with a new stream, which ends with it."""
        try:
            offer = StreamOffer() if offers_socket else None
        except OSError as error:
            log.warning("messages to the dense worker go by gRPC, which takes longer", reason=str(error))
            offer = None
        call = stub.Connect(metadata=() if offer is None else offer.metadata)
        stream = cls(call, offer, max_message_bytes)
        try:
            yield stream
        finally:
            call.cancel()  # a shared channel stays open
            stream._close()

    async def begin(self, timeout_s: float) -> dense_pb2.DenseInfo:
        """Waits until a worker has taken the call; returns its description. Raises `PeerError`.

        It is `OfferLost` if the worker took the socket, but does not use it.
        """
        try:
            info = await wait_info(self._call, timeout_s)
            if self._offer is not None and is_taken(await self._call.initial_metadata()):
                self._messages = self._offer.accept(self._max_message_bytes)
            return info
        finally:
            if self._offer is not None:
                self._offer.close()

    async def write(self, message: dense_pb2.GatewayMessage) -> None:
        """Sends a message. Raises `PeerError`."""
        try:
            if self._messages is None:
                await self._call.write(message)
            else:
                await self._messages.write(message.SerializeToString())
        except grpc.aio.AioRpcError as error:
            raise peer_error(error) from error
        except asyncio.InvalidStateError as error:
            raise PeerError("the dense worker ended the stream") from error
        except PeerError:
            await asyncio.sleep(END_S)  # what it has sent before tells more
            raise

    async def outputs(self) -> AsyncIterator[dense_pb2.StepOutput]:
        """All messages of the worker. Raises `PeerError` at their end, with the reason."""
        if self._messages is not None:
            loop = asyncio.get_running_loop()
            messages = self._messages
            # Otherwise a worker that is stopped, and whose call has ended, would keep the stream open.
            self._call.add_done_callback(lambda _: loop.call_later(END_S, messages.end))
            while (message := await messages.read()) is not None:
                yield dense_pb2.StepOutput.FromString(message)
        try:
            async with asyncio.timeout(None if self._messages is None else END_S):
                async for output in self._call:
                    yield output
        except grpc.aio.AioRpcError as error:
            raise peer_error(error) from error
        except TimeoutError:
            raise PeerError("the dense worker closed the socket of the stream") from None
        raise PeerError("the dense worker ended the stream")

    def _close(self) -> None:
        if self._offer is not None:
            self._offer.close()
        if self._messages is not None:
            self._messages.close()
