"""Chooses the attention backend at start, by the config and the machine."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Literal

import torch

from services.common.attention.rope import length_dependent_beyond
from services.common.config import AttentionSection
from services.common.errors import ConfigError
from services.common.kv_cache.format import KVCacheFormat, resolve_kv_cache_format
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel

BackendName = Literal["torch", "triton", "flashinfer"]

FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)  # its prefill kernels use 16-bit tensor cores
FLASHINFER_HEAD_DIMS = (64, 128, 256)

TRITON_MAX_LATENT_DIM = 512  # whose sums and keys fill an SM; no published model has more
TRITON_LATENT_SHARED_BYTES = 221 << 10  # that its programs need, from compute capability 9.0 on

FP8_CAPABILITY = (9, 0)  # of GPUs for which Triton converts e4m3 to bfloat16

_FLASHINFER = "flashinfer-python"
_FLASHINFER_VERSION = "0.5.3"  # `flashinfer_attention.py` depends on its workspace sizes


def select_backend(section: AttentionSection, model: ResolvedModel) -> BackendName:
    """Resolves `attention.backend`: `auto` is torch on a CPU and Triton on a GPU.

    Raises ConfigError, naming what is missing, if the backend cannot run this model here with its format of the KV
    cache.
    """
    kv_cache = resolve_kv_cache_format(section, model)
    by_default: BackendName = "torch" if model.device.type == "cpu" else "triton"
    name = by_default if section.backend == "auto" else section.backend
    try:
        _check(name, model, kv_cache)
    except ConfigError as error:
        raise ConfigError(f"attention.backend is {section.backend!r}, but {error}") from error
    return name


def _check(name: BackendName, model: ResolvedModel, kv_cache: KVCacheFormat) -> None:
    is_on_cpu = model.device.type == "cpu"
    if is_on_cpu != (name == "torch"):
        needed = "a CUDA device" if is_on_cpu else "the CPU alone"
        raise ConfigError(f"it runs on {needed}, and the attention worker's device is {str(model.device)!r}")
    if name != "torch":
        _check_ropes(model.config)
        attention = model.config.attention
        if attention.num_sink_tokens and attention.value_dim is not None:
            raise ConfigError(
                f"its kernels of latent attention, as {model.config.family!r} has, lack attention.sink_tokens, which"
                " need attention.backend torch, on a CPU"
            )
    if name == "flashinfer":
        _check_options(model.config)
        _check_flashinfer(model, kv_cache)
    if name == "triton" and model.config.attention.value_dim is not None:
        _check_latent(model, model.config.attention.value_dim)
    if name == "triton" and kv_cache != "model" and model.config.head_dim % 4:
        raise ConfigError(
            "its kernels read a KV cache of 8 bits in pairs: head_dim must be a multiple of 4, it is"
            f" {model.config.head_dim}, and the KV cache is {kv_cache}"
        )
    if name == "triton" and kv_cache == "fp8":
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


def _check_options(config: ModelConfig) -> None:
    """Refuses by name what the model's attention needs and FlashInfer's kernels, as we call them, do not do."""
    options, ropes = config.attention, set(config.layer_ropes)
    needed = {
        "gated delta layers": bool(config.gated_delta_layers),
        "layers with heads of their own": bool(options.layer_heads),
        "latent attention": options.value_dim is not None,
        "a soft cap of scores": options.softcap is not None,
        "ALiBi": bool(options.alibi_slopes),
        "a scale of scores of its own": options.scale is not None,
        "rotation of neighbouring pairs": options.rotates_pairs,
        "different rotary embeddings in its layers": len(ropes) > 1,
        "learned sinks": options.has_sinks,
        "attention.sink_tokens": options.num_sink_tokens > 0,
        "layers without rotation": None in ropes,
        "rotation of a part of each head": any(rope and rope.rotary_dim != config.head_dim for rope in ropes),
    }
    missing = [what for what, is_needed in needed.items() if is_needed]
    if missing:
        raise ConfigError(f"its kernels lack what {config.family!r} needs: {', '.join(missing)}")


def _check_flashinfer(model: ResolvedModel, kv_cache: KVCacheFormat) -> None:
    if kv_cache != "model":
        raise ConfigError(
            f"it is given keys and values in the model's dtype only, and the KV cache is {kv_cache}: set"
            " attention.kv_cache_dtype to model, or attention.backend to triton"
        )
    if model.dtype not in FLASHINFER_DTYPES:
        raise ConfigError(f"its kernels compute in bfloat16 or float16, and model.dtype is {_name(model.dtype)}")
    if model.config.head_dim not in FLASHINFER_HEAD_DIMS:
        raise ConfigError(
            f"its kernels are made for heads of 64, 128 or 256 dimensions, and the model's have {model.config.head_dim}"
        )
    install = f"`pip install {_FLASHINFER}=={_FLASHINFER_VERSION}`"
    try:
        version = importlib.metadata.version(_FLASHINFER)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{_FLASHINFER} is not installed: {install}") from error
    if version != _FLASHINFER_VERSION:
        raise ConfigError(f"{_FLASHINFER} {version} is installed, not {_FLASHINFER_VERSION}: {install}")
    try:
        importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:  # a missing package, or an unusable cache
        raise ConfigError(f"{_FLASHINFER} cannot be imported: {error}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
