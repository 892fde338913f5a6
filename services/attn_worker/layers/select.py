"""Chooses the attention backend at start, by the machine."""

from __future__ import annotations

from typing import Literal

import torch

from services.common.attention.rope import length_dependent_beyond
from services.common.config import AttentionSection
from services.common.errors import ConfigError
from services.common.kv_cache.format import KVCacheFormat, resolve_kv_cache_format
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel

BackendName = Literal["torch", "triton"]

TRITON_MAX_LATENT_DIM = 512  # whose sums and keys fill an SM; no published model has more
TRITON_LATENT_SHARED_BYTES = 221 << 10  # that its programs need, from compute capability 9.0 on

FP8_CAPABILITY = (9, 0)  # of GPUs for which Triton converts e4m3 to bfloat16


def select_backend(section: AttentionSection, model: ResolvedModel, *, is_deterministic: bool = False) -> BackendName:
    """Torch on a CPU, Triton on a GPU.

    Raises ConfigError, naming what is missing, if the kernels cannot run this model here with its format of the KV
    cache, or not with one order of additions if `is_deterministic`.
    """
    kv_cache = resolve_kv_cache_format(section, model)
    if is_deterministic and (reason := _why_not_deterministic(section, model, kv_cache)) is not None:
        raise ConfigError(f"dense.deterministic is true, but {reason}")
    if model.device.type == "cpu":
        return "torch"
    try:
        _check_kernels(model, kv_cache)
    except ConfigError as error:
        raise ConfigError(f"attention runs on {str(model.device)!r}, but {error}") from error
    return "triton"


def _why_not_deterministic(section: AttentionSection, model: ResolvedModel, kv_cache: KVCacheFormat) -> str | None:
    """Why the bits of a row would depend on the step; None if they do not."""
    config, family = model.config, repr(model.config.family)
    if config.recurrent_layers:
        return f"{family} has recurrent layers, whose recurrence is computed in chunks that begin where a step does"
    if config.attention.value_dim is not None:
        return f"{family} has latent attention, whose kernels have several orders of additions"
    if config.encoder is not None:
        return f"{family} has cross attention, which is computed for all rows of a source together"
    if config.attention.num_sink_tokens:
        return "attention.sink_tokens has kernels with several orders of additions"
    if model.device.type == "cpu":
        return None
    if kv_cache != "model":
        return f"the KV cache is {kv_cache}, on a GPU attention.kv_cache_dtype must be model"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"the model's dtype is {model.dtype}, on a GPU it must be bfloat16 or float16"
    return None


def _check_kernels(model: ResolvedModel, kv_cache: KVCacheFormat) -> None:
    """Refuses by name what the Triton kernels do not do."""
    _check_ropes(model.config)
    attention = model.config.attention
    if attention.value_dim is not None:
        if attention.num_sink_tokens:
            raise ConfigError(
                f"its kernels of latent attention, as {model.config.family!r} has, lack attention.sink_tokens, which"
                " need attention.device cpu"
            )
        _check_latent(model, attention.value_dim)
    if kv_cache != "model" and model.config.head_dim % 4:
        raise ConfigError(
            "its kernels read a KV cache of 8 bits in pairs: head_dim must be a multiple of 4, it is"
            f" {model.config.head_dim}, and the KV cache is {kv_cache}"
        )
    if kv_cache == "fp8":
        capability = torch.cuda.get_device_capability(model.device)
        if capability < FP8_CAPABILITY:
            name = torch.cuda.get_device_name(model.device)
            raise ConfigError(
                f"its kernels convert FP8 from compute capability 9.0 on, {name} has {capability[0]}.{capability[1]}:"
                " attention.kv_cache_dtype can be int8 or model there"
            )


def _check_ropes(config: ModelConfig) -> None:
    """Refuses rotary embeddings that no table of angles can hold together."""
    ropes = {rope for rope in config.layer_ropes if rope is not None}
    if any(rope.axes for rope in ropes) and (len(ropes) > 1 or length_dependent_beyond(config.rope) is not None):
        raise ConfigError("its kernels rotate by three axes in all layers or none, and not by the length as well")
    lengths = sorted(rope.rope_type for rope in ropes if length_dependent_beyond(rope) is not None)
    if lengths and len(ropes) > 1:
        raise ConfigError(
            f"its kernels do not rotate by rope_type {lengths[0]!r} in some layers and otherwise in others"
        )


def _check_latent(model: ResolvedModel, rank: int) -> None:
    """Refuses latent vectors, or a GPU, for which the Triton kernels have no tiles."""
    if rank > TRITON_MAX_LATENT_DIM:
        raise ConfigError(
            f"its kernels hold at most {TRITON_MAX_LATENT_DIM} latent dimensions, {model.config.family!r} has"
            f" kv_lora_rank {rank}"
        )
    found = torch.cuda.get_device_properties(model.device).shared_memory_per_block_optin
    if found < TRITON_LATENT_SHARED_BYTES:
        raise ConfigError(
            f"its kernels for latent attention need {TRITON_LATENT_SHARED_BYTES} bytes of shared memory, "
            f"{torch.cuda.get_device_name(model.device)} has {found}"
        )
