"""A gateway put together from its parts: started, serving, stopped in reverse."""

from __future__ import annotations

import asyncio

import structlog
from prometheus_client import CollectorRegistry

from services.common.config import Config, api_keys_of_environment
from services.common.errors import PeerError
from services.common.model_config import load_model_config
from services.gateway.access.access import Access
from services.gateway.access.admission import Admission
from services.gateway.access.reception import Reception
from services.gateway.frontend import Frontend
from services.gateway.http.app import build_app
from services.gateway.http.server import HttpServer
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.dense_progress import DenseProgress
from services.gateway.link.journal import Journal
from services.gateway.link.worker_load import WorkerLoad
from services.gateway.loop_delay import measure_loop_delay
from services.gateway.metrics import GatewayMetrics
from services.gateway.model_names import ModelNames
from services.gateway.open_files import fit_connections
from services.gateway.servicer import SERVICE_NAME, GatewayServicer
from services.gateway.siblings import Siblings
from services.gateway.text.tokenizer import load_tokenizer
from services.pb import gateway_pb2_grpc, stall_pb2
from services.rpc.metrics import new_registry, serving_metrics
from services.rpc.server import GrpcServer, run_until
from services.rpc.spans import Tracer
from services.rpc.tls import is_exposed, tls_files
from services.rpc.tracing import tracing
from services.rpc.watchdog import Watchdog

log = structlog.get_logger()

MAX_INT = 2**31 - 1
STOP_GRACE_S = 1.0  # for clients to receive the error that ends their requests


async def serve(config: Config, drain: asyncio.Event | None = None) -> None:
    """Serves until cancelled, or until `drain` is set and requests under way have ended or had their time.

    Raises `ConfigError`, `ModelError`, or `PeerError` if no dense worker comes.
    """
    registry = new_registry("gateway")
    with (
        serving_metrics(config.gateway.metrics_address, registry),
        tracing(config.tracing, "gateway") as tracer,
    ):
        await serve_watched(config, registry, tracer, drain or asyncio.Event())


async def serve_watched(config: Config, registry: CollectorRegistry, tracer: Tracer, drain: asyncio.Event) -> None:
    """See `serve`."""
    path = config.model.path
    eos_token_ids = load_model_config(path).eos_token_ids
    tokenizer = load_tokenizer(path, is_optional=config.model.load_format == "dummy")
    section = fit_connections(config.gateway)
    metrics = GatewayMetrics(registry)
    access = Access(section.api_keys_file, api_keys_of_environment(), metrics.on_rejected)
    tls = tls_files(section.tls_certificate, section.tls_key, section.tls_client_ca)
    server = GrpcServer(
        section.address,
        [SERVICE_NAME],
        section.max_message_bytes,
        tls,
        section.local_address,
        options=[
            # Of TLS and of HTTP/2; gRPC's own limit is two minutes.
            ("grpc.server_handshake_timeout_ms", _milliseconds(section.header_timeout_s)),
            ("grpc.max_connection_idle_ms", _milliseconds(section.grpc_idle_timeout_s)),
            ("grpc.max_allowed_incoming_connections", section.max_grpc_connections),  # of each address
            ("grpc.max_concurrent_streams", section.max_grpc_streams),
        ],
        shares_port=section.shares_ports,
        interceptors=[Reception(access, [SERVICE_NAME], section.body_timeout_s, section.max_receiving)],
    )
    for exposed in filter(is_exposed, (section.address, section.http_address)):
        if not access.needs_key:
            log.warning("whoever reaches this address is served: there are no API keys", address=exposed)
    journal = Journal()
    admission = Admission(journal, section.max_num_waiting, section.max_num_waiting_tokens)

    async def set_serving(is_connected: bool) -> None:
        await server.set_serving(is_connected and not admission.is_draining)

    dense = DensePool(config.dense.address, config.peers, journal, set_serving, section.num_dense_streams)
    names = ModelNames(
        tuple(dict.fromkeys(section.served_model_names)) or (config.model.name or path.resolve().name,),
        section.accept_any_model_name,
        str(path),
    )
    frontend = Frontend(
        names,
        eos_token_ids,
        section.max_n,
        section.max_logprobs,
        section.strict_max_tokens,
        tokenizer,
        journal,
        dense,
        metrics,
        access,
        admission,
        section.queue_timeout_s,
        tracer,
        section.max_answers,
        section.max_request_logprobs,
    )
    siblings = Siblings(section.sibling_addresses, section.max_message_bytes)
    servicer = GatewayServicer(frontend, section.slow_reader_timeout_s, siblings)
    gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server.server)
    worker_load = WorkerLoad(config.dense.address, config.attention.address, config.peers)
    app = build_app(frontend, section, registry, worker_load)
    http_server = HttpServer(app, section, tls)
    address = await server.start()
    http_address = ""

    async def on_stall(stall: stall_pb2.Stall | None) -> None:
        dense.stall = stall
        await server.set_stall(stall)

    stall_timeout_s = config.watchdog.stall_timeout_s
    dense_progress = DenseProgress(config.dense.address, config.peers, journal, dense, stall_timeout_s)
    watchdog = Watchdog("gateway", dense_progress.progress, on_stall, stall_timeout_s)

    async def announce() -> None:
        log.info("waiting for the dense worker", address=address, dense_address=config.dense.address)
        await dense.wait_connected()
        log.info("serving", address=address, http_address=http_address, model=str(path))

    async def drained() -> None:
        await drain.wait()
        log.info("draining", num_open=admission.num_open, drain_timeout_s=section.drain_timeout_s)
        admission.refuse_all()
        await server.set_serving(False)
        num_left = await admission.wait_closed(section.drain_timeout_s)
        log.info("drained", num_left=num_left)

    try:
        http_address = await http_server.start()
        await run_until(
            drained(),
            dense.run(),
            access.run(),
            dense_progress.run(),
            watchdog.run(),
            measure_loop_delay(metrics),
            announce(),
        )
    finally:  # the stream has ended by now, and the dense worker drops all sequences of this gateway
        journal.shut(PeerError("the gateway is shutting down"))
        await http_server.stop(STOP_GRACE_S)
        await worker_load.close()
        await server.stop(STOP_GRACE_S)
        tokenizer.close()


def _milliseconds(seconds: float) -> int:
    """For gRPC, which has 32 bits for it and takes the largest for no limit."""
    return min(int(1e3 * seconds), MAX_INT)
