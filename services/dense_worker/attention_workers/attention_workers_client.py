"""`AttentionWorkersClient`: an `AttentionClient` of several attention workers, each with some of the sequences.

At first it waits for all of them; the successor of a dense worker that has served takes those that are there. An
address with a `*` names sockets: those that are there at first, one at least, and whatever comes later. From then on
each has a link of its own: one that breaks takes its own sequences
only, and is sought again at its address as long as others are left. When the last one has gone, the attachment ends, as
that of a single attention worker does.
"""

from __future__ import annotations

import asyncio
import glob
import itertools
import socket
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import structlog
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.channel import QUEUED, Channel
from services.common.config import MAX_ATTENTION_WORKERS, PeerSection
from services.common.errors import ConfigError, DeviceError, InvalidRequest, PeerError, StaleEpoch
from services.dense_worker.attention_workers.joined_channel import JoinedChannel, LayerSizes
from services.dense_worker.attention_workers.plan_splitter import PlanSplitter, SplitPlan
from services.dense_worker.attention_workers.split_context.part_openings import PartOpenings
from services.dense_worker.engine.attachment import AttachedCache, Attachment, AttachmentEnd
from services.dense_worker.engine.attention_client import (
    TRANSIENT,
    AttachmentWatcher,
    AttachOptions,
    AttentionClient,
    AttentionListener,
    Ended,
    attach_request,
    describe_attachment,
    describe_cache,
    execute,
    map_channels,
    receive_answers,
)
from services.pb import attn_pb2, attn_pb2_grpc
from services.rpc.client import open_channel, read_peer_tls
from services.rpc.server import run_together
from services.step import PlanAccepted, SequenceOpened, StepPlan
from services.step.codec import decode_answer, encode_plan

if TYPE_CHECKING:
    from services.dense_worker.attention_workers.cuda_joined_channel import CudaJoinedChannel

log = structlog.get_logger()

_RETRY_S = 0.1  # between two attempts to reach a worker whose sequences others have taken over
_RETRY_REFUSED_S = 5.0  # the same if it has another model or other sizes
_FIND_S = 1.0  # between two looks for new sockets
# How long nobody may listen at a socket that a pattern names, before its worker counts as killed. A worker makes a new
# file when it starts, and listens there at once.
_ABANDONED_S = 10.0
_POLL_S = 0.02
_LANE = 0
_File = tuple[int, int]  # its inode, and when that was made
_ALIKE = ("block_size", "window", "num_sink_tokens", "layer_window")  # what the caches must have in common


class _Worker:
    """An attention worker at an address, attached or not."""

    def __init__(self, address: str, peers: PeerSection, *, is_found: bool = False) -> None:
        """`is_found`: by a pattern"""
        self.address = address
        self.grpc = open_channel(address, peers.max_message_bytes, read_peer_tls(peers))
        self.stub = attn_pb2_grpc.AttentionWorkerStub(self.grpc)
        self.health = health_pb2_grpc.HealthStub(self.grpc)
        self.socket = Path(address.removeprefix("unix:")) if is_found else None  # gone: the worker is, too
        self.last_error = ""  # of attempts to attach
        self._logged_reason: str | None = None  # why it is missing, as the log says it
        self.refusal: ConfigError | None = None  # of the last attempt, which another one will not change

    def note_missing(self, reason: str) -> None:
        """Logs that it is missing, unless that was the reason of the attempt before, too: there are many each second.
        """
        self.last_error = reason
        if reason != self._logged_reason:
            log.warning("an attention worker is missing", address=self.address, reason=reason)
        self._logged_reason = reason

    def note_attached(self) -> None:
        """The next time that it is missing is logged again."""
        self._logged_reason = None


@dataclass(slots=True, eq=False)
class _Link:
    """One attached worker."""

    worker: _Worker
    cache: AttachedCache
    reply: attn_pb2.AttachReply
    channel: Channel
    call: grpc.aio.StreamStreamCall
    # Plans that it has not been sent, and at last why it is given up; a future: it may leave, unless that is done then.
    plans: asyncio.Queue[StepPlan | AttachmentEnd | asyncio.Future[None]] = field(default_factory=asyncio.Queue)

    @property
    def cache_id(self) -> int:
        return self.cache.cache_id

    def drop(self) -> None:
        """Gives up a link that no step uses yet."""
        self.call.cancel()
        self.drop_seam()

    def drop_seam(self) -> None:
        """Unmaps the data region of a link that no step uses yet."""
        self.channel.abort()
        self.channel.close()


class AttentionWorkersClient(AttentionClient):
    """Plans are split on the engine thread (`publish`); all else is on the event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        options: AttachOptions,
        layers: Sequence[LayerSizes],
        peers: PeerSection,
        may_attach: asyncio.Event,
        *,
        is_successor: bool = False,
    ) -> None:
        """`is_successor`: a dense worker before this one has served, so that workers may be missing."""
        super().__init__(addresses[0], options, peers, may_attach)
        self._address = ", ".join(addresses)  # for messages
        self._peers = peers
        self._layers = layers
        self._patterns = [each.removeprefix("unix:") for each in addresses if "*" in each]
        self._workers = {address: _Worker(address, peers) for address in addresses if "*" not in address}
        self._may_miss = is_successor  # whether it serves without those that are missing
        self._links: dict[int, _Link] = {}  # by cache_id
        self._next_cache_id = 0
        self._joined: JoinedChannel | CudaJoinedChannel  # made with each attachment, as the next one
        self._splitter: PlanSplitter
        self._part_openings = PartOpenings()
        self._awaited: dict[int, set[int]] = {}  # by step_id: cache_ids whose answers are still out
        self._leaving: dict[int, asyncio.Future[None]] = {}  # by cache_id: workers whose sequences move to others
        # By address, sockets that patterns name and whose workers have left: not found again as long as they are these.
        self._left: dict[str, _File | None] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self, listener: AttentionListener, watcher: AttachmentWatcher) -> None:
        try:
            await super().run(listener, watcher)
        finally:
            for worker in self._workers.values():
                await worker.grpc.close()

    def publish(self, attachment: Attachment, plan: StepPlan) -> None:
        """Splits a plan and sends its parts. Called on the engine thread; never blocks."""
        split = self._splitter.split(plan)
        if split.rows:
            self._joined.expect(plan.step_id, split.rows)
        self._post(attachment, split)

    # Workers that come and go

    @property
    def addresses(self) -> dict[int, str]:
        """Of the attached workers, by cache_id."""
        return {cache_id: link.worker.address for cache_id, link in self._links.items()}

    @property
    def _attached_stubs(self) -> Sequence[attn_pb2_grpc.AttentionWorkerStub]:
        return [each.worker.stub for each in self._links.values()]

    async def add(self, address: str, timeout_s: float) -> None:
        """Attaches to a further worker, which then gets sequences, or waits for one that is known.

        Raises `ConfigError` if it refuses, `PeerError` if it does not come in time.
        """
        attachment = self._require_attachment()
        seeking = None
        if (worker := self._workers.get(address)) is None:
            _check_room(len(self._links), _where(address))
            worker = self._workers[address] = _Worker(address, self._peers)
            self._start(seeking := self._loop.create_task(self._seek(attachment, worker)))
        try:
            async with asyncio.timeout(timeout_s):
                while address not in self.addresses.values():
                    if worker.refusal is not None:
                        raise worker.refusal
                    await asyncio.sleep(_POLL_S)
        except BaseException as error:  # also when the caller goes away
            if seeking is not None:
                seeking.cancel()
                del self._workers[address]
                await worker.grpc.close()
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"no attention worker at {address} within {timeout_s:g} s: {worker.last_error}"
                ) from error
            raise

    async def remove(self, address: str, timeout_s: float) -> None:
        """Lets the sequences of a worker move to the others, and detaches from it when it has none.

        One that is not attached is not sought any more. Raises `InvalidRequest` if it is leaving already or no other
        one is there, and `PeerError` if it still has some after `timeout_s` seconds, or no other one is left before:
        then it stays.
        """
        attachment = self._require_attachment()
        cache_id = next((each for each, own in self.addresses.items() if own == address), None)
        if cache_id is None:
            self._forget(address)
            return
        where = _where(address)
        if not self._links.keys() - self._leaving.keys() - {cache_id}:
            raise InvalidRequest(f"{where} is the last one: add another one before")
        if cache_id in self._leaving:
            raise InvalidRequest(f"{where} is being taken away already")
        left = self._leaving[cache_id] = self._loop.create_future()
        self._listener.on_cache_given_up(attachment, cache_id, True)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(left)
        except BaseException as error:
            if not left.done():
                del self._leaving[cache_id]
                left.cancel()
                self._listener.on_cache_given_up(attachment, cache_id, False)
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"{where} still has sequences after {timeout_s:g} s: others had no room for them; it goes on"
                ) from error
            raise

    def _forget(self, address: str) -> None:
        """A worker that has left is not sought any more, even while it is still there."""
        self._workers.pop(address, None)
        self._left[address] = _file_at(address)

    def release(self, attachment: Attachment, cache_id: int) -> None:
        self._loop.call_soon_threadsafe(self._release, cache_id)

    def _release(self, cache_id: int) -> None:
        left, link = self._leaving.get(cache_id), self._links.get(cache_id)
        if left is not None and link is not None:
            link.plans.put_nowait(left)  # `keep` may still come before the plans ahead of it have been sent

    def keep(self, attachment: Attachment, cache_id: int, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._keep, attachment, cache_id, reason)

    def _keep(self, attachment: Attachment, cache_id: int, reason: str) -> None:
        if (link := self._links.get(cache_id)) is None or attachment is not self._attachment:
            return
        if (left := self._leaving.pop(cache_id, None)) is not None:
            self._listener.on_cache_given_up(attachment, cache_id, False)
            left.set_exception(PeerError(f"{_where(link.worker.address)} goes on: {reason}"))

    def forget(self, attachment: Attachment, cache_id: int) -> None:
        if attachment is self._attachment:
            self._splitter.forget(cache_id)

    def _require_attachment(self) -> Attachment:
        if self._attachment is None or not self._links:
            raise PeerError("no attention worker is attached now")
        return self._attachment

    # Attaching

    async def _attach_once(self) -> Attachment:
        """Attaches to all workers; after the first time to those that are there, at least one."""
        self._links, self._next_cache_id, self._awaited = {}, 0, {}
        self._part_openings = PartOpenings()
        links = list[_Link]()
        try:
            self._find()
            for worker in await self._ready_workers():  # in turn, so that each sees what memory the others leave
                try:
                    links.append(await self._link(worker, links))
                    worker.note_attached()
                except (PeerError, ConfigError) as error:
                    may_miss = self._may_miss and not isinstance(error, ConfigError)
                    if not may_miss and worker.socket is None:
                        raise
                    worker.note_missing(str(error))
            if not links:
                reasons = "; ".join(f"{each.address}: {each.last_error}" for each in self._workers.values())
                raise PeerError(
                    f"none of the attention workers at {self._address} is there" + (reasons and f" ({reasons})")
                )
            cache_of = _cache_of_orphans(links)
            for link in links:
                await self._close_others(link, [each for each, owner in cache_of.items() if owner == link.cache_id])
        except BaseException:
            for link in links:
                link.drop()
            raise
        self._may_miss = True
        self._links = {each.cache_id: each for each in links}
        members = {each.cache_id: each.channel for each in links}
        self._joined = self._make_joined(members)
        self._splitter = PlanSplitter(cache_of)
        attachment = describe_attachment(links[0].reply, {_LANE: self._joined}, [each.cache for each in links])
        return replace(attachment, max_model_len=self._max_model_len(links))

    def _max_model_len(self, links: Sequence[_Link]) -> int:
        """Tokens of the longest sequence. Workers that are missing count as those that are there."""
        if not self._options.splits_context:
            return min(each.reply.max_model_len for each in links)
        num_missing = max(0, len(self._workers) - len(links))
        sizes = [each.cache.num_blocks for each in links]
        return (sum(sizes) + num_missing * min(sizes)) * links[0].reply.block_size

    def _make_joined(self, members: dict[int, Channel]) -> JoinedChannel | CudaJoinedChannel:
        arguments: tuple[Any, ...] = (self._options.spec, self._layers, members, self._lost_in_step)
        if self._options.device.type == "cpu":
            return JoinedChannel(*arguments)
        from services.dense_worker.attention_workers.cuda_joined_channel import CudaJoinedChannel  # needs triton
        from services.dense_worker.attention_workers.split_context.cuda_shared_channel import CudaSharedChannel

        make_channel = CudaSharedChannel if self._options.splits_context else CudaJoinedChannel
        with torch.cuda.device(self._options.device):
            return make_channel(*arguments, self._options.device)

    async def _ready_workers(self) -> list[_Worker]:
        """Asks all at once, so that one that hangs holds up nobody else for longer than `peers.rpc_timeout_s`.

        Raises `PeerError`, which names the worker, if one is not ready that must be there.
        """
        workers = list(self._workers.values())
        ready = []
        for worker, is_ready in zip(workers, await asyncio.gather(*map(self._is_ready, workers)), strict=True):
            if is_ready:
                ready.append(worker)
            elif worker.socket is None and not self._may_miss:
                raise PeerError(
                    f"{_where(worker.address)} is not ready: {worker.last_error} (attention.workers"
                    f" or attention.addresses name {len(workers)}, which must all run at start)"
                )
            else:  # one at a socket that was found may be one of a container that has ended
                worker.note_missing(worker.last_error)
        return ready

    def _find(self) -> list[_Worker]:
        """Workers at sockets that patterns name and that are new."""
        self._left = {each: file for each, file in self._left.items() if file is not None and _file_at(each) == file}
        found = []
        for path in itertools.chain.from_iterable(map(glob.iglob, self._patterns)):
            if (address := f"unix:{path}") not in self._workers and address not in self._left:
                found.append(_Worker(address, self._peers, is_found=True))
                self._workers[address] = found[-1]
        return found

    async def _find_later(self, attachment: Attachment) -> None:
        """Attaches to workers that come, while it serves."""
        while True:
            await asyncio.sleep(_FIND_S)
            for worker in self._find():
                self._start(self._seek(attachment, worker))

    async def _is_ready(self, worker: _Worker) -> bool:
        try:
            reply = await worker.health.Check(health_pb2.HealthCheckRequest(), timeout=self._peers.rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            worker.last_error = error.details() or error.code().name
            return False
        worker.last_error = "it is starting"
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def _link(self, worker: _Worker, present: Sequence[_Link]) -> _Link:
        """Attaches to one worker. Raises `PeerError`, or `ConfigError` if a retry cannot help; both name it."""
        where = _where(worker.address)
        _check_room(len(present), where)
        try:
            reply = await worker.stub.Attach(attach_request(self._options), timeout=self._connect_timeout_s)
            [channel] = map_channels(
                reply, self._options.spec, self._options.device, self._options.wait_timeout_s
            ).values()
        except grpc.aio.AioRpcError as error:
            kind = PeerError if error.code() in TRANSIENT else ConfigError
            raise kind(f"{where} refused: {error.details()}") from error
        except (ConfigError, DeviceError) as error:
            raise ConfigError(f"{where}: {error}") from error
        except StaleEpoch as error:
            raise PeerError(f"{where}: {error}") from error
        cache = describe_cache(reply, self._next_cache_id)
        self._next_cache_id += 1
        link = _Link(worker, cache, reply, channel, execute(worker.stub, reply.epoch, reply.attachment_id))
        try:
            _check_alike(reply, present, where)
            if channel.kind == QUEUED:
                raise ConfigError(
                    f"{where} and the dense worker take turns on a GPU, since they are no MPS clients: set launch.mps"
                    " to on, or attention.workers to 1"
                )
        except ConfigError:
            link.drop()
            raise
        log.info("linked", address=worker.address, cache_id=cache.cache_id, num_blocks=cache.num_blocks)
        return link

    async def _close_others(self, link: _Link, kept: Collection[int]) -> None:
        """Closes what an attached worker has from before, without `kept`, and counts the blocks as free.

        Raises `PeerError` if it does not answer.
        """
        cache = link.cache
        closed = tuple(each for each in cache.orphaned_blocks if each not in kept)
        if not closed:
            return
        try:
            async with asyncio.timeout(self._peers.rpc_timeout_s):
                await link.call.write(encode_plan(StepPlan(0, close_seq_ids=closed)))
                answer = decode_answer(await link.call.read())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, AttributeError) as error:
            raise PeerError(f"{_where(link.worker.address)} closes no sequences: {error!r}") from error
        assert isinstance(answer, PlanAccepted), "nothing has been opened"
        link.cache = replace(
            cache,
            num_free_blocks=cache.num_free_blocks + answer.num_freed_blocks,
            orphaned_blocks={each: num for each, num in cache.orphaned_blocks.items() if each in kept},
        )

    # Serving

    async def _serve(self, attachment: Attachment) -> AttachmentEnd:
        self._ended = self._loop.create_future()
        for link in self._links.values():
            self._start(self._serve_link(attachment, link))
        for worker in set(self._workers.values()) - {link.worker for link in self._links.values()}:
            self._start(self._seek(attachment, worker))
        if self._patterns:
            self._start(self._find_later(attachment))
        try:
            await run_together(self._wait_ended(), self._handle_inbox(attachment, self._send))
        except Ended as ended:
            return ended.end
        finally:
            attachment.abort()
            tasks, self._serving = self._serving, set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._keep_leaving("the attachment has ended before it had no sequences")
        raise AssertionError("an attachment ends with an error")

    async def _wait_ended(self) -> None:
        await self._ended

    def _start(self, coroutine: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
        """Runs a coroutine as long as the attachment lasts; its error ends the attachment."""
        task = asyncio.ensure_future(coroutine)
        self._serving.add(task)
        task.add_done_callback(self._note_done)

    def _note_done(self, task: asyncio.Future[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _serve_link(self, attachment: Attachment, link: _Link) -> None:
        """Runs until the link breaks, then seeks the worker again. Raises `Ended` with the attachment's last link."""
        call, cache_id = link.call, link.cache_id
        try:
            await run_together(
                receive_answers(call, partial(self._pass_answer, attachment, cache_id)), _write_plans(call, link)
            )
        except Ended as ended:
            end = ended.end
        finally:
            call.cancel()
        if end.is_replaced:
            raise Ended(end)
        end = replace(end, reason=f"{_where(link.worker.address)}: {end.reason}")
        self._lose(attachment, cache_id, end)
        if not self._links:
            raise Ended(end)
        if link.worker.address in self._workers:
            self._start(self._seek(attachment, link.worker))
        else:
            await link.worker.grpc.close()

    def _pass_answer(self, attachment: Attachment, cache_id: int, answer: SequenceOpened | PlanAccepted) -> None:
        if isinstance(answer, SequenceOpened):
            try:
                whole = self._part_openings.note(replace(answer, cache_id=cache_id))
            except PeerError as error:
                raise Ended(AttachmentEnd(str(error), is_crash=True)) from error
            if whole is not None:
                self._listener.on_answer(attachment, whole)
            return
        is_last = self._note_answered(answer.step_id, cache_id)
        self._listener.on_answer(attachment, replace(answer, cache_id=cache_id, is_last=is_last))

    def _note_answered(self, step_id: int, cache_id: int) -> bool:
        """Whether a worker's answer is the last one that its plan gets."""
        awaited = self._awaited.get(step_id, set())
        if cache_id not in awaited:
            return False
        awaited.remove(cache_id)
        if awaited:
            return False
        del self._awaited[step_id]
        return True

    def _lose(self, attachment: Attachment, cache_id: int, end: AttachmentEnd) -> None:
        """Tells the engine that a worker is gone, and answers in its place what others have answered."""
        link = self._links.pop(cache_id)
        if (left := self._leaving.pop(cache_id, None)) is not None:
            left.set_result(None)
            self._forget(link.worker.address)
        self._joined.lose(cache_id)
        self._part_openings.lose(cache_id)
        if self._links:
            self._listener.on_cache_lost(attachment, cache_id, end)
            if self._links.keys() <= self._leaving.keys():
                for each in self._leaving:
                    self._listener.on_cache_given_up(attachment, each, False)
                self._keep_leaving(f"none is left beside it: {end.reason}")
            for step_id in [each for each, awaited in self._awaited.items() if cache_id in awaited]:
                if self._note_answered(step_id, cache_id):
                    self._listener.on_answer(attachment, PlanAccepted(step_id, cache_id=cache_id))

    def _keep_leaving(self, reason: str) -> None:
        """Workers that were to leave stay; whoever waits for that gets a `PeerError`."""
        leaving, self._leaving = self._leaving, {}
        for cache_id, left in leaving.items():
            link = self._links.get(cache_id)
            where = "the attention worker" if link is None else _where(link.worker.address)
            left.set_exception(PeerError(f"{where} goes on: {reason}"))

    def _lost_in_step(self, cache_id: int, reason: str) -> None:
        """A wait on the engine thread has lost a worker: its link ends, too, if it has not noticed."""
        self._loop.call_soon_threadsafe(self._break, cache_id, reason)

    def _break(self, cache_id: int, reason: str) -> None:
        if (link := self._links.get(cache_id)) is not None:
            log.warning("an attention worker has left a step", address=link.worker.address, reason=reason)
            link.plans.put_nowait(AttachmentEnd("it has not come back in a step", is_crash=True))

    async def _seek(self, attachment: Attachment, worker: _Worker) -> None:
        """Attaches to a worker, for the first time or again, as long as others are left, and serves it."""
        listened_s = time.monotonic()
        while True:
            if worker.socket is not None and not worker.socket.exists():
                self._workers.pop(worker.address, None)
            if self._workers.get(worker.address) is not worker:
                await worker.grpc.close()
                return
            try:
                worker.refusal = None
                if await self._is_ready(worker):
                    try:
                        link = await self._link(worker, list(self._links.values()))
                    finally:
                        listened_s = time.monotonic()  # until it was lost, however long this has taken
                    try:
                        await self._close_others(link, ())  # their sequences have gone on elsewhere
                        _check_room(len(self._links), _where(worker.address))
                    except BaseException:
                        link.drop()
                        raise
                    break
            except PeerError as error:
                worker.last_error = str(error)
            except ConfigError as error:
                log.error("an attention worker cannot be used", reason=str(error))
                worker.refusal = error
                await asyncio.sleep(_RETRY_REFUSED_S)
            if worker.socket is None or not _is_abandoned(worker.socket):
                listened_s = time.monotonic()
            elif time.monotonic() - listened_s > _ABANDONED_S:
                log.warning("nobody listens at a socket any more: it is not looked at again", address=worker.address)
                self._forget(worker.address)
            await asyncio.sleep(_RETRY_S)
        worker.note_attached()
        self._links[link.cache_id] = link
        add_seam = partial(self._joined.add, link.cache_id, link.channel)
        self._listener.on_cache_added(attachment, link.cache, add_seam, link.drop_seam)
        self._start(self._serve_link(attachment, link))

    async def _send(self, split: SplitPlan) -> None:
        """Gives each worker its part. Those that are gone count as having answered."""
        awaited = {each for each, part in split.parts.items() if part.frees_blocks and each in self._links}
        if split.frees_blocks:
            if awaited:
                self._awaited[split.step_id] = awaited
            else:
                assert self._attachment is not None, "there is a plan"
                self._listener.on_answer(self._attachment, PlanAccepted(split.step_id, cache_id=-1))
        self._part_openings.expect(new for part in split.parts.values() for new in part.new_sequences)
        for cache_id in split.parts.keys() - self._links.keys():
            self._part_openings.lose(cache_id)
        for cache_id, part in split.parts.items():
            if (link := self._links.get(cache_id)) is not None:
                link.plans.put_nowait(self._with_addresses(part))

    def _with_addresses(self, part: StepPlan) -> StepPlan:
        """A worker's part of a plan, in which sequences that move say where their blocks can be copied from.

        On GPUs they are computed again, which takes a tenth of the time or less.
        """
        if self._options.device.type != "cpu" or all([each.leaves_cache_id is None for each in part.new_sequences]):
            return part
        addresses = self.addresses
        return replace(
            part,
            new_sequences=tuple(
                replace(each, leaves_address=addresses.get(each.leaves_cache_id, "")) for each in part.new_sequences
            ),
        )


async def _write_plans(call: grpc.aio.StreamStreamCall, link: _Link) -> None:
    """Sends a worker its plans. Raises `Ended` when it is given up."""
    while True:
        plan = await link.plans.get()
        if isinstance(plan, AttachmentEnd):
            raise Ended(plan)
        if isinstance(plan, asyncio.Future):
            if plan.done():  # it stays after all
                continue
            raise Ended(AttachmentEnd("it was asked to leave", is_crash=False))
        try:
            await call.write(encode_plan(plan))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("a plan could not be sent", reason=repr(error))
            return  # the stream has ended; its reader gets the reason


def _where(address: str) -> str:
    """How messages name the worker at an address."""
    return f"the attention worker at {address}"


def _file_at(address: str) -> _File | None:
    """Which file the socket at an address is: another worker at the same address has another one."""
    try:
        found = Path(address.removeprefix("unix:")).stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _is_abandoned(path: Path) -> bool:
    """Whether nobody listens at a socket, as when its process was killed. A process that is busy does listen."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it does not answer now, or is gone
            return False
    return False


def _check_room(num_present: int, where: str) -> None:
    """Raises `ConfigError` if there may be no further worker."""
    if num_present >= MAX_ATTENTION_WORKERS:
        raise ConfigError(f"{where} is one too many: {num_present} are attached, the limit is {MAX_ATTENTION_WORKERS}")


def _check_alike(reply: attn_pb2.AttachReply, present: Sequence[_Link], where: str) -> None:
    """Raises `ConfigError` if a worker is one of those that are attached, or its cache cannot have the same plans."""
    for link in present:
        if reply.epoch == link.reply.epoch:
            raise ConfigError(f"{where} is that at {link.worker.address}: name each attention worker once")
    for link in present[:1]:
        for name in _ALIKE:
            own, other = getattr(reply, name), getattr(link.reply, name)
            if own != other:
                raise ConfigError(
                    f"{where} has {name} {own}, that at {link.worker.address} has {other}: start all with the same"
                    " sections model and attention"
                )
        least = min(each.reply.max_model_len for each in present)
        if reply.max_model_len < least:
            log.warning("an attention worker has less room", worker=where, max_model_len=reply.max_model_len)


def _cache_of_orphans(links: Sequence[_Link]) -> dict[int, int]:
    """Which worker has the most of each sequence that an earlier dense worker left open."""
    most: dict[int, tuple[int, int]] = {}
    for link in links:
        for seq_id, num_blocks in link.cache.orphaned_blocks.items():
            most[seq_id] = max(most.get(seq_id, (0, -1)), (num_blocks, -link.cache_id))
    return {seq_id: -negative for seq_id, (_, negative) in most.items()}
