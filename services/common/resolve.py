"""Resolves at start what the config leaves open: model, element type, device. Both workers use it in the same way."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from services.common.config import AttentionSection, ModelSection
from services.common.errors import ConfigError
from services.common.kv_cache.scheme import read_kv_cache_scheme
from services.common.kv_cache.streaming import with_streaming
from services.common.max_model_len import resolve_max_model_len
from services.common.model_config import ModelConfig, load_model_config
from services.common.rank import ALONE, Rank

_GPU_PACKAGES = {"triton": "triton", "cuda.bindings": "cuda-bindings"}  # name of the package, by module
_MIN_CAPABILITY = (8, 0)  # the kernels use bfloat16 on the tensor cores and asynchronous copies


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model with everything that config and hardware decide."""

    config: ModelConfig
    dtype: torch.dtype  # of weights and activations
    device: torch.device
    max_model_len: int  # maximum number of tokens, prompt and output together
    kv_cache_scheme: str | None = None  # see `read_kv_cache_scheme`
    rank: Rank = ALONE  # whose part of it is computed


def resolve_model(
    section: ModelSection,
    device_name: str,
    attention: AttentionSection | None = None,
    shape: ModelConfig | None = None,
) -> ResolvedModel:
    """`shape`: what config.json says; None: it is read here.

    Raises `ModelError` or `ConfigError`, naming value and limit.
    """
    if shape is None:
        shape = load_model_config(section.path, section.num_layers)
    config = with_streaming(shape, attention or AttentionSection())
    device = resolve_device(device_name)
    return ResolvedModel(
        config,
        resolve_dtype(section.dtype, config, device),
        device,
        resolve_max_model_len(section, config),
        read_kv_cache_scheme(section.path),
    )


def resolve_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU if there is one, else the CPU.

    Raises `ConfigError` if the GPU does not exist or is too old, or if a package that it needs is not installed.
    """
    num_gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if index >= num_gpus:
        raise ConfigError(f"device {name!r} was asked for, torch {torch.__version__} sees {num_gpus} CUDA devices")
    capability = torch.cuda.get_device_capability(index)
    if capability < _MIN_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name(index)}, device {name!r}, has compute capability {_dotted(capability)}, "
            f"{_dotted(_MIN_CAPABILITY)} or later is needed"
        )
    if torch.version.cuda is None:
        raise ConfigError(f"device {name!r} needs a torch for CUDA, torch {torch.__version__} is for something else")
    for module, package in _GPU_PACKAGES.items():
        if not _is_installed(module):
            raise ConfigError(f"device {name!r} needs {package}, which is not installed; torch's CUDA build brings it")
    return torch.device("cuda", index)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The element type of a name. `auto` is the checkpoint's type on a GPU, and float32, the fastest, on a CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.checkpoint_dtype
    return getattr(torch, name)


def use_device(device: torch.device, num_threads: int | None) -> None:
    """Makes the device current and sets the number of CPU threads of one torch operation.

    Default: all cores but one. The other worker spins on that one.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) - 1))
