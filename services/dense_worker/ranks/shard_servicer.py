"""The gRPC servicer of a dense shard. Runs on the event loop; the engine thread does all work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog
import torch

from services.channel import Channel, ChannelSpec
from services.common.engine_thread import EngineThread
from services.common.errors import (
    ConfigError,
    DeviceError,
    PeerError,
    RequestAborted,
    StaleEpoch,
    TwostrokeError,
    ends_process,
)
from services.common.rank import Rank
from services.dense_worker.engine.attention_client import map_channels
from services.dense_worker.features.adapters.adapter_loader import AdapterLoader
from services.dense_worker.ranks.group import RankGroup
from services.dense_worker.ranks.join_group import RankStore, connect_groups
from services.dense_worker.ranks.shard_runner import ShardRunner
from services.lora.adapter import decode_adapter
from services.pb import shard_pb2, shard_pb2_grpc, stall_pb2
from services.rpc.server import until_over
from services.rpc.watchdog import Progress, Watchdog, describe_stall
from services.step.codec import decode_plan

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Attachment:
    attachment_id: int
    channels: Mapping[int, Channel]  # by lane
    groups: Sequence[RankGroup]  # by lane

    def abort(self) -> None:
        for channel in self.channels.values():
            channel.abort()
        for group in self.groups:
            group.abort()

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


class ShardServicer(shard_pb2_grpc.DenseShardServicer):
    """Has one attachment at a time, and no state beside it."""

    def __init__(
        self, rank: Rank, spec: ChannelSpec, device: torch.device, wait_timeout_s: float, stall_timeout_s: float
    ) -> None:
        self._rank, self._spec, self._device = rank, spec, device
        self._wait_timeout_s = wait_timeout_s
        self.loading = ""  # the last thing that loading has reported
        self.watchdog = Watchdog("dense_worker", self._progress, self._on_stall, stall_timeout_s)
        self._engine = EngineThread()
        self._num_asked = self._num_done = 0  # calls of the engine thread
        self._is_meeting = False
        self._runner: ShardRunner | None = None
        self._weights_hash = ""
        self._loader: AdapterLoader | None = None
        self._attachment: _Attachment | None = None
        self._running: _Attachment | None = None  # that of the present stream of steps
        self._joining = asyncio.Lock()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, runner: ShardRunner, weights_hash: str, loader: AdapterLoader | None) -> None:
        """The weights are loaded: it can be joined. `loader`: of adapters; None: there are none."""
        self._runner, self._weights_hash, self._loader = runner, weights_hash, loader
        self.loading = ""
        self._engine.start()

    def abort(self) -> None:
        """Releases the engine thread if it waits for another process."""
        if self._attachment is not None:
            self._attachment.abort()

    def stop(self, timeout_s: float) -> None:
        """Ends the engine thread; blocks up to `timeout_s` seconds."""
        if self._loader is not None:
            self._loader.close()
        if self._runner is not None and self._engine.stop(timeout_s) and self._attachment is not None:
            self._attachment.close()

    async def wait_failure(self) -> None:
        """Raises errors for which the process ends: see `ends_process`."""
        await asyncio.shield(self._failure)

    async def Join(self, request: shard_pb2.JoinRequest, context: grpc.aio.ServicerContext) -> shard_pb2.JoinReply:
        self._check(request)
        async with self._joining:
            self.abort()
            await self._run(self._detach)
            joined = await self._run(self._join, request)
            self._attachment = joined
        log.info("attached", attachment_id=f"{joined.attachment_id:016x}", channel=joined.channels[0].kind)
        return shard_pb2.JoinReply()

    async def Run(
        self, requests: AsyncIterator[shard_pb2.ShardCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[shard_pb2.ShardAnswer]:
        attachment = self._attachment
        attachment_id = int(dict(context.invocation_metadata()).get("attachment-id", 0))
        if attachment is None or attachment.attachment_id != attachment_id:
            raise StaleEpoch(f"attachment {attachment_id:016x} was replaced")
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reader = asyncio.create_task(self._read(requests, attachment, failed))
        self._running = attachment
        try:
            await failed
        finally:
            if self._running is attachment:
                self._running = None
            # The reader ends with the call, as in the attention worker. Whoever waits must not wait for this shard.
            attachment.abort()
            log.info("detached", attachment_id=f"{attachment_id:016x}")
            reader.add_done_callback(lambda task: task.exception())
        yield shard_pb2.ShardAnswer()  # never: it makes this function a stream

    async def LoadAdapter(
        self, request: shard_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> shard_pb2.LoadAdapterReply:
        attachment = self._attachment
        if attachment is None or attachment.attachment_id != request.attachment_id:
            raise StaleEpoch(f"attachment {request.attachment_id:016x} was replaced")
        if self._loader is None or self._runner is None:
            raise ConfigError("this dense shard has no adapters: dense.max_loras is 0")
        adapter = decode_adapter(request.adapter)
        await self._run(self._runner.finish_steps)  # the first rank's have ended; these may still read the slot
        try:
            await asyncio.wrap_future(self._loader.load_part(request.slot, adapter))
        except torch.AcceleratorError as error:  # the GPU computes nothing more in this process
            self._note_failure(error)
            raise
        except TwostrokeError:
            raise
        except Exception as error:  # as on the first rank: whatever its files do concerns this adapter alone
            log.exception("loading an adapter failed unexpectedly", adapter=adapter.name)
            raise RequestAborted(str(error)) from error
        return shard_pb2.LoadAdapterReply()

    async def GetStatus(
        self, request: shard_pb2.GetShardStatusRequest, context: grpc.aio.ServicerContext
    ) -> shard_pb2.ShardStatus:
        device_bytes = 0 if self._device.type == "cpu" else torch.cuda.memory_reserved(self._device)
        return shard_pb2.ShardStatus(
            is_attached=self._running is not None, device_bytes=device_bytes, loading=self.loading
        )

    async def _read(
        self,
        requests: AsyncIterator[shard_pb2.ShardCommand],
        attachment: _Attachment,
        failed: asyncio.Future[None],
    ) -> None:
        loop = asyncio.get_running_loop()

        def fail(error: BaseException) -> None:
            self._note_failure(error)
            if not failed.done():
                failed.set_exception(error if isinstance(error, Exception) else PeerError(repr(error)))

        def report(call: Future[None]) -> None:
            if not call.cancelled() and (error := call.exception()) is not None:
                loop.call_soon_threadsafe(fail, error)

        try:
            async for command in until_over(requests):
                self._submit(self._obey, attachment, command).add_done_callback(report)
        except Exception as error:  # no one awaits the reader
            fail(error)
        else:
            fail(PeerError("the first rank has ended the stream of steps"))

    # On the engine thread

    def _join(self, request: shard_pb2.JoinRequest) -> _Attachment:
        assert self._runner is not None, "it is loaded"
        channels = map_channels(request.seam, self._spec, self._device, self._wait_timeout_s)
        try:
            groups = self._join_groups(request.store_port, len(channels))
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        self._runner.attach(channels, groups)
        return _Attachment(request.attachment_id, channels, groups)

    def _join_groups(self, store_port: int, num_lanes: int) -> Sequence[RankGroup]:
        self._is_meeting = True
        try:
            store = RankStore.find(store_port)
            store.meet(self._rank, self._wait_timeout_s)
        finally:
            self._is_meeting = False
        return connect_groups(self._device, store, self._rank, num_lanes, self._wait_timeout_s)

    def _detach(self) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()

    def _obey(self, attachment: _Attachment, command: shard_pb2.ShardCommand) -> None:
        if attachment is not self._attachment:
            raise StaleEpoch(f"attachment {attachment.attachment_id:016x} was replaced")
        assert self._runner is not None, "it is loaded"
        if command.HasField("further_rows"):
            self._runner.compute_rows(command.further_rows.lane, list(command.further_rows.rows))
        else:
            step = command.step
            vectors = step.vectors if step.HasField("vectors") else None
            self._runner.run_step(decode_plan(step.plan), step.num_rows, step.num_sampled, step.row_slots, vectors)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.shield(asyncio.wrap_future(self._submit(function, *arguments)))
        except Exception as error:
            self._note_failure(error)
            raise

    def _submit(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        self._num_asked += 1
        call = self._engine.submit(function, *arguments)
        call.add_done_callback(self._note_done)
        return call

    def _note_done(self, call: Future[Any]) -> None:
        self._num_done += 1

    def _progress(self) -> Progress | None:
        """The progress of the engine thread, or None without work. Work that it has left on a GPU is not seen."""
        if self._num_done == self._num_asked:
            return None
        attachment = self._attachment
        channels, groups = ((), ()) if attachment is None else (attachment.channels.values(), attachment.groups)
        waits_for_rank = self._is_meeting or any(each.is_waiting for each in groups)
        waits_for = "attn_worker" if any(each.is_waiting for each in channels) else ""
        return Progress(
            counter=(self._num_done, *(each.num_waits or 0 for each in channels)),
            waits_for="dense_worker" if waits_for_rank else waits_for,
        )

    async def _on_stall(self, stall: stall_pb2.Stall | None) -> None:
        """Ends the process if it waits for nobody: no other attachment could release its engine thread."""
        if stall is not None and not stall.waits_for:
            self._note_failure(DeviceError(describe_stall(stall)))

    def _note_failure(self, error: BaseException) -> None:
        if ends_process(error) and not self._failure.done():
            self._failure.set_exception(error)

    def _check(self, request: shard_pb2.JoinRequest) -> None:
        if self._runner is None:
            raise PeerError(f"the dense shard of rank {self._rank.index} has not loaded its weights")
        own = (self._rank.index, self._rank.count, self._weights_hash)
        asked = (request.rank, request.num_ranks, request.weights_hash)
        names = ("rank", "number of ranks", "weights' hash")
        for name, mine, theirs in zip(names, own, asked, strict=True):
            if mine != theirs:
                raise ConfigError(f"the first rank asks for {name} {theirs}, this dense shard has {mine}")
