"""Sequences' openings: forgotten once they end, noticed at once when they fail, as are devices that cannot meet."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from services.common.channel import ChannelSpec
from services.common.config import PeerSection
from services.common.errors import ConfigError
from services.dense_worker.attention_client import AttachmentEnd, AttachOptions, AttentionClient
from services.pb import attn_pb2
from tests.unit.dense_worker.test_scheduler import make_sequence

TEST_LIMIT_S = 30.0
NUM_SEQUENCES = 50
ATTACHMENT: Any = SimpleNamespace(epoch=1, attachment_id=1)


class SilentCall:
    """A stream of plans on which nothing ever comes."""

    def __aiter__(self) -> SilentCall:
        return self

    async def __anext__(self) -> attn_pb2.StepResult:
        return await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        pass


class Attention:
    """The attention worker's stub: opens what it is asked to, or fails with `error`."""

    def __init__(self, error: grpc.aio.AioRpcError | None = None) -> None:
        self.error = error

    def Execute(self, metadata: object) -> SilentCall:
        return SilentCall()

    async def Attach(self, request: attn_pb2.AttachRequest, timeout: float) -> attn_pb2.AttachReply:
        return attn_pb2.AttachReply(lanes=[attn_pb2.LaneHandle(kind="cuda_ipc", handle=b"handle")])

    async def OpenSequence(self, request: attn_pb2.OpenSequenceRequest, timeout: float) -> attn_pb2.OpenSequenceReply:
        if self.error is not None:
            raise self.error
        return attn_pb2.OpenSequenceReply()


class Listener:
    def __init__(self) -> None:
        self.num_opened = 0

    def on_opened(self, *_: object) -> None:
        self.num_opened += 1


def make_client(attention: Attention) -> AttentionClient:
    spec = ChannelSpec(max_tokens=1, qkv_size=1, attn_size=1, dtype=torch.float32)
    options = AttachOptions("", "", 1, spec, torch.device("cpu"), 1.0)
    client = AttentionClient("127.0.0.1:9", options, PeerSection(), asyncio.Event())
    client._stub = attention
    return client


def test_an_opening_that_has_ended_is_forgotten() -> None:
    async def test() -> None:
        listener: Any = Listener()
        client = make_client(Attention())
        serving = asyncio.create_task(client._serve(ATTACHMENT, listener))
        for seq_id in range(NUM_SEQUENCES):
            client.open(ATTACHMENT, make_sequence(seq_id, 4, 4))
        while listener.num_opened < NUM_SEQUENCES:  # noqa: ASYNC110  the limit of the test bounds it
            await asyncio.sleep(0.001)
        for _ in range(3):  # until the last one is collected
            await asyncio.sleep(0)
        gc.collect()
        tasks = [each for each in gc.get_objects() if type(each) is asyncio.Task]
        assert sum(task.get_coro().__qualname__ == "AttentionClient._open" for task in tasks) <= 1, "the last one"
        client.drop(ATTACHMENT, AttachmentEnd("enough", is_crash=False))
        assert (await serving).reason == "enough"

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


def test_an_opening_that_fails_ends_the_attachment_at_once() -> None:
    async def test() -> None:
        status = grpc.StatusCode.DEADLINE_EXCEEDED
        error = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), "no answer")
        listener: Any = Listener()
        client = make_client(Attention(error))
        client.open(ATTACHMENT, make_sequence(1, 4, 4))
        end = await client._serve(ATTACHMENT, listener)
        assert end == AttachmentEnd("opening a sequence: DEADLINE_EXCEEDED: no answer", is_crash=True)

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


def test_a_channel_for_another_kind_of_device_is_an_error_at_once() -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="offers a cuda_ipc channel, the dense worker on cpu needs shm"):
            await make_client(Attention())._attach()

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))
