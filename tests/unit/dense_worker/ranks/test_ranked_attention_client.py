"""How the first rank attaches to all others: what it asks before what, and what ends an attempt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2

from services.channel import ChannelSpec
from services.common.config import PeerSection
from services.common.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    InvalidRequest,
    PeerError,
    RequestAborted,
    StaleEpoch,
    TwostrokeError,
)
from services.common.rank import Rank
from services.dense_worker.engine import attention_client
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.engine.attention_client import AttachOptions
from services.dense_worker.engine.session import NO_ATTACHMENT
from services.dense_worker.ranks import ranked_attention_client
from services.dense_worker.ranks.ranked_attention_client import OtherRank, RankedAttentionClient
from services.lora.adapter import Adapter
from services.pb import attn_pb2, shard_pb2
from services.rpc.error_details import rich_status
from services.rpc.start_deadline import StartDeadline

CPU = torch.device("cpu")
SPEC = ChannelSpec(max_tokens=1, qkv_size=1, attn_size=1, dtype=torch.float32)
LIMIT_S = 10.0
ADAPTER = Adapter("a", "ab" * 32, "/a")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class EndedStream:
    """A call with answers, of which there are no more."""

    async def read(self) -> Any:
        return grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        return
        yield

    def cancel(self) -> None:
        pass


class Process:
    """The stub of an attention worker or a shard. Calls are counted; those that raise nothing may take long."""

    def __init__(
        self,
        error: Exception | None = None,
        status: int = SERVING,
        takes_s: float = 0.0,
        absence: Exception | None = None,
        **described: Any,
    ) -> None:
        """`described`: of the reply to `Attach`."""
        self._described = described
        self.num_calls = self.num_cancelled = 0
        self.loads: list[shard_pb2.LoadAdapterRequest] = []
        self.loading = ""
        self._error, self._status, self._takes_s, self._absence = error, status, takes_s, absence

    async def Check(self, request: object, timeout: float) -> Any:
        if self._absence is not None:
            raise self._absence
        return SimpleNamespace(status=self._status)

    async def _call(self) -> attn_pb2.AttachReply:
        self.num_calls += 1
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return attn_pb2.AttachReply(block_size=16, **self._described)

    async def Attach(self, request: object, timeout: float) -> attn_pb2.AttachReply:
        return await self._call()

    async def Join(self, request: object, timeout: float) -> attn_pb2.AttachReply:
        return await self._call()

    async def GetStatus(self, request: object, timeout: float) -> shard_pb2.ShardStatus:
        return shard_pb2.ShardStatus(loading=self.loading)

    def _stream(self, metadata: object) -> Any:
        return EndedStream()

    Execute = Run = _stream

    def fail_from_now_on(self, error: Exception | None, takes_s: float = 0.0) -> None:
        self._error, self._takes_s = error, takes_s

    async def LoadAdapter(self, request: shard_pb2.LoadAdapterRequest, timeout: float) -> None:
        self.loads.append(request)
        await self._call()


def as_call_fails(error: TwostrokeError) -> grpc.aio.AioRpcError:
    """What a client gets from a server that raises `error`."""
    status = rich_status(error)
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )


def make_client(attention: list[Process], shard: Process, wait_timeout_s: float = LIMIT_S, **peers: float) -> Any:
    """Of two ranks. The first one's attachment has no channels."""
    options = AttachOptions("", "", 1, SPEC, CPU, wait_timeout_s)
    other = OtherRank("127.0.0.1:9", "127.0.0.1:10", options)
    section = PeerSection(**peers)
    reports = asyncio.Queue[str]()  # of what loads
    arguments = "127.0.0.1:8", options, section, asyncio.Event(), Rank(0, 2), [other], reports.put_nowait
    client: Any = RankedAttentionClient(*arguments)
    client.reports = reports
    client._attention_stubs, client._shard_stubs = attention, [shard]
    client._health_stubs = dict(zip(("attention 0", "attention 1", "shard 1"), [*attention, shard], strict=True))
    client._map = lambda reply: NO_ATTACHMENT
    return client


def attach(attention: list[Process], shard: Process) -> Attachment:
    """Tries once."""

    async def run() -> Attachment:
        return await asyncio.wait_for(make_client(attention, shard)._attach_once(), LIMIT_S)

    return asyncio.run(run())


def test_sequences_are_opened_after_the_last_flush_that_any_rank_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_attention_client, "join_groups", lambda *arguments: [])
    restarted, other = Process(), Process(prefix_generation=3)
    assert attach([restarted, other], Process()).caches[0].prefix_generation == 3


def test_nobody_is_asked_to_attach_before_all_are_ready() -> None:
    attention = [Process(), Process(status=NOT_SERVING)]
    with pytest.raises(PeerError, match="attention 1 is not ready"):
        attach(attention, Process())
    assert attention[0].num_calls == attention[1].num_calls == 0


def test_a_rank_that_never_comes_is_named_with_the_limit() -> None:
    gone = as_call_fails(PeerError("connection refused"))

    async def run() -> None:
        client = make_client([Process(), Process()], Process(absence=gone), connect_timeout_s=0.3)
        with pytest.raises(PeerError, match=r"the ranks have not met within 0\.3 s: shard 1: connection refused"):
            await client._attach()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


class Clock:
    """That of the deadline of attaching."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(attention_client, "StartDeadline", partial(StartDeadline, now=lambda: self.now))


async def wait_for_report(client: Any, line: str) -> None:
    while await client.reports.get() != line:
        pass


def test_a_shard_that_loads_is_waited_for_as_long_as_it_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shard = Clock(monkeypatch), Process(status=NOT_SERVING)

    async def run() -> None:
        client = make_client([Process(), Process()], shard, connect_timeout_s=10.0)
        attaching = asyncio.create_task(client._attach())
        for percent in range(4):
            shard.loading = f"weights: {percent} %"
            await wait_for_report(client, f"rank 1: weights: {percent} %")
            clock.now += 9.0
        assert not attaching.done()
        clock.now += 2.0
        with pytest.raises(PeerError, match=r"the ranks have not met within 10\.0 s: shard 1 is not ready"):
            await attaching

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_two_shards_that_load_no_more_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What both have reported last differs, and says nothing new."""
    clock, hanging = Clock(monkeypatch), [Process(status=NOT_SERVING), Process(status=NOT_SERVING)]
    for index, each in enumerate(hanging):
        each.loading = f"weights: {index} %"

    async def run() -> None:
        client = make_client([Process(), Process()], hanging[0], connect_timeout_s=10.0)
        client._shard_stubs = hanging
        attaching = asyncio.create_task(client._attach())
        for line in ("rank 1: weights: 0 %", "rank 2: weights: 1 %"):
            await wait_for_report(client, line)
        clock.now += 11.0
        with pytest.raises(PeerError, match=r"the ranks have not met within 10\.0 s"):
            await attaching

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_ranks_whose_connection_never_ends_are_given_up_and_then_the_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(ranked_attention_client, "join_groups", lambda *arguments: is_over.wait())

    async def run() -> None:
        client = make_client([Process(), Process()], Process(), 0.2, connect_timeout_s=0.3)
        with pytest.raises(PeerError, match=r"not been connected within 0\.3 s \(peers\.connect_timeout_s\)"):
            await client._attach_once()
        [meeting] = client._given_up
        client._given_up[meeting] -= 1.0
        with pytest.raises(DeviceError, match=r"1\.\d s after it was given up, the limit \(twice.* is 0\.4 s"):
            await client._attach_once()

    try:
        asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    finally:
        is_over.set()


def test_an_attach_that_fails_ends_the_others() -> None:
    attention = [Process(takes_s=60.0), Process(error=as_call_fails(PeerError("it stops")))]
    with pytest.raises(PeerError, match="the attention worker of rank 1: it stops"):
        attach(attention, Process())
    assert attention[0].num_calls == attention[0].num_cancelled == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StaleEpoch("its region does not exist"), PeerError),
        (PeerError("it has not loaded its weights"), PeerError),
        (ConfigError("it has other weights"), ConfigError),
    ],
)
def test_a_join_that_fails_is_named_and_retried_where_that_may_help(
    error: TwostrokeError, kind: type[TwostrokeError]
) -> None:
    """And the first rank's thread does not go on waiting for it: the test would take its 10 s."""
    with pytest.raises(kind, match=f"the dense shard of rank 1 at 127.0.0.1:10: .*: {error}"):
        attach([Process(), Process()], Process(error=as_call_fails(error)))


def call_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("error", "told", "rpc_timeout_s"),
    [
        (None, None, 60.0),
        (as_call_fails(RequestAborted("its files have changed")), "its files have changed", 60.0),
        (as_call_fails(InvalidRequest("it has values too large")), "it has values too large", 60.0),
        (as_call_fails(CapacityError("no room")), "no room", 60.0),
        (call_error(grpc.StatusCode.DEADLINE_EXCEEDED, ""), "not loaded within 7 s", 60.0),
        (as_call_fails(PeerError("connection refused")), "connection refused", 0.01),
        (call_error(grpc.StatusCode.INTERNAL, "internal error: OSError"), "internal error: OSError", 0.01),
    ],
)
def test_an_adapter_that_a_rank_cannot_load_is_named(
    monkeypatch: pytest.MonkeyPatch, error: grpc.aio.AioRpcError | None, told: str | None, rpc_timeout_s: float
) -> None:
    """At once if the adapter is the reason: the test's limit is far below the 60 s."""
    monkeypatch.setattr(ranked_attention_client, "join_groups", lambda *arguments: [])

    async def run() -> None:
        shard = Process()
        client = make_client([Process(), Process()], shard, rpc_timeout_s=rpc_timeout_s, connect_timeout_s=7.0)
        ranks = (await client._attach_once()).ranks
        shard.fail_from_now_on(error)
        loading = asyncio.wrap_future(await asyncio.to_thread(ranks.load_adapter, 3, ADAPTER))
        if told is None:
            await loading
        else:
            with pytest.raises(RequestAborted, match=f"the dense shard of rank 1: {told}"):
                await loading
        assert [(each.slot, each.adapter.path) for each in shard.loads] == [(3, "/a")]
        assert not client._serving.loads

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


@pytest.mark.parametrize(
    "error",
    [
        call_error(grpc.StatusCode.UNAVAILABLE, "connection refused"),
        call_error(grpc.StatusCode.INTERNAL, "internal error: AcceleratorError"),
        call_error(grpc.StatusCode.CANCELLED, "it stops"),
        as_call_fails(StaleEpoch("the attachment was replaced")),
    ],
)
def test_no_sequence_fails_when_a_shard_fails_while_it_loads_an_adapter(
    monkeypatch: pytest.MonkeyPatch, error: grpc.aio.AioRpcError
) -> None:
    """The attachment ends, and the next one loads the adapter again."""
    monkeypatch.setattr(ranked_attention_client, "join_groups", lambda *arguments: [])

    async def run() -> None:
        shard = Process()
        client = make_client([Process(), Process()], shard, rpc_timeout_s=60.0)
        attachment = await client._attach_once()
        shard.fail_from_now_on(error)
        loading = asyncio.wrap_future(await asyncio.to_thread(attachment.ranks.load_adapter, 0, ADAPTER))
        done, _ = await asyncio.wait([loading], timeout=0.1)
        assert not done, "nobody is told that it failed"
        await client._serve(attachment)
        with pytest.raises(asyncio.CancelledError):
            await loading

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_loading_an_adapter_ends_with_the_attachment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that it failed: it is loaded again with the next one."""
    monkeypatch.setattr(ranked_attention_client, "join_groups", lambda *arguments: [])

    async def run() -> None:
        shard = Process()
        client = make_client([Process(), Process()], shard)
        attachment = await client._attach_once()
        shard.fail_from_now_on(None, takes_s=60.0)
        loading = await asyncio.to_thread(attachment.ranks.load_adapter, 0, ADAPTER)
        while not shard.loads:  # noqa: ASYNC110  the test's limit bounds it
            await asyncio.sleep(0.001)
        await client._serve(attachment)
        late = await asyncio.to_thread(attachment.ranks.load_adapter, 0, ADAPTER)
        for each in (loading, late):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wrap_future(each)
        assert len(shard.loads) == 1

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
