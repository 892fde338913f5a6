"""An attention worker put together from its parts: started, serving, stopped in reverse."""

from __future__ import annotations

import asyncio
import secrets

import structlog
from prometheus_client import CollectorRegistry

from services.attn_worker.backends.select import select_backend
from services.attn_worker.servicer import AttentionServicer
from services.channel.shm_cleanup import remove_stale_regions
from services.common.config import Config
from services.common.resolve import resolve_model, use_device
from services.pb import attn_pb2_grpc
from services.rpc.client import read_peer_tls
from services.rpc.metrics import new_registry, serving_metrics
from services.rpc.server import GrpcServer, run_together
from services.rpc.tracing import Tracer, tracing

log = structlog.get_logger()

SERVICE_NAME = "twostroke.attn.v1.AttentionWorker"
STOP_GRACE_S = 1.0


async def serve(config: Config) -> None:
    """Opens everything, serves until cancelled, closes everything."""
    registry = new_registry("attention")
    with (
        serving_metrics(config.attention.metrics_address, registry),
        tracing(config.tracing, "attention") as tracer,
    ):
        await serve_watched(config, registry, tracer)


async def serve_watched(config: Config, registry: CollectorRegistry, tracer: Tracer) -> None:
    """See `serve`."""
    section = config.attention
    tls = read_peer_tls(config.peers)
    server = GrpcServer(section.address, [SERVICE_NAME], config.peers.max_message_bytes, tls and tls.files)
    model = resolve_model(config.model, section.device)
    backend = select_backend(section, model)  # here too, so that a backend that is not there ends the start
    use_device(model.device, section.num_threads)
    if removed := remove_stale_regions():
        log.info("removed shared memory of dead processes", names=",".join(removed))
    servicer = AttentionServicer(
        section,
        model,
        secrets.randbits(64),
        config.channel.wait_timeout_s,
        registry,
        tracer,
        config.watchdog.stall_timeout_s,
        server.set_stall,
    )
    attn_pb2_grpc.add_AttentionWorkerServicer_to_server(servicer, server.server)
    try:
        address = await server.start()
        await server.set_serving(True)
        log.info("serving", address=address, device=str(model.device), dtype=str(model.dtype), backend=backend)
        await run_together(servicer.watchdog.run(), servicer.wait_failure())
    except asyncio.CancelledError:  # asked to stop: no crash
        await servicer.leave(STOP_GRACE_S)
        raise
    finally:
        servicer.abort()
        await server.stop(STOP_GRACE_S)
        await asyncio.to_thread(servicer.stop)
