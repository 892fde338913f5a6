"""Chooses the DenseBackend once, at start, by the config and the machine."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from services.common.batch_buckets import token_buckets
from services.common.config import DenseSection, ModelSection
from services.common.errors import ConfigError, TwostrokeError
from services.common.families.shape import Activation
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.batch_invariant.check import check_batch_invariance
from services.dense_worker.batch_invariant.torch_operations import BatchInvariantTorchOperations
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear
from services.dense_worker.kernels.linear.linear import PlainWeight
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.model.weights import empty_weights
from services.dense_worker.parameters import parts_of_type
from services.dense_worker.ranks.shard_backend import leading_backend
from services.dense_worker.tensorrt.api import INSTALL, TensorRT, is_installed, load_tensorrt, require
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.build_options import PROGRAM
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache, EnginePlans
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.files.network_record import NetworkRecord
from services.dense_worker.tensorrt.gpu import Gpu, current_gpu, current_stream, free_bytes, on_device, synchronize
from services.dense_worker.tensorrt.measure import (
    known_measurements,
    measure_segments,
    store_measurements,
    time_on_gpu,
)
from services.dense_worker.tensorrt.profiles import Limits, Profile, check_cover, parse_profiles

if TYPE_CHECKING:
    from services.dense_worker.backends.cuda_backend import CudaBackend

log = structlog.get_logger()

# What keeps TensorRT from running. With `dense.backend` "auto" the worker runs torch then.
_FAILURES = (TwostrokeError, torch.OutOfMemoryError, OSError)


@dataclass(frozen=True, slots=True)
class SelectedBackend:
    """A dense backend with its name."""

    name: str
    backend: DenseBackend
    before_capture: Callable[[int], None] | None = None  # to be called for a number of rows before a graph is captured


@dataclass(frozen=True, slots=True)
class TensorRTPlans:
    """A TensorRT, and its plans of a model."""

    api: TensorRT
    gpu: Gpu
    cache: EnginePlanCache
    plans: EnginePlans


@dataclass(frozen=True, slots=True)
class PreparedBackend:
    """The choice of a backend, made before the weights are in memory."""

    section: DenseSection
    model: ResolvedModel
    limits: Limits  # the scheduler's
    tensorrt: TensorRTPlans | None  # None: torch
    takes_vectors: bool  # in place of embeddings, which only torch does

    def load(self, weights: ModelWeights, lora: LoraStore | None = None) -> SelectedBackend:
        """The backend with its weights, and the adapters that it adds.

        If TensorRT cannot load or run its plans, it is torch for `dense.backend` "auto", and the log says why;
        otherwise raises the error.
        """
        found = self.tensorrt
        if found is not None:
            try:
                with on_device(self.model.device):
                    backend = self._load_tensorrt(found, weights)
            except _FAILURES as error:
                _log_fallback(self.section, error)
            else:
                num_sms = found.gpu.num_sms
                log.info("dense backend is TensorRT", version=found.api.name, gpu=found.gpu.name, num_sms=num_sms)
                return SelectedBackend(found.api.name, backend)
        if self.model.rank.count > 1:
            return SelectedBackend("torch", leading_backend(weights, self.model, self.limits.num_tokens, lora))
        backend = torch_backend(
            weights,
            self.model.config,
            self.limits.num_tokens,
            lora,
            is_deterministic=self.section.deterministic,
            rows_of_graphs=token_buckets(self.limits.num_rows, self.limits.num_tokens),
        )
        return SelectedBackend("torch", backend, backend.choose_products)

    def _load_tensorrt(self, found: TensorRTPlans, weights: ModelWeights) -> TensorRTBackend:
        section, model, limits = self.section, self.model, self.limits
        start_s, free_before = time.monotonic(), free_bytes(model.device)
        segments = TensorRTSegments(found.api, found.plans, weights, model.config, limits, current_stream)
        synchronize()  # the contexts were set up on this thread's stream, and will run on the engine's
        log.info(
            "TensorRT engines loaded",
            seconds=round(time.monotonic() - start_s, 2),
            device_bytes=free_before - free_bytes(model.device),
        )
        if section.backend == "tensorrt" and not self.takes_vectors:
            return TensorRTBackend(segments)
        by_torch = torch_backend(weights, model.config, limits.num_tokens)
        if section.backend == "tensorrt":
            return TensorRTBackend(segments, by_torch)
        measured = known_measurements(found.plans, limits)
        if measured is None and section.build == "auto":
            backends = {"tensorrt": segments, "torch": by_torch}
            measured = measure_segments(backends, model.config, model.dtype, model.device, limits, time_on_gpu)
            store_measurements(found.cache, found.plans, measured)
        if measured is None:
            reason = "the plans have not been measured, and dense.build is 'never': the build command measures them"
            log.warning("TensorRT runs every size", reason=reason)
        return TensorRTBackend(segments, by_torch, measured)


def prepare_backend(
    section: DenseSection,
    source: ModelSection,
    model: ResolvedModel,
    limits: Limits,
    report: Callable[[str], None],
    *,
    heads: str | None = None,
    takes_vectors: bool = False,
) -> PreparedBackend:
    """Resolves `dense.backend`, and builds the TensorRT plans that are missing.

    Called before the weights are loaded, because a build needs the GPU's memory, too. `source` says where the model
    is from, `limits` are the scheduler's, and `report` receives lines about the progress of builds. `heads`: the
    method of speculation whose heads read the model's hidden states, if there is one. `takes_vectors`: steps have some
    in place of embeddings; then torch is beside TensorRT.

    `auto` is torch if there is no GPU, no TensorRT for the GPU and the model's dtype, or no plan that can be had, and
    the log says so; otherwise the faster of the two, for each segment and size. Raises ConfigError, naming what is
    missing, if `dense.backend` is "tensorrt" and cannot be had, CapacityError if the disk has no space for a plan; and
    ConfigError if the profiles are malformed or end below the limits, or if a GPU cannot run the model's experts.
    """
    if section.deterministic:
        check_batch_invariance(model)
    if model.device.type != "cpu":
        _check_experts(model)
    tensorrt = None
    lack = _lack_of_tensorrt(section, heads)
    if lack is not None:
        if section.backend == "tensorrt":
            raise ConfigError(f"{lack}: set dense.backend to torch")
        if section.backend == "auto":
            log.info("dense backend is torch", reason=lack)
    elif section.backend != "torch":
        gpu, start_s = current_gpu(model.device), time.monotonic()
        try:
            api = _usable_tensorrt(gpu, model)
        except ConfigError as error:
            if section.backend == "tensorrt":
                raise ConfigError(f"dense.backend is 'tensorrt', but {error}") from error
            log.info("dense backend is torch", reason=str(error))
            return PreparedBackend(section, model, limits, None, takes_vectors)
        profiles = parse_profiles(section.profiles)
        check_cover(profiles, limits)
        import_s = time.monotonic() - start_s
        try:
            with on_device(model.device):
                tensorrt = _find_or_build(section, source, model, limits, profiles, api, gpu, report)
        except _FAILURES as error:
            _log_fallback(section, error)
        else:
            seconds = round(time.monotonic() - start_s, 2)
            log.info("TensorRT plans ready", import_seconds=round(import_s, 2), seconds=seconds)
    return PreparedBackend(section, model, limits, tensorrt, takes_vectors)


def _lack_of_tensorrt(section: DenseSection, heads: str | None) -> str | None:
    """What the config asks for and TensorRT does not have; None if there is nothing."""
    if section.deterministic:
        return "dense.deterministic is true, and TensorRT has kernels of its own for each range of numbers of tokens"
    if section.num_ranks > 1:
        return f"there are {section.num_ranks} ranks, and TensorRT has neither sums over ranks nor stages"
    if section.max_loras:
        return f"dense.max_loras is {section.max_loras}, but TensorRT has no adapters"
    if heads is not None:
        return f"scheduler.speculation is {heads!r}, but TensorRT gives no hidden states"
    return None


def _check_experts(model: ResolvedModel) -> None:
    """Raises ConfigError, naming what is not supported, if the kernels for CUDA do not run the model's experts."""
    config, instead = model.config, f"on {str(model.device)!r}: set dense.device to cpu"
    if config.parts.experts is None:
        return
    if config.parts.activation not in (Activation.SILU, Activation.GELU_TANH):
        raise ConfigError(f"experts with the activation {config.parts.activation.value!r} do not run {instead}")
    weights = empty_weights(config, model.dtype, torch.device("meta"))
    for linear in parts_of_type(ExpertLinear, weights.layers):
        if not isinstance(linear.weight, PlainWeight):
            _check_quantized_experts(model, linear)


def _check_quantized_experts(model: ResolvedModel, linear: ExpertLinear) -> None:
    from services.dense_worker.kernels.linear.quantized.quantized_gemv import why_not  # needs triton
    from services.dense_worker.kernels.triton_launch import KernelLauncher

    reason = why_not(KernelLauncher(model.device), linear.weight, linear.in_features, model.dtype)
    if reason is not None:
        method = "" if model.config.quantization is None else model.config.quantization.method
        what = f"quantized experts ({method}, {linear.name}: {type(linear.weight).__name__})"
        raise ConfigError(f"{what} do not run on {str(model.device)!r}, because {reason}: set dense.device to cpu")


def _log_fallback(section: DenseSection, error: Exception) -> None:
    """Logs why the backend is torch; raises the error if TensorRT was asked for."""
    if section.backend == "tensorrt":
        raise error
    log.warning("dense backend is torch", reason=str(error).splitlines()[0])


def torch_backend(
    weights: ModelWeights,
    config: ModelConfig,
    max_num_tokens: int,
    lora: LoraStore | None = None,
    *,
    is_deterministic: bool = False,
    rows_of_graphs: Sequence[int] = (),
) -> TorchBackend | CudaBackend:
    """The fastest backend without TensorRT on the device of `weights`; if `is_deterministic`, a batch-invariant one."""
    if weights.device.type == "cpu":
        return TorchBackend(weights, (BatchInvariantTorchOperations if is_deterministic else TorchOperations)(lora))
    from services.dense_worker.backends.cuda_backend import CudaBackend  # needs triton

    return CudaBackend(
        weights, config, max_num_tokens, lora, is_deterministic=is_deterministic, rows_of_graphs=rows_of_graphs
    )


def _usable_tensorrt(gpu: Gpu | None, model: ResolvedModel) -> TensorRT:
    """TensorRT, if it can run this model here. Raises ConfigError, naming what is missing."""
    if gpu is None:
        install = "" if is_installed() else f"; {INSTALL}"
        raise ConfigError(
            f"TensorRT runs on a CUDA device, and the dense worker's device is {str(model.device)!r}{install}"
        )
    if model.config.parts.latent is not None:
        raise ConfigError(f"latent attention ({model.config.family!r}) runs only with dense.backend 'torch'")
    if model.config.encoder is not None:
        raise ConfigError(f"cross attention ({model.config.family!r}) runs only with dense.backend 'torch'")
    if model.config.parts.experts is not None:
        raise ConfigError(f"mixtures of experts ({model.config.family!r}) run only with dense.backend 'torch'")
    api = load_tensorrt()
    api.check_gpu(gpu)
    api.check_dtype(model.dtype)
    require("onnx")
    return api


def _find_or_build(
    section: DenseSection,
    source: ModelSection,
    model: ResolvedModel,
    limits: Limits,
    profiles: Sequence[Profile],
    api: TensorRT,
    gpu: Gpu,
    report: Callable[[str], None],
) -> TensorRTPlans:
    # Imported here, because a worker with torch does not need the packages of requirements-export.txt.
    from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
    from services.dense_worker.tensorrt.onnx_segments import export_networks

    cache = EnginePlanCache(section.plan_dir.expanduser())
    record = NetworkRecord(cache.directory, model.config, model.dtype)
    command = build_command(section, source, model, limits)
    export = partial(export_networks, model.config, model.dtype)
    builder = EnginePlanBuilder(api, gpu, profiles, cache, limits)
    plans = builder.find_recorded_or_build(record, export, model.dtype, command, report)
    return TensorRTPlans(api, gpu, cache, plans)


def build_command(
    section: DenseSection, source: ModelSection, model: ResolvedModel, limits: Limits
) -> str | None:
    """The command, for a shell, that builds what a worker with this config looks for; None: the worker may build it.

    Every setting that a plan depends on is there, so that the command needs no config.
    """
    if section.build != "never":
        return None
    arguments = [
        *("--model", source.path.absolute()),
        *("--load-format", source.load_format),
        *("--dtype", str(model.dtype).removeprefix("torch.")),
        *("--profiles", section.profiles),
        *("--max-num-batched-tokens", limits.num_tokens),
        *("--max-num-seqs", limits.num_rows),
        *("--quantization", section.quantization),
        *("--device", model.device),
        *("--output-dir", section.plan_dir.expanduser().absolute()),
    ]
    if source.num_layers is not None:
        arguments += ["--num-layers", source.num_layers]
    is_checkout = (Path(__file__).parents[3] / "pyproject.toml").is_file()
    program = ["python", "-m", PROGRAM] if is_checkout else ["twostroke", "build-engines"]
    return shlex.join([*program, *map(str, arguments)])
