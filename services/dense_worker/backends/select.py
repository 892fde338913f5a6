"""Chooses the DenseBackend once, at start, by the config and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.config import DenseSection
from services.common.errors import ConfigError
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.tensorrt.api import INSTALL, TensorRT, is_installed, load_tensorrt
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.gpu import Gpu, current_gpu, current_stream, on_device, synchronize
from services.dense_worker.tensorrt.measure import (
    known_measurements,
    measure_segments,
    store_measurements,
    time_on_gpu,
)
from services.dense_worker.tensorrt.optional_packages import require
from services.dense_worker.tensorrt.profiles import Limits, check_cover, parse_profiles

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SelectedBackend:
    """A dense backend with its name."""

    name: str
    backend: DenseBackend


def select_backend(
    section: DenseSection, model: ResolvedModel, weights: ModelWeights, path: Path, limits: Limits
) -> SelectedBackend:
    """Resolves `dense.backend`; loads the TensorRT plans that it needs and builds missing ones.

    `auto` is torch if there is no GPU, or no TensorRT for the GPU and the model's dtype, and the log says so; otherwise
    the faster of the two, for each segment and size. `path` is the model's directory, `limits` are the scheduler's.
    Raises ConfigError, naming what is missing, if TensorRT is configured but not usable; if the profiles end below the
    limits; and if plans are missing while `dense.build` is "never".
    """
    if section.backend != "torch":
        gpu = current_gpu(model.device)
        try:
            api = _usable_tensorrt(gpu, model)
        except ConfigError as error:
            if section.backend == "tensorrt":
                raise ConfigError(f"dense.backend is 'tensorrt', but {error}") from error
            log.info("dense backend is torch", reason=str(error))
        else:
            with on_device(model.device):
                backend = _tensorrt_backend(section, model, weights, path, limits, api, gpu)
            log.info("dense backend is TensorRT", version=api.name, gpu=gpu.name, num_sms=gpu.num_sms)
            return SelectedBackend(api.name, backend)
    return SelectedBackend("torch", torch_backend(weights, model.config, limits.num_tokens))


def torch_backend(weights: ModelWeights, config: ModelConfig, max_num_tokens: int) -> DenseBackend:
    """The fastest backend without TensorRT on the device of `weights`."""
    if weights.device.type == "cpu":
        return TorchBackend(weights)
    from services.dense_worker.backends.cuda_backend import CudaBackend  # needs triton

    return CudaBackend(weights, config, max_num_tokens)


def _usable_tensorrt(gpu: Gpu | None, model: ResolvedModel) -> TensorRT:
    """TensorRT, if it can run this model here. Raises ConfigError, naming what is missing."""
    if gpu is None:
        install = "" if is_installed() else f"; {INSTALL}"
        raise ConfigError(
            f"TensorRT runs on a CUDA device, and the dense worker's device is {str(model.device)!r}{install}"
        )
    api = load_tensorrt()
    api.check_gpu(gpu)
    api.check_dtype(model.dtype)
    require("onnx")
    return api


def _tensorrt_backend(
    section: DenseSection,
    model: ResolvedModel,
    weights: ModelWeights,
    path: Path,
    limits: Limits,
    api: TensorRT,
    gpu: Gpu,
) -> TensorRTBackend:
    # Imported here, because a worker with torch does not need the packages of requirements-export.txt.
    from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
    from services.dense_worker.tensorrt.onnx_segments import export_networks

    profiles = parse_profiles(section.profiles)
    check_cover(profiles, limits)
    cache = EnginePlanCache(section.plan_dir.expanduser())
    command = f"python -m services.dense_worker.tensorrt.build --model {path} --output-dir {cache.directory}"
    plans = EnginePlanBuilder(api, gpu, profiles, cache).find_or_build(
        export_networks(model.config, model.dtype),
        model.dtype,
        None if section.build == "auto" else command,
        lambda line: log.info("plan", progress=line),
    )
    tensorrt_segments = TensorRTSegments(
        api,
        {name: cached.plan for name, cached in plans.items()},
        profiles,
        weights,
        model.config,
        limits,
        current_stream,
    )
    synchronize()  # the contexts were set up on this thread's stream, and will run on the engine's
    if section.backend == "tensorrt":
        return TensorRTBackend(tensorrt_segments)
    by_torch = torch_backend(weights, model.config, limits.num_tokens)
    measured = known_measurements(plans, limits)
    if measured is None and section.build == "auto":
        backends = {"tensorrt": tensorrt_segments, "torch": by_torch}
        measured = measure_segments(backends, model.config, model.dtype, model.device, limits, time_on_gpu)
        store_measurements(cache, plans, measured)
    return TensorRTBackend(tensorrt_segments, by_torch, measured)
