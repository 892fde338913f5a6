"""What the client asks of several attention workers before they serve together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch
from structlog.testing import capture_logs

from services.channel import ChannelSpec
from services.common.config import MAX_ATTENTION_WORKERS, PeerSection
from services.common.errors import ConfigError, InvalidRequest, PeerError
from services.dense_worker.attention_workers import attention_workers_client
from services.dense_worker.attention_workers.attention_workers_client import (
    AttentionWorkersClient,
    _cache_of_orphans,
    _check_alike,
    _Link,
)
from services.dense_worker.engine.attachment import AttachedCache, Attachment, AttachmentEnd
from services.dense_worker.engine.attention_client import AttachOptions, Ended, execute, receive_answers
from services.pb import attn_pb2, attn_pb2_grpc, step_pb2
from services.step import NewSequence, PlanAccepted, SequenceOpened, StepPlan
from services.step.codec import encode_accepted, encode_plan

SPEC = ChannelSpec(max_tokens=1, qkv_size=1, attn_size=1, dtype=torch.float32)
LIMIT_S = 30.0


class Worker:
    def __init__(self, address: str) -> None:
        self.address = address


class Channel:
    """The data region of a link."""

    def __init__(self) -> None:
        self.is_closed = False

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Call:
    """A stream of plans to a worker that closes what it is asked to, each of 5 blocks."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def write(self, plan: Any) -> None:
        self.closed += plan.close_seq_ids

    def cancel(self) -> None:
        pass

    async def read(self) -> attn_pb2.PlanAnswer:
        return encode_accepted(PlanAccepted(0, num_freed_blocks=5 * len(self.closed)))


class Closing(attn_pb2_grpc.AttentionWorkerServicer):
    """An attention worker over gRPC that answers each plan, until one closes nothing."""

    async def Execute(
        self, request_iterator: AsyncIterator[step_pb2.StepPlan], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[attn_pb2.PlanAnswer]:
        async for plan in request_iterator:
            if not plan.close_seq_ids:
                return
            yield encode_accepted(PlanAccepted(plan.step_id, num_freed_blocks=5 * len(plan.close_seq_ids)))


@contextlib.asynccontextmanager
async def served(directory: Path) -> AsyncIterator[attn_pb2_grpc.AttentionWorkerStub]:
    server = grpc.aio.server()
    attn_pb2_grpc.add_AttentionWorkerServicer_to_server(Closing(), server)
    address = f"unix:{directory}/attn.sock"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield attn_pb2_grpc.AttentionWorkerStub(channel)
    finally:
        await server.stop(0)


def make_link(cache_id: int, orphans: dict[int, int] | None = None, **reply: int) -> _Link:
    worker: Any = Worker(f"unix:/{cache_id}")
    cache = AttachedCache(cache_id, 100, 50, orphans or {})
    answer = attn_pb2.AttachReply(epoch=1 + cache_id, block_size=16, max_model_len=1600)
    for field, value in reply.items():
        setattr(answer, field, value)
    channel: Any = Channel()
    call: Any = Call()
    return _Link(worker, cache, answer, channel, call)


def make_client(
    *, is_successor: bool = False, peers: PeerSection | None = None, device: str = "cpu"
) -> AttentionWorkersClient:
    options = AttachOptions("", "", 1, SPEC, torch.device(device), 1.0)
    addresses = ["unix:/0", "unix:/1"]
    may_attach = asyncio.Event()
    return AttentionWorkersClient(addresses, options, (), peers or PeerSection(), may_attach, is_successor=is_successor)


def script_workers(client: AttentionWorkersClient, attached: dict[str, Any]) -> list[str]:
    """Workers by address: a link, an error of attaching, or None: health is not answered. Returns who is asked."""
    asked = list[str]()

    async def is_ready(worker: Any) -> bool:
        await asyncio.sleep(0)
        return attached[worker.address] is not None

    async def link(worker: Any, present: Any) -> _Link:
        asked.append(worker.address)
        found = attached[worker.address]
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, _Link)
        return found

    scripted: Any = client
    scripted._is_ready, scripted._link = is_ready, link
    return asked


def test_a_worker_with_other_blocks_is_refused_by_its_address() -> None:
    other = make_link(1, block_size=32)
    with pytest.raises(ConfigError, match="the worker at unix:/1 has block_size 32, that at unix:/0 has 16: start all"):
        _check_alike(other.reply, [make_link(0)], "the worker at unix:/1")
    _check_alike(make_link(1).reply, [make_link(0)], "the worker at unix:/1")


def test_a_worker_that_is_named_twice_is_refused_with_both_names() -> None:
    present = [make_link(0), make_link(1)]
    with pytest.raises(ConfigError, match="the worker at localhost:1 is that at unix:/1: name each"):
        _check_alike(make_link(1).reply, present, "the worker at localhost:1")


def test_a_sequence_that_two_workers_have_is_that_of_the_one_with_more_of_it() -> None:
    links = [make_link(0, {1: 3, 2: 8}), make_link(4, {1: 5, 3: 1})]
    assert _cache_of_orphans(links) == {1: 4, 2: 0, 3: 4}


def test_what_goes_on_elsewhere_is_closed_and_its_blocks_are_free() -> None:
    link = make_link(0, {1: 3, 2: 8, 3: 2})

    async def run() -> None:
        await make_client()._close_others(link, [2])

    asyncio.run(run())
    call: Any = link.call
    assert (call.closed, link.cache.orphaned_blocks, link.cache.num_free_blocks) == ([1, 3], {2: 8}, 60)


def test_a_worker_that_has_closed_sequences_answers_plans_by_the_same_stream(tmp_path: Path) -> None:
    answers = list[SequenceOpened | PlanAccepted]()

    async def run() -> None:
        link = make_link(0, {1: 3, 2: 8})
        async with served(tmp_path) as stub:
            link.call = execute(stub, 1, 1)
            await make_client()._close_others(link, ())
            assert (link.cache.orphaned_blocks, link.cache.num_free_blocks) == ({}, 60)
            await link.call.write(encode_plan(StepPlan(7, close_seq_ids=(9,))))
            await link.call.write(encode_plan(StepPlan(8)))
            with pytest.raises(Ended, match="the attention worker ended the stream of plans"):
                await receive_answers(link.call, answers.append)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert answers == [PlanAccepted(7, num_freed_blocks=5, errors={})]


def test_the_last_worker_is_not_taken_away_and_one_that_is_gone_is_not_sought() -> None:
    async def run() -> None:
        client = make_client()
        attachment: Any = SimpleNamespace()
        listener: Any = SimpleNamespace()
        client._attachment, client._listener, client._links = attachment, listener, {0: make_link(0)}
        with pytest.raises(InvalidRequest, match="at unix:/0 is the last one: add another one before"):
            await client.remove("unix:/0", 1.0)
        script_workers(client, {"unix:/1": None})  # it was there before the dense worker that this one succeeds died
        seeking = asyncio.create_task(client._seek(attachment, client._workers["unix:/1"]))
        await client.remove("unix:/1", 1.0)
        await client.remove("unix:/9", 1.0)
        await asyncio.wait_for(seeking, LIMIT_S)


def test_a_worker_that_is_there_is_added_once_more_without_an_error() -> None:
    async def run() -> None:
        client = make_client()
        attachment: Any = SimpleNamespace()
        client._attachment, client._links = attachment, {0: make_link(0)}
        asked = script_workers(client, {"unix:/0": None, "unix:/1": None})
        await client.add("unix:/0", 1.0)
        with pytest.raises(PeerError, match=r"no attention worker at unix:/1 within 0\.05 s"):
            await client.add("unix:/1", 0.05)  # it is sought already
        assert client._workers.keys() == {"unix:/0", "unix:/1"} and not asked

    asyncio.run(run())


def test_a_plan_is_answered_when_the_last_of_its_workers_has_answered_or_gone() -> None:
    answers = list[PlanAccepted]()

    async def run() -> None:
        client = make_client()
        attachment: Any = SimpleNamespace()
        listener: Any = SimpleNamespace(
            on_answer=lambda attachment, answer: answers.append(answer), on_cache_lost=lambda *arguments: None
        )
        joined: Any = SimpleNamespace(lose=lambda cache_id: None)
        client._attachment, client._listener, client._joined = attachment, listener, joined
        client._links = {each: make_link(each) for each in (0, 1, 2)}
        client._awaited = {7: {0, 1}, 8: {1}}
        client._pass_answer(attachment, 0, PlanAccepted(7, num_freed_blocks=4))
        client._pass_answer(attachment, 2, PlanAccepted(7, errors={9: "no room"}))  # it frees nothing
        end: Any = SimpleNamespace(is_crash=True)
        client._lose(attachment, 1, end)

    asyncio.run(run())
    assert [(each.step_id, each.cache_id, each.is_last) for each in answers] == [
        (7, 0, False),
        (7, 2, False),
        (7, 1, True),
        (8, 1, True),
    ]


def test_only_a_successor_serves_without_workers_that_are_missing() -> None:
    attached = {"unix:/0": None, "unix:/1": make_link(1)}

    async def attach(*, is_successor: bool) -> list[str]:
        client = make_client(is_successor=is_successor)
        asked = script_workers(client, attached)
        await client._attach_once()
        assert list(client._links) == [1]
        return asked

    with pytest.raises(PeerError, match="the attention worker at unix:/0 is not ready"):
        asyncio.run(attach(is_successor=False))
    assert asyncio.run(attach(is_successor=True)) == ["unix:/1"], "one that hangs is not asked to attach"


def test_blocks_that_the_first_worker_frees_while_it_attaches_are_free() -> None:
    attached = {"unix:/0": make_link(0, {1: 3}, num_free_blocks=50), "unix:/1": make_link(1, {1: 5})}

    async def attach() -> Attachment:
        client = make_client()
        script_workers(client, attached)
        return await client._attach_once()

    attachment = asyncio.run(attach())
    assert [(each.num_free_blocks, each.orphaned_blocks) for each in attachment.caches] == [(55, {}), (50, {1: 5})]


def test_a_missing_worker_is_logged_once_and_again_after_it_was_there() -> None:
    attached: dict[str, Any] = {"unix:/0": None, "unix:/1": PeerError("it has ended")}

    async def attach() -> None:
        client = make_client(is_successor=True)
        script_workers(client, attached)
        for _ in range(3):  # many each second, for as long as peers.connect_timeout_s
            with pytest.raises(PeerError, match="none of the attention workers"):
                await client._attach_once()
        attached["unix:/0"] = make_link(0)
        await client._attach_once()
        attached["unix:/0"] = None
        with pytest.raises(PeerError, match="none of the attention workers"):
            await client._attach_once()

    with capture_logs() as logs:
        asyncio.run(attach())
    missing = [each["address"] for each in logs if each["event"] == "an attention worker is missing"]
    assert missing == ["unix:/0", "unix:/1", "unix:/0"]


def test_a_stray_socket_that_a_pattern_names_is_left_out() -> None:
    attached = {"unix:/0": make_link(0), "unix:/1": ConfigError("another model")}

    async def attach(*, is_found: bool) -> None:
        client = make_client()
        client._workers["unix:/1"].socket = Path("/1") if is_found else None
        script_workers(client, attached)
        await client._attach_once()
        assert list(client._links) == [0]

    asyncio.run(attach(is_found=True))
    with pytest.raises(ConfigError, match="another model"):
        asyncio.run(attach(is_found=False))


def test_a_worker_that_has_left_is_not_found_again_at_the_same_socket(tmp_path: Path) -> None:
    path = tmp_path / "attention-a.sock"

    async def run() -> None:
        client = make_client()
        client._patterns = [f"{tmp_path}/attention-*.sock"]

        def found() -> list[str]:
            return [each.address for each in client._find()]

        path.touch()
        assert found() == [f"unix:{path}"] and not found()
        client._forget(f"unix:{path}")
        assert not found() and not found(), "it stops later, when others have been told that it may"
        path.rename(tmp_path / "other")  # so that the next one cannot have its inode
        path.touch()
        assert found() == [f"unix:{path}"], "another one at the same address"

    asyncio.run(run())


def test_a_socket_that_a_killed_worker_has_left_is_sought_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose worker still listens, but does not answer, is."""
    monkeypatch.setattr(attention_workers_client, "_ABANDONED_S", 0.3)
    left, hanging = (tmp_path / f"attention-{name}.sock" for name in ("left", "hanging"))

    async def run() -> None:
        client = make_client()
        client._patterns = [f"{tmp_path}/attention-*.sock"]
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(left))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(hanging))
            listener.listen()
            workers = {each.socket: each for each in client._find()}
            for each in workers.values():
                each.health = cast(Any, SimpleNamespace(Check=unreachable))
            attachment = cast(Any, None)
            seeking = asyncio.create_task(client._seek(attachment, workers[hanging]))
            await client._seek(attachment, workers[left])
            assert not client._find() and not seeking.done()
            left.rename(tmp_path / "other")  # so that the next one cannot have its inode
            left.touch()
            assert [each.socket for each in client._find()] == [left], "a new worker at the same address"
            seeking.cancel()

    async def unreachable(request: object, timeout: float) -> Any:
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


class Serving:
    """A client that serves links, and what the engine is told."""

    def __init__(self, num_links: int) -> None:
        self.client = make_client()
        self.given_up = list[tuple[int, bool]]()
        attachment: Any = SimpleNamespace(abort=lambda: None)
        joined: Any = SimpleNamespace(lose=lambda cache_id: None)
        listener: Any = SimpleNamespace(
            on_cache_lost=lambda *arguments: None,
            on_cache_given_up=lambda attachment, *given_up: self.given_up.append(given_up),
        )
        self.client._attachment, self.client._joined, self.client._listener = attachment, joined, listener
        self.client._links = {each: make_link(each) for each in range(num_links)}

    def lose(self, cache_id: int) -> None:
        end: Any = SimpleNamespace(is_crash=True, reason="it crashed")
        attachment: Any = self.client._attachment
        self.client._lose(attachment, cache_id, end)


def test_a_worker_that_leaves_stays_if_it_is_the_only_one_left() -> None:
    async def run() -> None:
        serving = Serving(2)
        removing = asyncio.create_task(serving.client.remove("unix:/1", LIMIT_S))
        await asyncio.sleep(0)
        serving.lose(0)
        with pytest.raises(PeerError, match="at unix:/1 goes on: none is left beside it: it crashed"):
            await removing
        assert serving.given_up == [(1, True), (1, False)]

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_whoever_lets_a_worker_leave_is_told_when_the_attachment_ends_first() -> None:
    async def run() -> None:
        serving = Serving(2)
        client: Any = serving.client
        client._serve_link = lambda *arguments: asyncio.sleep(LIMIT_S)
        client._seek = client._serve_link
        served = asyncio.create_task(client._serve(client._attachment))
        removing = asyncio.create_task(client.remove("unix:/1", LIMIT_S))
        await asyncio.sleep(0.01)
        client._ended.set_exception(Ended(AttachmentEnd("it crashed", is_crash=True)))
        await served
        with pytest.raises(PeerError, match="at unix:/1 goes on: the attachment has ended before"):
            await removing

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_worker_that_leaves_already_is_not_asked_twice() -> None:
    async def run() -> None:
        serving = Serving(3)
        removing = asyncio.create_task(serving.client.remove("unix:/1", 0.05))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="at unix:/1 is being taken away already"):
            await serving.client.remove("unix:/1", LIMIT_S)
        with pytest.raises(PeerError, match="still has sequences"):
            await removing
        assert serving.given_up == [(1, True), (1, False)]

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


@pytest.mark.parametrize(("device", "address"), [("cpu", "unix:/0"), ("cuda", "")])
def test_a_sequence_that_moves_says_where_its_blocks_are_unless_computing_them_is_faster(
    device: str, address: str
) -> None:
    async def run() -> None:
        client = make_client(device=device)
        client._links = {0: make_link(0), 1: make_link(1)}
        moved, other = NewSequence(7, "r", (1, 2), 2, leaves_cache_id=0), NewSequence(8, "s", (1, 2), 2)
        found = client._with_addresses(StepPlan(1, new_sequences=(moved, other)))
        assert [each.leaves_address for each in found.new_sequences] == [address, ""]

    asyncio.run(run())


def test_one_worker_too_many_is_refused_with_the_limit() -> None:
    async def run() -> None:
        serving = Serving(MAX_ATTENTION_WORKERS)
        with pytest.raises(ConfigError, match="at unix:/99 is one too many: 32 are attached, the limit is 32"):
            await serving.client.add("unix:/99", LIMIT_S)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_link_is_dropped_if_the_attachment_ends_while_old_sequences_are_closed() -> None:
    link = make_link(1, {1: 3})

    async def hang() -> None:
        await asyncio.sleep(LIMIT_S)

    async def run() -> None:
        client = Serving(1).client
        script_workers(client, {"unix:/1": link})
        call: Any = link.call
        call.read = hang
        attachment: Any = client._attachment
        seeking = asyncio.create_task(client._seek(attachment, client._workers["unix:/1"]))
        await asyncio.sleep(0.01)
        seeking.cancel()
        await asyncio.gather(seeking, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    channel: Any = link.channel
    assert channel.is_closed


def test_a_worker_that_a_request_needs_stays_and_whoever_waits_is_told() -> None:
    async def run() -> None:
        serving = Serving(2)
        removing = asyncio.create_task(serving.client.remove("unix:/1", LIMIT_S))
        await asyncio.sleep(0)
        attachment: Any = serving.client._attachment
        serving.client.keep(attachment, 1, "a request needs 9 KV cache blocks")
        with pytest.raises(PeerError, match="at unix:/1 goes on: a request needs 9 KV cache blocks"):
            await removing
        assert serving.given_up == [(1, True), (1, False)]

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


class StalledCall(Call):
    """A stream that takes plans only once it is `open`, and gives no answers."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.num_plans = 0

    async def write(self, plan: Any) -> None:
        await self.open.wait()
        self.num_plans += 1

    async def read(self) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("stays", ["kept", "timeout", None])
def test_a_worker_that_may_leave_but_must_stay_before_it_has_its_last_plans_keeps_its_cache(stays: str | None) -> None:
    async def run() -> None:
        serving = Serving(2)
        client: Any = serving.client
        link, call = client._links[1], StalledCall()
        link.call = call
        link.worker.grpc = SimpleNamespace(close=lambda: asyncio.sleep(0))
        served = asyncio.create_task(client._serve_link(client._attachment, link))
        removing = asyncio.create_task(client.remove("unix:/1", 0.05 if stays == "timeout" else LIMIT_S))
        link.plans.put_nowait(StepPlan(1))
        await asyncio.sleep(0)
        client.release(client._attachment, 1)
        await asyncio.sleep(0)
        if stays == "kept":
            client.keep(client._attachment, 1, "a request needs 9 KV cache blocks")
        if stays is not None:
            with pytest.raises(PeerError, match=r"at unix:/1 (goes on: a request needs 9|still has sequences)"):
                await removing
            assert serving.given_up == [(1, True), (1, False)]
        link.plans.put_nowait(StepPlan(2))
        call.open.set()
        if stays is None:
            await removing
            await served
            assert client._links.keys() == {0} and call.num_plans == 1
            return
        while call.num_plans < 2 and not served.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert client._links.keys() == {0, 1} and not served.done()
        served.cancel()
        await asyncio.gather(served, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
