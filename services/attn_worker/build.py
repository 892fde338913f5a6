"""Builds the engine for the attention worker's device: cache size, backend and layer runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import grpc
import structlog
import torch

from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.make_spec import StepLimits, check_host_memory, make_cache_spec, one_block_spec
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.tiers.block_copier import BlockCopier, CpuBlockCopier
from services.attn_worker.cache.tiers.host_tier import HostTier
from services.attn_worker.cache.tiers.pinned_file import PinnedFile
from services.attn_worker.cache.tiers.region import TierRegion
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.kv_events.kv_events import KVEvents, ReportedPool, ReportedPrefixCache
from services.attn_worker.layers import AttentionBackend, BackendSetup, CapturableAttention
from services.attn_worker.layers.attention_among_others import AttentionAmongOthers
from services.attn_worker.layers.backends import torch_backend, triton_backend
from services.attn_worker.layers.batch_invariant.torch_attention import BatchInvariantTorchAttention
from services.attn_worker.layers.select import select_backend
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.moved_blocks import MovedBlocks
from services.attn_worker.rehearsal import Rehearsal
from services.attn_worker.runner.lane_runners import CudaLaneRunner, TurnLayerRunner
from services.attn_worker.runner.layer_runner import EagerLayerRunner, LayerRunner, TakeExtraRows
from services.attn_worker.split_context.parted_attention import PartedTorchAttention
from services.attn_worker.split_context.parted_cache import PartedKVCache
from services.common.attention.rope import length_dependent_beyond
from services.common.config import AttentionSection
from services.common.errors import CapacityError, ConfigError
from services.common.gpu import naming_what_needs_memory
from services.common.kv_cache.format import resolve_kv_cache_format
from services.common.kv_cache.sliding_window import SlidingWindow
from services.common.process import STANDBY_BYTES, available_bytes
from services.common.resolve import ResolvedModel, use_device

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Peers:
    """Other attention workers, from which sequences may come."""

    open_channel: Callable[[str], grpc.Channel]  # to the one at an address
    longest_copy_s: float  # that the blocks of a sequence may take


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What an attention worker is started with."""

    section: AttentionSection
    model: ResolvedModel  # the part of this worker's rank
    is_deterministic: bool = False  # attention has one order of additions
    takes_turns: bool = False  # the host tier is for sequences that leave the cache and come back
    pinned_tier: PinnedFile | None = None  # what `prepare_device` has returned
    kv_events: KVEvents | None = None  # what becomes of blocks is recorded there; None: nowhere
    peers: Peers | None = None  # None: no sequence may come from other attention workers


def build_engine(setup: AttentionSetup, limits: StepLimits, metrics: AttentionMetrics) -> AttentionEngine:
    """Allocates the KV cache and starts the engine. Raises `CapacityError` if the cache cannot hold one sequence."""
    section, model, peers = setup.section, setup.model, setup.peers
    use_device(model.device, section.num_threads)  # of the calling thread
    spec = make_cache_spec(section, model, limits)
    if model.device.type == "cpu":
        check_host_memory(section, spec)
    cache = _build_cache(setup, limits, spec)
    runner, storage = _build_runner(setup, limits, spec, cache.max_model_len, metrics)
    if section.host_kv_bytes:
        tier = _open_host_tier(setup, storage, cache.pools["blocks"])
        cache.use_tier(tier, copies_full_blocks=not setup.takes_turns)
    moved_blocks = rehearsal = None
    can_copy = model.device.type == "cpu" and section.enable_prefix_cache and cache.can_load_blocks
    if peers is not None and can_copy:
        identity = str(_block_identity(setup, storage))
        arguments = (storage, cache.pools["blocks"], identity, peers.open_channel, peers.longest_copy_s)
        moved_blocks = MovedBlocks(*arguments)
    if model.device.type == "cuda" and cache.can_load_blocks and not section.split_context:
        most_blocks = -(-cache.max_model_len // spec.block_size)
        own_cache = build_cache(most_blocks, spec.block_size, cache.max_model_len, enable_prefix_cache=False)
        rehearsal = Rehearsal(own_cache, runner)
    engine = AttentionEngine(cache, runner, metrics, moved_blocks, rehearsal)
    engine.start()
    return engine


def _build_cache(setup: AttentionSetup, limits: StepLimits, spec: KVCacheSpec) -> KVCache:
    """The sequences and blocks of the KV cache. Its blocks may bound the length of a sequence."""
    section, model, events = setup.section, setup.model, setup.kv_events
    window, num_sinks = spec.window, model.config.attention.num_sink_tokens
    if window is not None and window >= model.max_model_len:
        window, num_sinks = None, 0  # it hides nothing
    most = SlidingWindow(spec.block_size, window, num_sinks).max_blocks(limits.max_num_tokens)
    room = spec.num_blocks * spec.block_size
    if most is not None and most <= spec.num_blocks:  # a sequence of any length fits
        room = model.max_model_len
    if room < model.max_model_len:
        log.warning("the KV cache bounds a sequence", num_tokens=room, max_model_len=model.max_model_len)
    special: dict[str, Callable[..., Any]] = {}
    if events is not None:
        special = {
            "make_pool": partial(ReportedPool, events),
            "make_prefix_cache": partial(ReportedPrefixCache, events),
        }
    if section.split_context:
        special["make_cache"] = PartedKVCache
    return build_cache(
        spec.num_blocks,
        spec.block_size,
        min(model.max_model_len, room),
        enable_prefix_cache=section.enable_prefix_cache,
        length_dependent_beyond=length_dependent_beyond(model.config.rope),
        window=window,
        num_sink_tokens=num_sinks,
        window_blocks=spec.window_blocks,
        num_state_slots=spec.num_state_slots or None,
        sources=spec.source_slots,
        **special,
    )


def prepare_device(setup: AttentionSetup, limits: StepLimits) -> PinnedFile | None:
    """Makes the context of the model's GPU and loads its kernels, for a worker whose cache comes later.

    `limits`: of the steps that are to be expected. Returns the memory of the host tier, if there is one that can be
    pinned. Raises `CapacityError` if there is too little memory.
    """
    section, model = setup.section, setup.model
    if (free := available_bytes()) < STANDBY_BYTES:
        raise CapacityError(
            f"a standby of the attention worker needs {STANDBY_BYTES} bytes of host memory, {free} are available"
        )
    if model.device.type == "cpu":
        return None
    _load_kernels(setup, limits, decode_only=True)
    if model.config.recurrent_layers or model.config.encoder is not None:
        return None  # states, and the outputs of encoders, have no tier
    return PinnedFile.open(section.host_kv_path) if section.host_kv_bytes and section.host_kv_path else None


def load_kernels_ahead(setup: AttentionSetup, limits: StepLimits) -> None:
    """Compiles and loads the kernels of all steps on the model's GPU while the dense worker still loads its weights.

    Arguments and errors are those of `prepare_device`.
    """
    use_device(setup.model.device, setup.section.num_threads)  # of the calling thread
    _load_kernels(setup, limits, decode_only=False)


def _load_kernels(setup: AttentionSetup, limits: StepLimits, *, decode_only: bool) -> None:
    """Makes the GPU's context, and loads kernels: of steps that only decode, or of all."""
    from services.attn_worker.runner.cuda_layer_runner import compiling_together, load_kernels

    model = setup.model
    try:
        with naming_what_needs_memory("the context and the kernels of an attention worker"):
            torch.zeros(1, device=model.device)
            if model.config.recurrent_layers or model.config.encoder is not None:
                return  # states, and the outputs of encoders, take much memory
            spec = one_block_spec(setup.section, model)
            make_backend = _capturable_backend(setup.is_deterministic)

            def load() -> None:
                backend = make_backend(_backend_setup(model, spec, model.max_model_len, limits))
                load_kernels(backend, model, limits.max_num_seqs, 0 if decode_only else limits.max_num_tokens)

            with compiling_together():
                load()
            load()
    finally:
        torch.cuda.empty_cache()  # the cache of the worker that serves may need the memory


def check_host_tier(section: AttentionSection, model: ResolvedModel) -> None:
    """Raises ConfigError if a host tier is configured that the model's KV cache cannot have."""
    if not section.host_kv_bytes:
        return
    config, windows = model.config, model.config.sliding_windows
    window = max((each for each in windows if each is not None), default=model.max_model_len)
    obstacle = None
    if config.encoder is not None:
        obstacle = "has cross attention, whose keys and values have no copies there"
    elif config.recurrent_layers:
        obstacle = "has recurrent layers, whose states have no copies there"
    elif None not in windows and window < model.max_model_len:
        by = "by attention.window" if config.attention.num_sink_tokens else "of its own"
        obstacle = f"has windows of {window} tokens in all layers, {by}, behind which blocks are dropped"
    if obstacle is not None:
        raise ConfigError(
            f"attention.host_kv_bytes is {section.host_kv_bytes}, but {config.family!r} {obstacle}: set it to 0"
        )


def _open_host_tier(setup: AttentionSetup, storage: BlockStorage, findable: BlockPool) -> HostTier:
    section, identity = setup.section, _block_identity(setup, storage)
    region = TierRegion.open(
        section.host_kv_path, section.host_kv_bytes, 8 * storage.block_words, identity, pinned=setup.pinned_tier
    )
    try:
        with naming_what_needs_memory("the copies of the host tier"):
            copier = _make_block_copier(storage, region, setup.model.device)
    except BaseException:
        region.close()  # its lock would keep the next attempt from the file
        raise
    tier = HostTier(region, copier, findable, keeps_loaded=not setup.takes_turns)
    tier.start()
    log.info(
        "host tier",
        path=region.where,
        bytes=region.num_bytes,
        num_blocks=region.num_slots,
        num_used_blocks=tier.counts.num_used_slots,
        num_corrupt_blocks=tier.counts.num_corrupt_blocks,
        is_pinned=region.is_pinned,
    )
    return tier


def _block_identity(setup: AttentionSetup, storage: BlockStorage) -> dict[str, object]:
    """Equal where the bytes of a block mean the same."""
    section, model = setup.section, setup.model
    identity: dict[str, object] = {
        "model": model.config.fingerprint,
        "kv_cache_dtype": resolve_kv_cache_format(section, model),
        "block_size": section.block_size,
        "layout": blake2b(storage.layout.encode(), digest_size=16).hexdigest(),
    }
    if model.rank.count > 1:  # ranks may have the same shape, and have other heads or layers
        identity["rank"] = str(model.rank)
    if setup.is_deterministic:  # keys and values that were computed otherwise have other bits
        identity["deterministic"] = "true"
    return identity


def _make_block_copier(storage: BlockStorage, region: TierRegion, device: torch.device) -> BlockCopier:
    if device.type == "cpu":
        return CpuBlockCopier(storage, region.rows())
    from services.attn_worker.cache.tiers.cuda_block_copier import CudaBlockCopier

    return CudaBlockCopier(storage, region.rows(), device, are_pinned=region.is_pinned)


def _build_runner(
    setup: AttentionSetup, limits: StepLimits, spec: KVCacheSpec, max_model_len: int, metrics: AttentionMetrics
) -> tuple[LayerRunner, BlockStorage]:
    section, model = setup.section, setup.model
    backend_setup = _backend_setup(model, spec, max_model_len, limits)
    if select_backend(section, model) == "torch":
        make_torch: Callable[[BackendSetup], AttentionBackend] = torch_backend
        if section.split_context:
            make_torch = PartedTorchAttention
        if setup.is_deterministic:
            make_torch = BatchInvariantTorchAttention
        eager = make_torch(backend_setup)
        if limits.num_lanes == 1:
            return EagerLayerRunner(eager, spec.num_layers, _extra_rows_of(eager)), eager.storage
        shared = replace(backend_setup, storage=eager.storage)
        others = [make_torch(shared) for _ in range(1, limits.num_lanes)]
        return TurnLayerRunner([eager, *others], spec.num_layers, metrics.on_step), eager.storage
    from services.attn_worker.runner.cuda_layer_runner import CudaLayerRunner

    make_backend = _capturable_backend(setup.is_deterministic, section.split_context)

    def make_runner(backend: CapturableAttention) -> CudaLayerRunner:
        sizes = (spec.num_layers, limits.max_num_seqs)
        return CudaLayerRunner(
            backend,
            *sizes,
            _extra_rows_of(backend),
            captures_lazily=section.captures_lazily,
            has_other_lanes=limits.num_lanes > 1,
        )

    backend = make_backend(backend_setup)
    if limits.num_lanes == 1:
        return make_runner(backend), backend.storage
    shared = replace(backend_setup, storage=backend.storage)
    others = [make_backend(shared) for _ in range(1, limits.num_lanes)]
    return CudaLaneRunner([make_runner(each) for each in (backend, *others)]), backend.storage


def _backend_setup(model: ResolvedModel, spec: KVCacheSpec, max_model_len: int, limits: StepLimits) -> BackendSetup:
    sizes = max_model_len, limits.max_num_seqs, limits.max_num_tokens
    return BackendSetup(model.config, spec, model.dtype, model.device, *sizes)


def _extra_rows_of(backend: AttentionBackend) -> TakeExtraRows | None:
    return backend.others.take_extra_rows if isinstance(backend, AttentionAmongOthers) else None


def _capturable_backend(
    is_deterministic: bool, splits_context: bool = False
) -> Callable[[BackendSetup], CapturableAttention]:
    if splits_context:
        from services.attn_worker.split_context.parted_triton_attention import PartedTritonAttention  # needs triton

        return PartedTritonAttention
    if is_deterministic:
        from services.attn_worker.layers.batch_invariant.triton_attention import (
            BatchInvariantTritonAttention,  # needs triton
        )

        return BatchInvariantTritonAttention
    return triton_backend
