"""`Gateway`: a gateway with all its parts."""

from __future__ import annotations

import asyncio
import sys

import structlog
from prometheus_client.registry import Collector

from services.common.child_options import ChildOptions
from services.common.config import MAX_MESSAGE_BYTES, Config, api_keys_of_environment
from services.common.encoders.encoder_config import TextEncoderConfig, read_served_config
from services.common.errors import ModelError, PeerError
from services.common.json_files.processor_files import FEATURE_EXTRACTOR, no_processor, read_processor
from services.common.json_files.read_json import read_json
from services.common.model_config import ModelConfig
from services.common.pooling.architectures import has_language_head
from services.common.pooling.pooling_config import read_pooling
from services.common.process import collect_young
from services.common.shared_counts import Counts, SharedCounts
from services.common.vision.vision_config import VisionConfig, load_vision_config, why_blind
from services.gateway.access.access import Access
from services.gateway.access.admission import Admission
from services.gateway.access.reception import Reception
from services.gateway.access.weight_updates import WeightUpdates
from services.gateway.adapters.adapters import Adapters
from services.gateway.apis.app import DIALECTS, build_app
from services.gateway.apis.audio.routes import Speech
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.triton.inference import Triton
from services.gateway.apis.triton.servicer import TRITON_SERVICE_NAME, TritonServicer
from services.gateway.apis.twostroke.servicer import SERVICE_NAME, GatewayServicer
from services.gateway.core.request_service import RequestService
from services.gateway.http.envelope import fit_bodies
from services.gateway.http.server import HttpServer
from services.gateway.images.picture_reader import PictureReader, picture_text
from services.gateway.link.dense_pool import DensePool, DenseProgress
from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.link.journal import Journal
from services.gateway.link.worker_load import WorkerLoad
from services.gateway.metrics.all_processes import AllProcesses
from services.gateway.metrics.gateway_metrics import GatewayMetrics
from services.gateway.metrics.pool_metrics import PoolMetrics
from services.gateway.metrics.sglang_metrics import SglangMetrics
from services.gateway.metrics.vllm_metrics import AdapterUse, VllmMetrics
from services.gateway.peer_servicer import PEERS_SERVICE_NAME, PeerServicer
from services.gateway.request.model_limits import LocalModel, ModelNames
from services.gateway.request.prompt_embeds_reader import PromptEmbedsReader
from services.gateway.request.sampling_defaults import NO_DEFAULTS, SamplingDefaults, override, read_sampling_defaults
from services.gateway.request.source_reader import make_source_reader
from services.gateway.resources.memory_budget import MemoryBudget
from services.gateway.resources.open_files import fit_connections
from services.gateway.resume.registry import Registry
from services.gateway.resume.resume_metrics import ResumeMetrics
from services.gateway.resume.resumption import Resumption
from services.gateway.sound.sound_reader import SoundReader
from services.gateway.sound.speech_model import read_speech_model
from services.gateway.text.client_templates.client_templates import ClientTemplates
from services.gateway.text.grammar_trials import GrammarTrials
from services.gateway.text.read_chat import use_template_kwargs
from services.gateway.text.tokenizer import Tokenizer, load_tokenizer
from services.gateway.vectors.vectors import Vectors
from services.lora.shapes import adapted_shapes
from services.pb import gateway_pb2_grpc, gateway_peers_pb2_grpc, stall_pb2, triton_pb2_grpc
from services.rpc.metrics import new_registry, serving_metrics
from services.rpc.server import GrpcServer, Service, run_until
from services.rpc.spans import Tracer
from services.rpc.tls import TlsFiles, is_exposed, tls_files
from services.rpc.tracing import tracing
from services.rpc.watchdog import Watchdog

log = structlog.get_logger()

SERVICE_NAMES = [SERVICE_NAME, TRITON_SERVICE_NAME]
MAX_INT = 2**31 - 1
SWITCH_INTERVAL_S = 0.001  # after which a thread gives the event loop the interpreter lock; Python's default is 5 ms
LEAVE_GRACE_S = 1.0  # for the first request of clients that connected just before the gateway leaves a passed socket
STOP_GRACE_S = 1.0  # for clients to receive the error that ends their requests
_LOOP_DELAY_INTERVAL_S = 0.02


class Gateway(Service):
    """After `drain` is set, it refuses new requests and finishes running ones; then `run` returns."""

    def __init__(self, config: Config, drain: asyncio.Event, options: ChildOptions) -> None:
        super().__init__()
        self._config = config
        self._options = options
        self._drain = drain
        self._registry = new_registry("gateway")

    async def start(self) -> None:
        """Starts listening at both addresses; no request can run yet. Raises `ConfigError` or `ModelError`."""
        config = self._config
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        address = config.gateway.metrics_address
        self._opened.enter_context(serving_metrics(address, self._registry, "gateway.metrics_address"))
        tracer = self._opened.enter_context(tracing(config.tracing, "gateway"))
        model_config, is_dummy = read_served_config(config.model.path), config.model.load_format == "dummy"
        client_templates = None
        if config.gateway.trust_request_chat_template:
            client_templates = ClientTemplates()
            self._opened.push_async_callback(client_templates.close)
        tokenizer = load_tokenizer(
            config.model.path,
            is_optional=is_dummy,
            tool_parser=config.gateway.tool_parser,
            reasoning_parser=config.gateway.reasoning_parser,
            client_templates=client_templates,
            chat_template=config.gateway.chat_template,
        )
        self._opened.callback(tokenizer.close)
        use_template_kwargs(tokenizer, config.gateway.chat_template_kwargs)
        self._grammar_trials = GrammarTrials(
            {
                "path": str(config.model.path.resolve()),
                "vocab_size": model_config.vocab_size,
                "eos_token_ids": model_config.eos_token_ids,
                "is_optional": is_dummy,
            }
        )
        self._opened.push_async_callback(self._grammar_trials.close)
        vision = load_vision_config(config.model.path) if config.model.images else None
        if config.model.images and (lack := why_blind(config.model.path)) is not None:
            log.warning("the text part of the model is served alone", reason=lack)
        section = self._section = fit_bodies(fit_connections(config.gateway), sees_pictures=vision is not None)
        self._metrics = GatewayMetrics(self._registry)
        counts = self._counts = self._open_counts()
        self._access = Access(
            section.api_keys_file, api_keys_of_environment(), self._metrics.on_rejected, section.trusted_proxies, counts
        )
        self._pictures = None if vision is None else self._make_pictures(vision, tokenizer)
        tokenizer.compile_template(str(section.chat_template or config.model.path))
        self._journal = Journal(counts)
        self._memory = MemoryBudget(section.max_held_bytes, section.max_held_wait_s, section.max_held_waiting, counts)
        self._admission = Admission(self._journal, section.max_num_waiting, section.max_num_waiting_tokens, counts)
        self._dense = DensePool(
            config.dense.address, config.peers, self._journal, self._note_connection, section.num_dense_streams
        )
        self._metrics.watch(self._journal, self._dense)
        options = self._options
        peers = self._peers = GatewayPeers(options.peer_addresses, section.max_message_bytes, options.change_lock)
        service = self._service = self._make_request_service(tokenizer, model_config, tracer)
        self._speech = self._make_speech()
        self._vectors = Vectors(service, read_pooling(config.model), section.max_inputs)
        self._triton = Triton(service, peers, self._vectors)
        self._resumption = self._make_resumption() if section.resume else None
        self._measured = AllProcesses(self._registry, lambda: service.num_open_requests, peers, options.process_index)
        self._opened.push_async_callback(self._measured.close)
        if options.peer_address is not None:
            await self._listen_to_peers(options.peer_address)
        await service.adapters.load_configured(section.lora_modules)
        await service.adapters.load_recorded(self._access.key_names)
        await self._listen()

    async def run(self) -> None:
        """Serves until it has drained. Raises `PeerError` if no dense worker connects, or any error that ends it."""
        config = self._config
        stall_timeout_s = config.watchdog.stall_timeout_s
        progress = DenseProgress(config.dense.address, config.peers, self._journal, self._dense, stall_timeout_s)
        await run_until(
            self._drained(),
            self._dense.run(),
            self._access.run(),
            progress.run(),
            *([] if self._resumption is None else [self._resumption.run()]),
            Watchdog("gateway", progress.progress, self._note_stall, stall_timeout_s).run(),
            self._measure_loop_delay(),
            self._announce(),
        )

    async def _listen_to_peers(self, address: str) -> None:
        """Before adapters are loaded, so that no change of them is missed."""
        servicer = PeerServicer(self._service, self._triton, self._measured, self._resumption)
        server = GrpcServer(address, [PEERS_SERVICE_NAME], self._section.max_message_bytes)
        gateway_peers_pb2_grpc.add_GatewayPeersServicer_to_server(servicer, server.server)
        await server.start()
        self._opened.push_async_callback(server.stop, 0.0)

    def _open_counts(self) -> Counts:
        path = self._options.shared_counts
        return Counts() if path is None else SharedCounts(path, self._options.process_index)

    def _make_resumption(self) -> Resumption:
        process = self._options.peer_address or "gateway"  # without peers nobody else has this name
        registry = Registry(self._options.control_address, process, MAX_MESSAGE_BYTES)
        metrics, wait_ready = ResumeMetrics(self._registry), self._dense.wait_connected
        resumption = Resumption(self._section, self._memory, self._counts, registry, metrics, wait_ready)
        self._opened.push_async_callback(resumption.close)
        return resumption

    async def _listen(self) -> None:
        config, section, service = self._config, self._section, self._service
        tls = tls_files(section.tls_certificate, section.tls_key, section.tls_client_ca)
        self._server = self._make_server(tls)
        self._address = await self._server.start()
        self._opened.push_async_callback(self._server.stop, STOP_GRACE_S)
        launcher = self._options.control_address
        worker_load = WorkerLoad(config.dense.address, config.attention.address, config.peers, launcher)
        self._opened.push_async_callback(worker_load.close)
        pool_metrics = self._make_pool_metrics(worker_load)
        self._registry.register(pool_metrics)
        self._opened.callback(self._registry.unregister, pool_metrics)
        updates = WeightUpdates(section.weights_directory, section.weights_admins, launcher)
        background = BackgroundResponses(service)
        self._opened.push_async_callback(background.close)
        app = build_app(
            service,
            self._measured,
            worker_load,
            self._triton,
            updates,
            self._vectors,
            self._peers,
            background,
            self._resumption,
            self._speech,
        )
        is_shared, listener = self._options.shares_ports, self._options.http_listener
        self._http = HttpServer(
            app, section, tls, DIALECTS, announce=self._dense.announce, shares_port=is_shared, listener=listener
        )
        self._opened.push_async_callback(self._http.stop, STOP_GRACE_S)
        # Then the streams have ended, and the dense worker drops all sequences of this gateway.
        self._opened.callback(self._journal.shut, PeerError("the gateway is shutting down"))
        if listener is None:
            self._http_address = await self._http.start()

    def _make_pool_metrics(self, worker_load: WorkerLoad) -> Collector:
        config, name = self._config, self._service.names.first
        pool = PoolMetrics(worker_load, name)
        if config.metrics.compat == "none":
            return pool
        if config.metrics.compat == "sglang":
            return SglangMetrics(self._metrics, pool, name)
        max_loras, adapters = config.dense.max_loras, self._service.adapters

        def read_adapters() -> AdapterUse:
            running, waiting = self._journal.adapter_names()
            shared = set(adapters.shared_names)
            return AdapterUse(running & shared, waiting & shared)

        return VllmMetrics(self._registry, self._metrics, pool, name, max_loras, read_adapters)

    def _read_sampling_defaults(self) -> SamplingDefaults:
        found = NO_DEFAULTS
        if self._section.sampling_defaults == "model":
            found = read_sampling_defaults(self._config.model.path)
        found = override(found, self._section.sampling_overrides)
        if found:
            log.info("what requests sample with where they say nothing", **found)
        return found

    def _make_request_service(
        self, tokenizer: Tokenizer, model_config: ModelConfig | TextEncoderConfig, tracer: Tracer
    ) -> RequestService:
        section, model = self._section, self._config.model
        names = ModelNames(
            tuple(dict.fromkeys(section.served_model_names)) or (model.name or model.path.resolve().name,),
            section.accept_any_model_name,
            str(model.path),
        )
        prompt_embeds = None
        if section.enable_prompt_embeds:
            prompt_embeds = PromptEmbedsReader(model_config.embedding_size)
        shapes, sources = {}, None
        if not isinstance(model_config, TextEncoderConfig):
            shapes = adapted_shapes(model_config) if self._config.dense.max_loras else {}
            sources = make_source_reader(model.path, model_config)
        local_model = LocalModel(
            tokenizer,
            model_config.eos_token_ids,
            has_language_head(read_json(model.path / "config.json") or {}),
            prompt_embeds,
            sources,
            self._pictures,
            self._read_sampling_defaults(),
        )
        adapters = Adapters(
            names,
            shapes,
            model_config.embedding_size,
            self._config.dense.max_lora_rank,
            section.lora_directory,
            self._peers,
            section.adapter_admins,
        )
        return RequestService(
            section,
            local_model,
            adapters,
            self._journal,
            self._dense,
            self._metrics,
            self._access,
            self._admission,
            tracer,
            self._grammar_trials,
            self._memory,
        )

    def _make_pictures(self, vision: VisionConfig, tokenizer: Tokenizer) -> PictureReader:
        """What reads pictures, of a model that sees them."""
        if vision.tower is not None:
            tokenizer.use_pictures(picture_text(vision, tokenizer))
        reader = PictureReader(vision, self._section, tokenizer)
        self._opened.push_async_callback(reader.close)
        return reader

    def _make_speech(self) -> Speech | None:
        """What a model that reads sound needs; None for others. Raises ModelError if its files lack something."""
        sources = self._service.sources
        if sources is None or not sources.reads_sound:
            return None
        path = self._config.model.path
        if read_processor(path, FEATURE_EXTRACTOR) is None:
            raise ModelError(f"{path} has {no_processor(FEATURE_EXTRACTOR)}, which say how sound becomes features")
        reader = SoundReader(path, self._section.max_audio_seconds)
        self._opened.push_async_callback(reader.close)
        return Speech(read_speech_model(path), reader)

    def _make_server(self, tls: TlsFiles | None) -> GrpcServer:
        section, service = self._section, self._service
        for exposed in filter(is_exposed, (section.address, section.http_address)):
            if not self._access.needs_key:
                log.warning("whoever reaches this address is served: there are no API keys", address=exposed)
        server = GrpcServer(
            section.address,
            SERVICE_NAMES,
            section.max_message_bytes,
            tls,
            section.local_address,
            options=[
                # For the handshakes of TLS and HTTP/2; gRPC's own limit is two minutes.
                ("grpc.server_handshake_timeout_ms", _milliseconds(section.header_timeout_s)),
                ("grpc.max_connection_idle_ms", _milliseconds(section.grpc_idle_timeout_s)),
                ("grpc.max_allowed_incoming_connections", section.max_grpc_connections),  # of each address
                ("grpc.max_concurrent_streams", section.max_grpc_streams),
            ],
            shares_port=self._options.shares_ports,
            setting="gateway.address",
            interceptors=[
                Reception(
                    self._access,
                    SERVICE_NAMES,
                    section.body_timeout_s,
                    section.max_receiving,
                    self._memory,
                    service.heavy_work,
                )
            ],
        )
        servicer = GatewayServicer(service, self._peers, self._vectors, self._resumption)
        gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server.server)
        triton_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(TritonServicer(self._triton), server.server)
        return server

    async def _note_connection(self, is_connected: bool) -> None:
        await self._server.set_serving(is_connected and not self._admission.is_draining)

    async def _note_stall(self, stall: stall_pb2.Stall | None) -> None:
        self._dense.stall = stall
        await self._server.set_stall(stall)

    async def _announce(self) -> None:
        log.info("waiting for the dense worker", address=self._address, dense_address=self._config.dense.address)
        await self._dense.wait_connected()
        if self._drain.is_set():
            return
        if self._options.http_listener is not None:
            self._http_address = await self._http.start()  # until now clients have waited in the socket's queue
        log.info("serving", address=self._address, http_address=self._http_address, model=str(self._config.model.path))

    async def _drained(self) -> None:
        await self._drain.wait()
        if self._options.http_listener is not None:
            await self._http.leave(LEAVE_GRACE_S)
        log.info("draining", num_open=self._admission.num_open, drain_timeout_s=self._section.drain_timeout_s)
        self._admission.refuse_all()
        await self._server.set_serving(False)
        num_left = await self._admission.wait_closed(self._section.drain_timeout_s)
        log.info("drained", num_left=num_left)

    async def _measure_loop_delay(self) -> None:
        """Records how late each of many short sleeps ends, until cancelled: meanwhile no stream gets its tokens. Uses
        idle moments to collect garbage.
        """
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LOOP_DELAY_INTERVAL_S
            await asyncio.sleep(_LOOP_DELAY_INTERVAL_S)
            self._metrics.on_loop_delay(max(0.0, loop.time() - due))
            if not self._admission.num_open:
                collect_young()


def _milliseconds(seconds: float) -> int:
    """Milliseconds for gRPC, which uses 32 bits and treats the largest value as no limit."""
    return min(int(1e3 * seconds), MAX_INT)
