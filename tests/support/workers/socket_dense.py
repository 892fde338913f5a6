"""`FakeDense` in a process of its own, whose messages go by the socket that the gateway offers, as a true worker's do.

`python -m tests.support.workers.socket_dense ADDRESS` prints a line when it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.dense_info import Metadata
from services.pb import dense_pb2
from services.rpc.message_stream import TAKEN, MessageStream, take_offer
from services.rpc.server import EventLoop
from tests.support.workers.fake_dense import FakeDense

MAX_BYTES = 2**26


class SocketDense(FakeDense):
    """Declines to talk by gRPC."""

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        messages = take_offer(context.invocation_metadata(), MAX_BYTES)
        assert messages is not None, "there is no offer"
        with contextlib.closing(messages):
            call: Any = _Taken(context)
            async for output in super().Connect(_read_all(messages), call):
                await messages.write(output.SerializeToString())
        return
        yield dense_pb2.StepOutput()


class _Taken:
    """What `FakeDense` uses of a call."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        await self._context.send_initial_metadata((*initial_metadata, *TAKEN))


async def _read_all(messages: MessageStream) -> AsyncIterator[dense_pb2.GatewayMessage]:
    while (message := await messages.read()) is not None:
        yield dense_pb2.GatewayMessage.FromString(message)


async def main(address: str) -> None:
    """Serves until it is killed. The tokens of a sequence are 10, 11, 12, ...."""
    dense = SocketDense(lambda submit: range(10, 10_000), step_s=0.001)
    await dense.start(address)
    print("serving", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(main(sys.argv[1]))
