"""Builds the engine for the attention worker's device: cache size, backend, and how layers are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from services.attn_worker.backends import CapturableAttention
from services.attn_worker.backends.rope import length_dependent_beyond
from services.attn_worker.backends.select import BackendName, select_backend
from services.attn_worker.backends.torch_attention import TorchAttention
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.runner.layer_runner import EagerLayerRunner, LayerRunner
from services.common.config import AttentionSection
from services.common.errors import CapacityError
from services.common.resolve import ResolvedModel, use_device

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Largest step that the dense worker will plan."""

    max_num_seqs: int
    max_num_tokens: int


def build_engine(
    section: AttentionSection, model: ResolvedModel, limits: StepLimits, metrics: AttentionMetrics
) -> AttentionEngine:
    """Allocates the KV cache, and starts the engine. Raises `CapacityError` when it cannot hold a single sequence."""
    config = model.config
    use_device(model.device, section.num_threads)  # of the calling thread
    num_blocks = count_blocks(section, model)
    room = num_blocks * section.block_size
    max_model_len = min(model.max_model_len, room)
    if room < model.max_model_len:
        log.warning("the KV cache bounds a sequence", num_tokens=room, max_model_len=model.max_model_len)
    cache = KVCache(
        num_blocks,
        section.block_size,
        max_model_len,
        enable_prefix_cache=section.enable_prefix_cache,
        length_dependent_beyond=length_dependent_beyond(config.rope),
    )
    engine = AttentionEngine(cache, _build_runner(section, model, limits, num_blocks, max_model_len), metrics)
    engine.start()
    return engine


def count_blocks(section: AttentionSection, model: ResolvedModel) -> int:
    """As configured, or as many as fit: in `kv_cache_bytes` on a CPU, in what is free on a GPU."""
    config, device = model.config, model.device
    block_bytes = 2 * config.num_layers * section.block_size * config.kv_size * model.dtype.itemsize
    if device.type == "cpu":
        room, source = section.kv_cache_bytes, "attention.kv_cache_bytes"
    else:
        room = int(torch.cuda.mem_get_info(device)[0] * section.kv_cache_memory_fraction)
        source = f"attention.kv_cache_memory_fraction {section.kv_cache_memory_fraction} of free memory"
    num_blocks = section.num_blocks or room // block_bytes
    if num_blocks < 1:
        raise CapacityError(
            f"the KV cache has room for no block: {source} is {room} bytes, "
            f"one block of {section.block_size} tokens takes {block_bytes}"
        )
    if num_blocks * block_bytes > room and device.type != "cpu":
        raise CapacityError(f"{num_blocks} blocks need {num_blocks * block_bytes} bytes, {source} is {room}")
    log.info("KV cache", num_blocks=num_blocks, block_size=section.block_size, bytes=num_blocks * block_bytes)
    return num_blocks


def _build_runner(
    section: AttentionSection, model: ResolvedModel, limits: StepLimits, num_blocks: int, max_model_len: int
) -> LayerRunner:
    config = model.config
    shape = (config, num_blocks, section.block_size, model.dtype, model.device, max_model_len)
    name = select_backend(section, model)
    if name == "torch":
        return EagerLayerRunner(TorchAttention(*shape), config.num_layers)
    from services.attn_worker.runner.cuda_layer_runner import CudaLayerRunner

    make_backend = _capturable_backend(name)
    backend = make_backend(*shape, max_num_seqs=limits.max_num_seqs, max_num_tokens=limits.max_num_tokens)
    return CudaLayerRunner(
        backend, config.num_layers, limits.max_num_seqs, captures_lazily=section.captures_lazily
    )


def _capturable_backend(name: BackendName) -> Callable[..., CapturableAttention]:
    if name == "flashinfer":
        from services.attn_worker.backends.flashinfer_attention import FlashInferAttention  # needs flashinfer

        return FlashInferAttention
    from services.attn_worker.backends.triton_attention import TritonAttention  # needs triton

    return TritonAttention
