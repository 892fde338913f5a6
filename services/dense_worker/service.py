"""A dense worker put together from its parts: started, serving, stopped in reverse."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import structlog
from prometheus_client import CollectorRegistry

from services.channel import ChannelSpec
from services.common.config import Config, ModelSection
from services.common.gpu import naming_what_needs_memory
from services.common.resolve import ResolvedModel, resolve_model, use_device
from services.dense_worker.backends.select import select_backend
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.engine.attention_client import AttachOptions, AttentionClient
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.observer import EngineObserver
from services.dense_worker.engine.scheduler import SchedulerLimits
from services.dense_worker.engine.step_log import writing_step_log
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.engine.tracing import SequenceTracer
from services.dense_worker.metrics import DenseMetrics
from services.dense_worker.model.weights import ModelWeights, load_weights, random_weights, weights_hash
from services.dense_worker.readiness import Readiness
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.servicer import DenseServicer
from services.dense_worker.tensorrt.profiles import Limits
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.client import read_peer_tls
from services.rpc.metrics import new_registry, serve_metrics_once_free, serving_metrics
from services.rpc.server import GrpcServer, run_together
from services.rpc.tracing import Tracer, tracing
from services.rpc.watchdog import Watchdog

log = structlog.get_logger()

SERVICE_NAME = "twostroke.dense.v1.DenseWorker"
STOP_GRACE_S = 1.0
# A gateway then connects anew, and asks for the addresses behind our name again; open streams stay.
MAX_CONNECTION_AGE_MS = 60_000


async def serve(config: Config) -> None:
    """Opens everything, serves until cancelled, closes everything."""
    registry = new_registry("dense")
    metrics = DenseMetrics(registry)
    with (
        serving_metrics(None if config.dense.standby else config.dense.metrics_address, registry),
        writing_step_log(config.dense.step_log) as step_logs,
        tracing(config.tracing, "dense") as tracer,
    ):
        await serve_watched(config, registry, metrics, [metrics, *step_logs], tracer)


async def serve_watched(
    config: Config,
    registry: CollectorRegistry,
    metrics: DenseMetrics,
    observers: Sequence[EngineObserver],
    tracer: Tracer,
) -> None:
    """See `serve`."""
    tls = read_peer_tls(config.peers)
    model = resolve_model(config.model, config.dense.device)
    use_device(model.device, config.dense.num_threads)
    server = GrpcServer(
        config.dense.address,
        [SERVICE_NAME],
        config.peers.max_message_bytes,
        tls and tls.files,
        options=[("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS)],
    )
    servicer = DenseServicer(metrics, SequenceTracer(tracer))
    dense_pb2_grpc.add_DenseWorkerServicer_to_server(servicer, server.server)
    address = await server.start()
    try:
        digest, weights = await asyncio.to_thread(open_weights, config.model, model)
        engine = run_engine(config, model, digest, weights, servicer, server, address, metrics, observers)
        await run_together(engine, serve_late_metrics(config, registry, servicer))
    finally:
        await server.stop(STOP_GRACE_S)


def open_weights(section: ModelSection, model: ResolvedModel) -> tuple[str, ModelWeights]:
    """The weights and their hash. Raises `ModelError` for what is missing or damaged, `CapacityError` without room."""
    is_dummy = section.load_format == "dummy"
    digest = weights_hash(section.path, model.config, section.dummy_seed if is_dummy else None)
    with naming_what_needs_memory("the weights"):
        if is_dummy:
            return digest, random_weights(model.config, model.dtype, model.device, section.dummy_seed)
        return digest, load_weights(section.path, model.config, model.dtype, model.device)


async def serve_late_metrics(config: Config, registry: CollectorRegistry, servicer: DenseServicer) -> None:
    """Of a worker in standby, once it is its turn: until then the address is the present worker's."""
    if config.dense.standby:
        await servicer.may_attach.wait()
        await serve_metrics_once_free(config.dense.metrics_address, registry)


async def run_engine(
    config: Config,
    model: ResolvedModel,
    digest: str,
    weights: ModelWeights,
    servicer: DenseServicer,
    server: GrpcServer,
    address: str,
    metrics: DenseMetrics,
    observers: Sequence[EngineObserver],
) -> None:
    """Runs the engine beside the client of the attention worker; raises whatever ends either."""
    loop = asyncio.get_running_loop()
    scheduler = config.scheduler
    options = AttachOptions(
        weights_hash=digest,
        model_fingerprint=model.config.fingerprint,
        max_num_seqs=scheduler.max_num_seqs,
        spec=ChannelSpec(
            scheduler.max_num_batched_tokens, model.config.qkv_size, model.config.attn_size, model.dtype
        ),
        device=model.device,
        wait_timeout_s=config.channel.wait_timeout_s,
    )
    client = AttentionClient(config.attention.address, options, config.peers, servicer.may_attach)
    backend, runner = await asyncio.to_thread(build_runner, config, model, weights)
    failure: asyncio.Future[None] = loop.create_future()

    def deliver(report: StepReport) -> None:
        loop.call_soon_threadsafe(servicer.deliver, report)

    def fail(error: BaseException) -> None:
        loop.call_soon_threadsafe(failure.set_exception, error)

    engine = Engine(
        SchedulerLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            max_num_waiting=scheduler.max_num_waiting,
            policy=scheduler.policy,
            max_num_waiting_tokens=scheduler.max_num_waiting_tokens,
            priority_ageing_s=scheduler.priority_ageing_s,
        ),
        runner,
        client,
        deliver,
        fail,
        result_timeout_s=config.channel.wait_timeout_s,
        observers=observers,
    )
    metrics.watch(lambda: engine.counts)
    watchdog = Watchdog(
        "dense_worker",
        lambda: engine.progress(model.config.num_layers),
        server.set_stall,
        config.watchdog.stall_timeout_s,
    )

    async def watch_engine() -> None:
        await failure

    epoch = secrets.randbits(64)
    readiness = Readiness(
        servicer, server, lambda attachment: describe(model, digest, backend, attachment, epoch)
    )
    engine.start()
    servicer.set_engine(engine, watchdog)
    servicer.status.weights_hash = digest
    servicer.status.state = dense_pb2.DenseStatus.STANDBY
    if not config.dense.standby:
        servicer.may_attach.set()
        servicer.status.state = dense_pb2.DenseStatus.ATTACHING
    log.info("loaded", address=address, state=dense_pb2.DenseStatus.State.Name(servicer.status.state))
    try:
        await run_together(client.run(engine, readiness), watch_engine(), watchdog.run())
    except asyncio.CancelledError:  # asked to stop: no crash
        servicer.set_info(None)
        servicer.end_streams(dense_pb2.Farewell(is_crash=False, reason="the dense worker was asked to stop"))
        await servicer.wait_ended(STOP_GRACE_S)
        raise
    finally:
        client.abort()
        await asyncio.to_thread(engine.stop, STOP_GRACE_S)


def build_runner(config: Config, model: ResolvedModel, weights: ModelWeights) -> tuple[str, ModelRunner]:
    """The backend's name, and what runs steps on it. Raises `CapacityError` where a GPU has no room for a step."""
    with naming_what_needs_memory("the buffers of a step"):
        return _build_runner(config, model, weights)


def _build_runner(config: Config, model: ResolvedModel, weights: ModelWeights) -> tuple[str, ModelRunner]:
    use_device(model.device, config.dense.num_threads)  # of the calling thread
    scheduler, layers = config.scheduler, model.config.num_layers
    limits = Limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    selected = select_backend(config.dense, model, weights, config.model.path, limits)
    sampler = Sampler(scheduler.max_num_seqs, model.config.vocab_size, model.device)
    if model.device.type == "cpu":
        return selected.name, ModelRunner(selected.backend, sampler, layers, scheduler.max_num_seqs)
    from services.dense_worker.runner.cuda_model_runner import CudaModelRunner

    return selected.name, CudaModelRunner(
        selected.backend,
        sampler,
        model.config,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        captures_lazily=config.dense.captures_lazily,
    )


def describe(
    model: ResolvedModel, digest: str, backend: str, attachment: Attachment, epoch: int
) -> dense_pb2.DenseInfo:
    """What a gateway may ask for: the model's limits, and the KV cache's where they are lower."""
    config = model.config
    return dense_pb2.DenseInfo(
        family=config.family,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_model_len=min(model.max_model_len, attachment.num_blocks * attachment.block_size),
        weights_hash=digest,
        backend=backend,
        device=str(model.device),
        epoch=epoch,
    )
