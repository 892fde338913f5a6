"""The client of the attention worker: attaching, opening sequences by the stream of plans, and the end of both."""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from services.attn_worker.attach_request import read_sinks
from services.channel import ChannelSpec, message_link
from services.channel.message_link import LinkOffer, MessageLink
from services.channel.region import shared_memory_id
from services.channel.shm import ShmChannel
from services.common.attention.learned import Learned
from services.common.config import PeerSection
from services.common.errors import ConfigError, PeerError, StaleEpoch
from services.common.model_config import AttentionOptions
from services.dense_worker.engine import attention_client
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.engine.attention_client import AttachOptions, AttentionClient
from services.pb import attn_pb2, step_pb2
from services.rpc.start_deadline import StartDeadline
from services.step import SequenceOpened, StepPlan
from tests.support.dense.scheduler_cluster import make_sequence

TEST_LIMIT_S = 30.0
NUM_SEQUENCES = 50
ATTACHMENT: Any = SimpleNamespace(epoch=1, attachment_id=1, link=None)
SPEC = ChannelSpec(max_tokens=1, qkv_size=1, attn_size=1, dtype=torch.float32)


class Call:
    """A stream of plans to an attention worker that opens every sequence, or refuses all with `refusal`."""

    def __init__(self, refusal: str | None) -> None:
        self._refusal = refusal
        self._answers: asyncio.Queue[attn_pb2.PlanAnswer] = asyncio.Queue()

    async def write(self, plan: step_pb2.StepPlan) -> None:
        assert not plan.step_id
        for new in plan.new_sequences:
            opened = attn_pb2.SequenceOpened(seq_id=new.seq_id, num_held_blocks=1, error=self._refusal)
            self._answers.put_nowait(attn_pb2.PlanAnswer(opened=opened))

    async def read(self) -> attn_pb2.PlanAnswer:
        return await self._answers.get()

    def cancel(self) -> None:
        pass


class Attention:
    """The attention worker's stub."""

    def __init__(self, refusal: str | None = None) -> None:
        self.call = Call(refusal)

    def Execute(self, metadata: object) -> Call:
        return self.call

    async def Attach(self, request: attn_pb2.AttachRequest, timeout: float) -> attn_pb2.AttachReply:
        return attn_pb2.AttachReply(lanes=[attn_pb2.LaneHandle(kind="cuda_ipc_queued", handle=b"handle")])


class Listener:
    def __init__(self) -> None:
        self.opened: list[int] = []
        self.refused: dict[int, str] = {}

    def on_answer(self, attachment: object, answer: SequenceOpened) -> None:
        assert answer.num_held_blocks == 1
        if answer.error is None:
            self.opened.append(answer.seq_id)
        else:
            self.refused[answer.seq_id] = answer.error


class Watcher:
    def __init__(self) -> None:
        self.is_ready = asyncio.Event()

    async def ready(self, attachment: object) -> None:
        self.is_ready.set()


def make_client(attention: Attention) -> AttentionClient:
    options = AttachOptions("", "", 1, SPEC, torch.device("cpu"), 1.0)
    client = AttentionClient("127.0.0.1:9", options, PeerSection(), asyncio.Event())
    client._stub = attention
    return client


async def serve(client: AttentionClient, attachment: Attachment, listener: Any, watcher: Any) -> AttachmentEnd:
    client._listener, client._watcher = listener, watcher
    return await client._serve(attachment)


def open_all(refusal: str | None) -> Listener:
    """Opens NUM_SEQUENCES sequences; returns the listener with their answers."""

    async def run() -> Listener:
        listener: Any = Listener()
        client = make_client(Attention(refusal))
        serving = asyncio.create_task(serve(client, ATTACHMENT, listener, Watcher()))
        for seq_id in range(NUM_SEQUENCES):
            client.publish(ATTACHMENT, StepPlan(0, new_sequences=(make_sequence(seq_id, 4, 4).describe(),)))
        while len(listener.opened) + len(listener.refused) < NUM_SEQUENCES:  # noqa: ASYNC110  the test's limit bounds it
            await asyncio.sleep(0.001)
        client.drop(ATTACHMENT, AttachmentEnd("enough", is_crash=False))
        assert (await serving).reason == "enough"
        return listener

    return asyncio.run(asyncio.wait_for(run(), TEST_LIMIT_S))


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MessageLink, MessageLink]]:
    """The two ends of a link, the attention worker's first."""
    monkeypatch.setattr(message_link, "SHM_DIR", tmp_path)  # where no server cleans up
    offer = LinkOffer(secrets.randbits(64), 1)
    own = MessageLink.connect(offer.name, 1 << 20)
    peer = offer.accept(1 << 20)
    yield peer, own
    peer.close()
    own.close()


def test_plans_and_answers_go_by_the_link_if_there_is_one(ends: tuple[MessageLink, MessageLink]) -> None:
    peer, own = ends

    def answer(message: bytes) -> None:
        for new in step_pb2.StepPlan.FromString(message).new_sequences:
            opened = attn_pb2.SequenceOpened(seq_id=new.seq_id, num_held_blocks=1)
            peer.send(attn_pb2.PlanAnswer(opened=opened).SerializeToString())

    async def run() -> None:
        listener: Any = Listener()
        unexpected = list[PeerError]()
        attachment: Any = SimpleNamespace(epoch=1, attachment_id=1, link=own)
        peer.receive(answer, unexpected.append)
        client = make_client(Attention("nothing goes by the stream"))
        serving = asyncio.create_task(serve(client, attachment, listener, Watcher()))
        for seq_id in range(NUM_SEQUENCES):
            client.publish(attachment, StepPlan(0, new_sequences=(make_sequence(seq_id, 4, 4).describe(),)))
        while len(listener.opened) < NUM_SEQUENCES:  # noqa: ASYNC110  the test's limit bounds it
            await asyncio.sleep(0.001)
        assert listener.opened == list(range(NUM_SEQUENCES)) and not listener.refused and not unexpected
        client.drop(attachment, AttachmentEnd("enough", is_crash=False))
        assert (await serving).reason == "enough"

    asyncio.run(asyncio.wait_for(run(), TEST_LIMIT_S))


def test_an_answer_that_is_too_large_ends_the_attachment(ends: tuple[MessageLink, MessageLink]) -> None:
    async def run() -> None:
        peer, own = ends
        attachment: Any = SimpleNamespace(epoch=1, attachment_id=1, link=own)
        client = make_client(Attention("nothing comes by the stream"))
        serving = asyncio.create_task(serve(client, attachment, Listener(), Watcher()))
        peer._socket.sendall(struct.pack("!Id", (1 << 20) + 1, 0.0))  # its length comes first
        end = await serving
        assert end.is_crash and str(1 << 20) in end.reason

    asyncio.run(asyncio.wait_for(run(), TEST_LIMIT_S))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_closed_link_ends_the_attachment_for_the_reason_that_the_stream_gives(
    ends: tuple[MessageLink, MessageLink], is_replaced: bool
) -> None:
    class EndingCall(Call):
        async def read(self) -> attn_pb2.PlanAnswer:
            await asyncio.sleep(0.05 if is_replaced else TEST_LIMIT_S)
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, metadata, metadata, "replaced")

    async def run() -> None:
        peer, own = ends
        attachment: Any = SimpleNamespace(epoch=1, attachment_id=1, link=own)
        attention = Attention()
        attention.call = EndingCall(None)
        client = make_client(attention)
        serving = asyncio.create_task(serve(client, attachment, Listener(), Watcher()))
        peer.close()
        for _ in range(2):  # the first one may still get into the socket
            client.publish(attachment, StepPlan(0))
        end = await serving
        assert (end.is_replaced, end.is_crash) == (is_replaced, not is_replaced), end

    asyncio.run(asyncio.wait_for(run(), TEST_LIMIT_S))


def test_sequences_are_opened_in_order_by_the_stream_of_plans() -> None:
    listener = open_all(refusal=None)
    assert listener.opened == list(range(NUM_SEQUENCES)) and not listener.refused


def test_a_refused_sequence_fails_alone() -> None:
    listener = open_all(refusal="no room")
    assert listener.refused == dict.fromkeys(range(NUM_SEQUENCES), "no room") and not listener.opened


def test_every_attachment_hands_over_the_sinks() -> None:
    sinks = ((0.5, -1.0), (2.0, 3.25), (0.0, 7.0))
    requests: list[attn_pb2.AttachRequest] = []

    class Recorder(Attention):
        async def Attach(self, request: attn_pb2.AttachRequest, timeout: float) -> attn_pb2.AttachReply:
            requests.append(request)
            return attn_pb2.AttachReply()

    async def test() -> None:
        client = make_client(Recorder())
        client._options = replace(client._options, learned=Learned(sinks=sinks))
        for _ in range(2):
            await client._attach()

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))
    config: Any = SimpleNamespace(num_layers=3, num_heads=2, attention=AttentionOptions(has_sinks=True))
    assert [read_sinks(request, config) for request in requests] == [sinks, sinks]


def test_only_the_current_attachment_makes_the_worker_ready() -> None:
    async def test() -> None:
        client, watcher = make_client(Attention()), Watcher()
        serving = asyncio.create_task(serve(client, ATTACHMENT, Listener(), watcher))
        client.ready(SimpleNamespace(epoch=1, attachment_id=0))
        await asyncio.sleep(0.01)
        assert not watcher.is_ready.is_set()
        client.ready(ATTACHMENT)
        await watcher.is_ready.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


def test_a_replaced_worker_notices_it_even_after_an_aborted_handoff() -> None:
    """Otherwise it would attach again at once and replace its successor."""

    class ReplacedCall(Call):
        async def read(self) -> attn_pb2.PlanAnswer:
            client.drop(ATTACHMENT, AttachmentEnd("the handoff was aborted", is_crash=True))
            await asyncio.sleep(0.05)
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, metadata, metadata, "replaced")

    async def test() -> None:
        nonlocal client
        attention = Attention()
        attention.call = ReplacedCall(None)
        client = make_client(attention)
        end = await serve(client, ATTACHMENT, Listener(), Watcher())
        assert end.is_replaced and not end.is_crash

    client: Any = None
    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


def test_a_client_can_be_stopped_while_its_attachment_ends() -> None:
    """This happens because a cluster stops both workers at the same time."""

    async def test() -> None:
        client = make_client(Attention())
        serving = asyncio.create_task(serve(client, ATTACHMENT, Listener(), Watcher()))
        await asyncio.sleep(0)  # until the client waits
        client.drop(ATTACHMENT, AttachmentEnd("the attention worker was asked to stop", is_crash=False))
        while client._inbox.empty():  # noqa: ASYNC110  the test's limit bounds it
            await asyncio.sleep(0)
        while not client._inbox.empty():  # noqa: ASYNC110
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_an_interrupted_attach_is_tried_again(code: str) -> None:
    class StoppingAttention(Attention):
        num_tries = 0

        async def Attach(self, request: attn_pb2.AttachRequest, timeout: float) -> attn_pb2.AttachReply:
            self.num_tries += 1
            if self.num_tries < 3:
                raise grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata())
            return await super().Attach(request, timeout)

    async def test() -> None:
        attention = StoppingAttention()
        with pytest.raises(ConfigError, match="cuda_ipc_queued"):  # the third answer offers a wrong channel
            await make_client(attention)._attach()
        assert attention.num_tries == 3

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


def test_a_channel_for_another_kind_of_device_is_an_error_at_once() -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="offers a cuda_ipc_queued channel, the dense worker on cpu needs shm"):
            await make_client(Attention())._attach()

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


@pytest.mark.parametrize("is_same", [False, True])
def test_another_shared_memory_is_named_and_not_tried_again(is_same: bool) -> None:
    class Elsewhere(Attention):
        async def Attach(self, request: attn_pb2.AttachRequest, timeout: float) -> attn_pb2.AttachReply:
            lanes = [attn_pb2.LaneHandle(kind="shm", handle=b"twostroke-none")]
            return attn_pb2.AttachReply(lanes=lanes, shared_memory=shared_memory_id() if is_same else "boot:23:1")

    async def test() -> None:
        cause, message = (StaleEpoch, "does not exist") if is_same else (ConfigError, "has another /dev/shm than the")
        with pytest.raises(cause, match=message):
            await make_client(Elsewhere())._attach_once()

    asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))


def test_each_lane_of_the_reply_is_mapped_under_its_number() -> None:
    created = {lane: ShmChannel.create(SPEC, 1, 1, lane, 1.0) for lane in (1, 0)}
    for lane, channel in created.items():
        channel.qkv.fill_(lane)

    class TwoLaneAttention(Attention):
        async def Attach(self, request: attn_pb2.AttachRequest, timeout: float) -> attn_pb2.AttachReply:
            lanes = [
                attn_pb2.LaneHandle(lane=lane, kind=each.kind, handle=each.handle) for lane, each in created.items()
            ]
            return attn_pb2.AttachReply(epoch=1, attachment_id=1, lanes=lanes)

    async def test() -> None:
        attachment = await make_client(TwoLaneAttention())._attach()
        try:
            assert {lane: channel.qkv.item() for lane, channel in attachment.channels.items()} == {0: 0.0, 1: 1.0}
        finally:
            attachment.close()

    try:
        asyncio.run(asyncio.wait_for(test(), TEST_LIMIT_S))
    finally:
        for channel in created.values():
            channel.close()


class Attachments:
    """The engine: gives attachments up before they are ready, each of which takes `takes_s`, but for some."""

    def __init__(self, client: Any, takes_s: float, num_to_come: int, ready: set[int]) -> None:
        self.client, self.now, self.num_attached = client, 0.0, 0
        self._takes_s, self._num_to_come, self._ready = takes_s, num_to_come, ready

    def on_attached(self, attachment: Any) -> None:
        self.num_attached += 1
        if self.num_attached > self._num_to_come:
            raise EOFError("enough")
        self.now += self._takes_s
        if self.num_attached in self._ready:
            self.client.ready(attachment)
        self.client.drop(attachment, AttachmentEnd(f"no room for graph {self.num_attached}", is_crash=True))

    def on_detached(self, attachment: object, end: AttachmentEnd) -> None: ...

    async def ready(self, attachment: object) -> None: ...

    async def detached(self, end: AttachmentEnd) -> None: ...


@pytest.mark.parametrize(
    ("takes_s", "ready", "num_attached"),
    [(0.1, set(), 12), (0.1, {6}, None), (0.1, {3, 9, 15}, None), (50.0, set(), 3), (50.0, {2, 4, 6, 8, 10}, None)],
)
def test_attachments_that_all_end_before_they_are_ready_are_given_up(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, ready: set[int], num_attached: int | None
) -> None:
    """After the time that a peer may take, and not before there were three. One that was ready begins anew."""
    monkeypatch.setattr(attention_client, "_REASON_S", 0.0)
    engine: Any = None

    async def run() -> None:
        nonlocal engine
        client: Any = make_client(Attention())
        client._connect_timeout_s = 1.05
        monkeypatch.setattr(attention_client, "StartDeadline", partial(StartDeadline, now=lambda: engine.now))
        engine = Attachments(client, takes_s, 12, ready)
        channel = SimpleNamespace(abort=lambda: None)
        client._map = lambda reply: SimpleNamespace(link=None, epoch=1, attachment_id=1, abort=channel.abort)
        client._may_attach.set()
        await client.run(engine, engine)

    running = asyncio.wait_for(run(), TEST_LIMIT_S)
    if num_attached is None:
        with pytest.raises(EOFError):
            asyncio.run(running)
        return
    with pytest.raises(PeerError, match=rf"^{num_attached} attachments .* 1.05 s \(peers.* no room for graph"):
        asyncio.run(running)
