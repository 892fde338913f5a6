"""`AttentionWorker`: an attention worker with all its parts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from services.attn_worker.build import (
    AttentionSetup,
    Peers,
    check_host_tier,
    load_kernels_ahead,
    prepare_device,
)
from services.attn_worker.cache.make_spec import StepLimits
from services.attn_worker.kv_events.kv_events import KVEvents
from services.attn_worker.layers.select import select_backend
from services.attn_worker.servicer import AttentionServicer
from services.channel.region import remove_stale_regions
from services.common.child_options import ChildOptions
from services.common.config import AttentionSection, Config
from services.common.errors import CapacityError
from services.common.kv_cache.format import with_own_layers
from services.common.rank import Rank, seam_config
from services.common.ready_shape import read_decoder
from services.common.resolve import resolve_model, use_device
from services.common.several_ranks import check_ranks
from services.common.split_context import check_split_context
from services.pb import attn_pb2_grpc
from services.rpc.client import open_blocking_channel, read_peer_tls
from services.rpc.metrics import new_registry, serve_late_metrics, serving_metrics
from services.rpc.server import STOP_GRACE_S, Service, make_peer_server, run_together
from services.rpc.tracing import tracing

log = structlog.get_logger()

SERVICE_NAME = "twostroke.attn.v1.AttentionWorker"
METRICS = "attention.metrics_address"


class AttentionWorker(Service):
    """Has a server for dense workers, and for the launcher."""

    def __init__(self, config: Config, options: ChildOptions) -> None:
        super().__init__()
        self._config = config
        self._options = options
        self._registry = new_registry("attention")

    async def start(self) -> None:
        """Starts serving dense workers. The KV cache is allocated when the first one attaches."""
        config, section, options = self._config, self._config.attention, self._options
        address = None if options.has_predecessor else section.metrics_address
        self._opened.enter_context(serving_metrics(address, self._registry, METRICS))
        tracer = self._opened.enter_context(tracing(config.tracing, "attention"))
        server = make_peer_server(section.address, SERVICE_NAME, config.peers, setting="attention.address")
        shape = await read_decoder(options.shape_file, config.model)
        model = resolve_model(config.model, section.device, section, shape)
        rank = Rank.of(config.dense, options.rank)
        check_ranks(config, model.config)
        check_split_context(config, model, is_dense=False)
        section = with_own_layers(section, model, rank)
        model = replace(model, config=seam_config(model.config, rank), rank=rank)
        # So that a model that no kernels can run ends the start.
        backend = select_backend(section, model, is_deterministic=config.dense.deterministic)
        check_host_tier(section, model)
        use_device(model.device, section.num_threads)
        has_streams = options.standby is not None or options.is_restarted
        if has_streams and config.scheduler.num_lanes > 1:  # they would wait for all graphs
            section = section.model_copy(update={"captures_lazily": True})
        takes_turns = config.scheduler.policy == "take_turns"
        setup = AttentionSetup(section, model, config.dense.deterministic, takes_turns)
        limits = StepLimits(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
        loading = None
        if options.standby is not None:
            setup = replace(setup, pinned_tier=prepare_device(setup, limits))
        elif model.device.type == "cuda" and not options.is_restarted:  # the dense worker loads its weights meanwhile
            loading = asyncio.create_task(_run_ahead(partial(load_kernels_ahead, setup, limits)))
        if removed := remove_stale_regions():
            log.info("removed shared memory of dead processes", names=",".join(removed))
        tls, max_message_bytes = read_peer_tls(config.peers), config.peers.max_message_bytes
        open_peer = partial(open_blocking_channel, max_message_bytes=max_message_bytes, tls=tls)
        peers = Peers(open_peer, config.channel.wait_timeout_s)
        self._servicer = servicer = AttentionServicer(
            replace(setup, kv_events=self._report_kv_events(section), peers=peers),
            secrets.randbits(64),
            config.channel.wait_timeout_s,
            self._registry,
            tracer,
            config.watchdog.stall_timeout_s,
            server.set_stall,
            loading,
            max_message_bytes=max_message_bytes,
        )
        attn_pb2_grpc.add_AttentionWorkerServicer_to_server(servicer, server.server)
        self._opened.push_async_callback(asyncio.to_thread, servicer.stop)
        self._opened.push_async_callback(server.stop, STOP_GRACE_S)
        self._opened.callback(servicer.abort)  # the engine thread may wait for the dense worker
        address = await server.start()
        await server.set_serving(True)
        log.info("serving", address=address, device=str(model.device), dtype=str(model.dtype), backend=backend)

    async def run(self) -> None:
        """Runs until cancelled. Raises errors that a new attachment cannot cure: a bug, or a failed GPU."""
        late_address = self._config.attention.metrics_address if self._options.has_predecessor else None
        try:
            await run_together(
                self._servicer.watchdog.run(),
                self._servicer.wait_failure(),
                self._servicer.wait_loaded(),
                serve_late_metrics(late_address, self._registry, METRICS, self._servicer.is_used),
            )
        except asyncio.CancelledError:  # the worker was asked to stop, which is no crash
            await self._servicer.leave(STOP_GRACE_S)
            raise

    def _report_kv_events(self, section: AttentionSection) -> KVEvents | None:
        if section.kv_events is None:
            return None
        from services.attn_worker.kv_events.publisher import Publisher  # needs packages that are an extra

        events = KVEvents()
        publisher = Publisher(events, section.kv_events, section.kv_events_replay, section.kv_events_topic)
        self._opened.callback(publisher.close)
        publisher.start(has_predecessor=self._options.has_predecessor)
        return events


async def _run_ahead(load: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(load)
    except CapacityError as error:  # the memory may be free later
        log.warning("no kernels are loaded ahead", reason=str(error))
