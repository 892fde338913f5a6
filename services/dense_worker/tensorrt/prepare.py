"""Makes TensorRT ready for a model: its plans before the weights are in memory, and a backend with them afterwards.

With `dense.backend` "auto", what keeps TensorRT from running is logged, and the worker runs torch.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch

from services.common.config import DenseSection, ModelSection
from services.common.errors import ConfigError, TwostrokeError
from services.common.resolve import ResolvedModel
from services.dense_worker.backends.torch_on_device import torch_backend
from services.dense_worker.model.model_weights import ModelWeights
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

log = structlog.get_logger()

# What keeps TensorRT from running. With `dense.backend` "auto" the worker runs torch then.
_FAILURES = (TwostrokeError, torch.OutOfMemoryError, OSError)


@dataclass(frozen=True, slots=True)
class TensorRTPlans:
    """A TensorRT, and its plans of a model."""

    api: TensorRT
    gpu: Gpu
    cache: EnginePlanCache
    plans: EnginePlans


def prepare_tensorrt(
    section: DenseSection,
    source: ModelSection,
    model: ResolvedModel,
    limits: Limits,
    report: Callable[[str], None],
) -> TensorRTPlans | None:
    """Builds the plans that are missing. None: torch runs the model.

    Arguments and errors are those of `prepare_backend`.
    """
    gpu, start_s = current_gpu(model.device), time.monotonic()
    try:
        api = _usable_tensorrt(gpu, model)
    except ConfigError as error:
        if section.backend == "tensorrt":
            raise ConfigError(f"dense.backend is 'tensorrt', but {error}") from error
        log.info("dense backend is torch", reason=str(error))
        return None
    profiles = parse_profiles(section.profiles)
    check_cover(profiles, limits)
    import_s = time.monotonic() - start_s
    try:
        with on_device(model.device):
            plans = _find_or_build(section, source, model, limits, profiles, api, gpu, report)
    except _FAILURES as error:
        _log_fallback(section, error)
        return None
    seconds = round(time.monotonic() - start_s, 2)
    log.info("TensorRT plans ready", import_seconds=round(import_s, 2), seconds=seconds)
    return plans


def load_tensorrt_backend(
    found: TensorRTPlans,
    section: DenseSection,
    model: ResolvedModel,
    limits: Limits,
    weights: ModelWeights,
    *,
    takes_vectors: bool,
) -> TensorRTBackend | None:
    """The backend of these plans. None: they cannot be loaded or run, and torch runs the model.

    `takes_vectors`: in place of embeddings, which only torch does.
    """
    try:
        with on_device(model.device):
            backend = _load(found, section, model, limits, weights, takes_vectors=takes_vectors)
    except _FAILURES as error:
        _log_fallback(section, error)
        return None
    log.info("dense backend is TensorRT", version=found.api.name, gpu=found.gpu.name, num_sms=found.gpu.num_sms)
    return backend


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


def _load(
    found: TensorRTPlans,
    section: DenseSection,
    model: ResolvedModel,
    limits: Limits,
    weights: ModelWeights,
    *,
    takes_vectors: bool,
) -> TensorRTBackend:
    start_s, free_before = time.monotonic(), free_bytes(model.device)
    segments = TensorRTSegments(found.api, found.plans, weights, model.config, limits, current_stream)
    synchronize()  # the contexts were set up on this thread's stream, and will run on the engine's
    log.info(
        "TensorRT engines loaded",
        seconds=round(time.monotonic() - start_s, 2),
        device_bytes=free_before - free_bytes(model.device),
    )
    if section.backend == "tensorrt" and not takes_vectors:
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


def _log_fallback(section: DenseSection, error: Exception) -> None:
    """Logs why the backend is torch; raises the error if TensorRT was asked for."""
    if section.backend == "tensorrt":
        raise error
    log.warning("dense backend is torch", reason=str(error).splitlines()[0])
