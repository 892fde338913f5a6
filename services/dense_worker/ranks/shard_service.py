"""`ShardService`: the dense shard of a rank that is not the first: weights and a seam, and no scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from services.channel import ChannelSpec
from services.common.child_options import ChildOptions
from services.common.config import Config
from services.common.lifeline import Lifeline
from services.common.process import low_priority_thread
from services.common.rank import Rank, seam_config
from services.common.ready_shape import read_decoder
from services.common.resolve import ResolvedModel, use_device
from services.dense_worker.build import hold_weights, load_model_weights, make_lora, resolve_dense_model
from services.dense_worker.features.adapters.adapter_loader import AdapterLoader, make_loader
from services.dense_worker.model.weights import hash_of_weights
from services.dense_worker.ranks.shard_backend import shard_runner
from services.dense_worker.ranks.shard_runner import ShardRunner
from services.dense_worker.ranks.shard_servicer import ShardServicer
from services.dense_worker.standby import holds_weights, weight_bytes
from services.pb import shard_pb2_grpc
from services.rpc.server import STOP_GRACE_S, Service, make_peer_server, run_together

log = structlog.get_logger()

SERVICE_NAME = "twostroke.shard.v1.DenseShard"


class ShardService(Service):
    """A standby has its weights, too, and serves when its address leads to it."""

    def __init__(self, config: Config, options: ChildOptions) -> None:
        super().__init__()
        self._config = config
        self._is_standby = options.standby is not None
        self._shape_file = options.shape_file
        self._rank = Rank.of(config.dense, options.rank)
        self._lifeline = None if options.lifeline is None else Lifeline(options.lifeline)

    async def start(self) -> None:
        """Begins to answer health checks, and loads the rank's part of the weights."""
        config, rank = self._config, self._rank
        model = resolve_dense_model(config, rank, await read_decoder(self._shape_file, config.model))
        use_device(model.device, config.dense.num_threads)
        server = make_peer_server(config.dense.address, SERVICE_NAME, config.peers, setting="dense.address")
        bounds_s = config.channel.wait_timeout_s, config.watchdog.stall_timeout_s
        self._servicer = ShardServicer(rank, channel_spec(config, model), model.device, *bounds_s)
        shard_pb2_grpc.add_DenseShardServicer_to_server(self._servicer, server.server)
        address = await server.start()
        self._opened.push_async_callback(server.stop, STOP_GRACE_S)
        self._servicer.start(*await self._load(model))
        self._opened.push_async_callback(asyncio.to_thread, self._servicer.stop, STOP_GRACE_S)
        self._opened.callback(self._servicer.abort)  # the engine thread may wait for another rank
        await server.set_serving(True)
        log.info("loaded", address=address, rank=rank.index, num_ranks=rank.count)

    async def run(self) -> None:
        """Runs until cancelled. Raises errors that another attachment cannot cure."""
        await run_together(self._servicer.wait_failure(), self._servicer.watchdog.run())

    async def _load(self, model: ResolvedModel) -> tuple[ShardRunner, str, AdapterLoader | None]:
        """Loads the shard; a standby does so at low priority. Raises `CapacityError` if it has no room."""
        loop = asyncio.get_running_loop()

        def report(line: str) -> None:
            log.info("loading", progress=line)
            loop.call_soon_threadsafe(setattr, self._servicer, "loading", line)

        arguments = self._config, model, report, self._lifeline
        if not self._is_standby:
            return await asyncio.to_thread(load_shard, *arguments)
        thread = low_priority_thread()
        try:
            return await loop.run_in_executor(thread, partial(load_shard, *arguments, True))
        finally:
            thread.shutdown(wait=False)  # if this worker was asked to stop, it still works


def load_shard(
    config: Config,
    model: ResolvedModel,
    report: Callable[[str], None],
    lifeline: Lifeline | None,
    is_standby: bool = False,
) -> tuple[ShardRunner, str, AdapterLoader | None]:
    """Loads the rank's part of the weights; returns what runs it, the hash of the whole model's weights, and what
    loads adapters, if there are any.

    `report` receives lines about the progress. `lifeline`: to the launcher, which may have the part in memory.
    `is_standby`: another process runs the shard now. Raises the errors of `load_weights`, and `CapacityError` if a
    standby has no room.
    """
    use_device(model.device, config.dense.num_threads)  # of the calling thread
    digest = hash_of_weights(config.model, model.config)
    held = hold_weights(lifeline, digest, model)
    if is_standby:
        holds_weights("loaded", model, 0 if held is not None and held.are_held() else weight_bytes(model))
    weights = load_model_weights(config.model, model, held, report)
    if lifeline is not None and held is not None:
        lifeline.keep([held.key], model.rank.prefix)
    lora = make_lora(config, model, weights)
    loader = None if lora is None else make_loader(config, model, weights, lora)
    return shard_runner(weights, model, config.scheduler.max_num_batched_tokens, lora), digest, loader


def channel_spec(config: Config, model: ResolvedModel) -> ChannelSpec:
    """The data region of the rank's seam."""
    seam = seam_config(model.config, model.rank)
    return ChannelSpec(config.scheduler.max_num_batched_tokens, seam.qkv_size, seam.attn_size, model.dtype)
