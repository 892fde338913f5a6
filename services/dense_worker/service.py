"""`DenseWorker`: a dense worker with all its parts. `GatewayWorker`: those that one of an encoder has, too."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog
import torch

from services.channel import ChannelSpec
from services.common.child_options import ChildOptions
from services.common.config import Config
from services.common.lifeline import Lifeline
from services.common.process import low_priority_thread
from services.common.rank import Rank, seam_config
from services.common.ready_shape import read_decoder
from services.common.resolve import ResolvedModel, use_device
from services.dense_worker.attention_workers.attention_workers_client import AttentionWorkersClient
from services.dense_worker.attention_workers.joined_channel import LayerSizes
from services.dense_worker.attention_workers.split_context.dividing_placement import DividingPlacement
from services.dense_worker.attention_workers.spread_placement import SpreadPlacement
from services.dense_worker.build import LoadedModel, load_model, prepare_model, resolve_dense_model, with_stated_hash
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.engine.attention_client import AttachOptions, AttentionClient
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.gateway_engine import GatewayEngine
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.observer import EngineObserver
from services.dense_worker.engine.placement import Placement
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.step_log import writing_step_log
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.drafting.load_drafter import make_drafting
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.installed import make_fork_policy
from services.dense_worker.metrics import DenseMetrics
from services.dense_worker.ranks.ranked_attention_client import OtherRank, RankedAttentionClient
from services.dense_worker.servicer import DenseServicer
from services.dense_worker.standby import holds_weights
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.metrics import new_registry, serve_late_metrics, serving_metrics
from services.rpc.server import STOP_GRACE_S, Service, make_peer_server, run_together
from services.rpc.spans import Tracer
from services.rpc.tracing import tracing
from services.rpc.watchdog import Progress, Watchdog

METRICS = "dense.metrics_address"

log = structlog.get_logger()

SERVICE_NAME = "twostroke.dense.v1.DenseWorker"
READ_AHEAD_S = 1.0  # after loading: most workers are attached by then, which reading would delay
# After this time gateways reconnect and resolve the addresses of our name again; open streams stay.
MAX_CONNECTION_AGE_MS = 60_000


class GatewayWorker(Service):
    """A dense worker of any kind: has a server for gateways, and for the launcher, and an engine.

    It may be a standby, and another one may take over from it. An `AttachmentWatcher`, on the event loop.
    """

    def __init__(self, config: Config, options: ChildOptions) -> None:
        super().__init__()
        self._config = config
        self._options = options
        self._registry = new_registry("dense")
        self._metrics = DenseMetrics(self._registry)
        self._epoch = secrets.randbits(64)

    def _begin(self) -> tuple[list[EngineObserver], Tracer]:
        """Begins to serve metrics. Returns what observes the engine, and the tracer."""
        config = self._config
        self._loop = asyncio.get_running_loop()
        address = None if self._options.has_predecessor else config.dense.metrics_address
        self._opened.enter_context(serving_metrics(address, self._registry, METRICS))
        step_logs = self._opened.enter_context(writing_step_log(config.dense.step_log))
        return [self._metrics, *step_logs], self._opened.enter_context(tracing(config.tracing, "dense"))

    async def _start_server(self, tracer: Tracer) -> str:
        """Begins to answer health checks. Returns the address."""
        address, peers = self._config.dense.address, self._config.peers
        self._servicer = DenseServicer(self._metrics, SequenceTracer(tracer), peers.max_message_bytes)
        options = [("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS)]
        self._server = make_peer_server(address, SERVICE_NAME, peers, setting="dense.address", options=options)
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(self._servicer, self._server.server)
        address = await self._server.start()
        self._opened.push_async_callback(self._server.stop, STOP_GRACE_S)
        return address

    def _deliver(self, report: StepReport) -> None:
        """Called on the engine thread."""
        self._loop.call_soon_threadsafe(self._servicer.streams.deliver, report)

    def _start_engine(
        self,
        engine: GatewayEngine,
        progress: Callable[[], Progress | None],
        features: Sequence[Feature],
        vocab_size: int,
    ) -> None:
        """Starts the engine, which gateways reach from now on, as soon as the worker is ready."""
        self._failure = engine.failure
        self._metrics.watch(lambda: engine.counts)
        stall_timeout_s = self._config.watchdog.stall_timeout_s
        self._watchdog = Watchdog("dense_worker", progress, self._server.set_stall, stall_timeout_s)
        engine.start()
        self._opened.push_async_callback(asyncio.to_thread, engine.stop, STOP_GRACE_S)
        self._servicer.set_engine(engine, self._watchdog, features, vocab_size)

    async def run(self) -> None:
        """Runs until cancelled. Raises errors of the engine or of the client of the attention worker."""
        servicer = self._servicer
        late_address = self._config.dense.metrics_address if self._options.has_predecessor else None
        try:
            await run_together(
                self._serve(),
                asyncio.shield(asyncio.wrap_future(self._failure)),
                self._watchdog.run(),
                serve_late_metrics(late_address, self._registry, METRICS, servicer.may_attach),
            )
        except asyncio.CancelledError:  # the worker was asked to stop, which is no crash
            await servicer.stop_serving(STOP_GRACE_S)
            raise

    async def ready(self, attachment: Attachment) -> None:
        """Begins to serve gateways: the engine is ready for steps, before which it captures graphs on a GPU."""
        info = self._describe(attachment)
        self._servicer.set_info(info)
        self._servicer.status.state = dense_pb2.DenseStatus.SERVING
        await self._server.set_serving(True)
        log.info("serving", backend=info.backend, device=info.device, dtype=info.dtype)

    async def detached(self, end: AttachmentEnd) -> None:
        """Ends the streams of all gateways, with a farewell that says whether it was a crash. They may reconnect, and
        submit their sequences again.
        """
        (log.warning if end.is_crash else log.info)("no attention worker", reason=end.reason, is_crash=end.is_crash)
        servicer = self._servicer
        servicer.set_info(None)
        servicer.note_unattached()
        running = servicer.spans_under_way() if end.is_crash else []
        servicer.end_streams(dense_pb2.Farewell(is_crash=end.is_crash, reason=end.reason, running=running))
        await self._server.set_serving(False)

    def _describe(self, attachment: Attachment) -> dense_pb2.DenseInfo:
        """The worker, for gateways."""
        raise NotImplementedError

    async def _serve(self) -> None:
        """Calls `ready` and `detached` whenever the worker can serve, or can no more."""
        raise NotImplementedError


class DenseWorker(GatewayWorker):
    """That of a model that generates tokens: a client of the attention worker."""

    def __init__(self, config: Config, options: ChildOptions) -> None:
        super().__init__(without_waiting_for_graphs(config) if options.is_restarted else config, options)
        self._lifeline = None if options.lifeline is None else Lifeline(options.lifeline)

    async def start(self) -> None:
        """Begins to answer health checks, loads the weights, and starts the engine."""
        config = self._config
        observers, tracer = self._begin()
        shape = await read_decoder(self._options.shape_file, config.model)
        resolved = resolve_dense_model(config, Rank.of(config.dense, 0), shape)
        use_device(resolved.device, config.dense.num_threads)
        bound_address = await self._start_server(tracer)
        self._model = await self._load(resolved)
        for feature in self._model.features:
            self._opened.callback(feature.close)
        self._model = with_stated_hash(self._model, self._options.stated_weights_hash)
        loads = self._model.expert_loads
        if loads is not None:
            self._metrics.watch_experts(loads.read)
            observers.append(loads)
        counts = {each.name: each.encoder_counts() for each in self._model.features}
        encoders = {name: each for name, each in counts.items() if each is not None}
        if encoders:
            self._metrics.watch_encoders(encoders)
        self._make_engine(observers)
        self._announce(bound_address)
        for feature in self._model.features:
            self._opened.callback(self._loop.call_later(READ_AHEAD_S, feature.read_ahead).cancel)

    async def _serve(self) -> None:
        await self._client.run(self._engine, self)

    def _describe(self, attachment: Attachment) -> dense_pb2.DenseInfo:
        continues = self._options.continues_sequences
        return self._model.describe(attachment, self._epoch, self._config.scheduler, continues_sequences=continues)

    def drafting(self) -> Drafting:
        """What decides when steps have draft tokens. Overridden by workers of tests and benchmarks."""
        return make_drafting(self._config.scheduler, self._model.resolved.config, self._model.drafter)

    def _report_loading(self, line: str) -> None:
        """Called on the thread that loads."""
        log.info("loading", progress=line)
        self._loop.call_soon_threadsafe(setattr, self._servicer.status, "loading", line)

    async def _load(self, resolved: ResolvedModel) -> LoadedModel:
        """Loads the model; a standby does so at low priority, or when it is told to take over."""
        config, report = self._config, self._report_loading
        if self._options.standby is None:
            return await asyncio.to_thread(load_model, config, resolved, report, self._lifeline)
        thread = low_priority_thread()
        try:
            run = partial(self._loop.run_in_executor, thread)
            prepared = await run(prepare_model, config, resolved, report, self._lifeline)
            await run(prepared.read_ahead)
            num_bytes = await run(prepared.own_weight_bytes)
            if await run(holds_weights, self._options.standby, resolved, num_bytes):
                return await run(partial(prepared.load, takes_over=True))
        finally:
            thread.shutdown(wait=False)  # if this worker was asked to stop, it still works
        self._servicer.status.state = dense_pb2.DenseStatus.STANDBY
        log.info("modules imported")
        await self._servicer.may_attach.wait()
        self._servicer.status.state = dense_pb2.DenseStatus.LOADING
        self._config = without_waiting_for_graphs(config)
        return await asyncio.to_thread(replace(prepared, config=self._config).load)

    def _make_engine(self, observers: Sequence[EngineObserver]) -> None:
        """Makes and starts the engine and its client of the attention worker."""
        config, model = self._config, self._model
        self._client = self._servicer.attention = self._make_client()
        drafting = self.drafting()
        self._registry.register(drafting.counts)
        scheduler = Scheduler(
            scheduler_limits(config, model.resolved.max_model_len, measures_steps=model.resolved.device.type == "cpu"),
            drafting,
            model.features,
            make_fork_policy(model.resolved.config, config.scheduler.num_lanes),
            make_placement(config),
        )
        timeout_s, shape = config.channel.wait_timeout_s, model.resolved.config
        engine = self._engine = Engine(scheduler, model.runner, self._client, self._deliver, timeout_s, observers)
        num_layers = len(model.resolved.rank.layers(shape.num_layers))
        self._start_engine(engine, lambda: engine.progress(num_layers), model.features, shape.vocab_size)
        self._opened.callback(self._client.abort)  # the engine thread may wait for the attention worker

    def _make_client(self) -> AttentionClient:
        config, model = self._config, self._model
        first = (config.attention.address, attach_options(config, model), config.peers, self._servicer.may_attach)
        if config.attention.addresses:
            heads = model.resolved.config.layer_heads
            layers = [LayerSizes(each.qkv_size, each.attn_size, each.num_heads) for each in heads]
            options = self._options
            client = AttentionWorkersClient(
                config.attention.addresses,
                first[1],
                layers,
                *first[2:],
                is_successor=options.is_restarted or options.has_predecessor or options.standby is not None,
            )
            self._metrics.watch_caches(lambda: self._engine.caches, lambda: client.addresses)
            return client
        if model.resolved.rank.count == 1:
            return AttentionClient(*first)
        addresses = zip(self._options.rank_attention_addresses, self._options.shard_addresses, strict=True)
        others = [
            OtherRank(*each, attach_options(config, model, index)) for index, each in enumerate(addresses, start=1)
        ]
        report = partial(setattr, self._servicer.status, "loading")
        return RankedAttentionClient(*first, model.resolved.rank, others, report)

    def _announce(self, address: str) -> None:
        """Reports that the model is loaded, and whether this worker may attach."""
        servicer = self._servicer
        servicer.status.weights_hash = self._model.weights_hash
        servicer.status.loading = ""
        if self._options.standby is None:
            servicer.may_attach.set()
        servicer.note_unattached()
        log.info("loaded", address=address, state=dense_pb2.DenseStatus.State.Name(servicer.status.state))


def make_placement(config: Config) -> Placement:
    """What chooses an attention worker for each sequence."""
    if not config.attention.addresses:
        return Placement()
    return DividingPlacement() if config.attention.split_context else SpreadPlacement()


def without_waiting_for_graphs(config: Config) -> Config:
    """The config of a worker for which streams wait: ranks and lanes would capture all CUDA graphs first."""
    if config.dense.num_ranks * config.scheduler.num_lanes == 1:
        return config
    return config.model_copy(update={"dense": config.dense.model_copy(update={"captures_lazily": True})})


def attach_options(config: Config, model: LoadedModel, rank: int = 0) -> AttachOptions:
    """The values that this worker sends to the attention worker of a rank."""
    of_rank, config_of_all = replace(model.resolved.rank, index=rank), model.resolved.config
    heads, layers = of_rank.share(config_of_all.num_heads), of_rank.layers(config_of_all.num_layers)
    shape, dtype, device = seam_config(config_of_all, of_rank), model.resolved.dtype, model.resolved.device
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + rank)
    scheduler = config.scheduler
    return AttachOptions(
        weights_hash=model.weights_hash,
        model_fingerprint=shape.fingerprint,
        max_num_seqs=scheduler.max_num_seqs,
        spec=ChannelSpec(scheduler.max_num_batched_tokens, shape.qkv_size, shape.attn_size, dtype),
        device=device,
        wait_timeout_s=config.channel.wait_timeout_s,
        kv_cache_dtype=model.kv_cache_dtype,
        learned=model.learned.of_part(layers, heads),
        is_deterministic=config.dense.deterministic,
        num_lanes=scheduler.num_lanes,
        splits_context=config.attention.split_context,
        rehearses=device.type == "cuda",
    )


def scheduler_limits(config: Config, max_model_len: int, *, measures_steps: bool = False) -> SchedulerLimits:
    """The limits of steps and of the queue, from the config and the longest sequence in tokens."""
    scheduler = config.scheduler
    return SchedulerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_num_waiting=scheduler.max_num_waiting,
        policy=scheduler.policy,
        max_num_waiting_tokens=scheduler.max_num_waiting_tokens,
        priority_ageing_s=scheduler.priority_ageing_s,
        head_start_s=scheduler.head_start_s,
        return_timeout_s=config.peers.connect_timeout_s,
        measures_steps=measures_steps,
    )
