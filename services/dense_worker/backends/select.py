"""Chooses the DenseBackend once, at start, by the config and the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from services.common.batch_buckets import token_buckets
from services.common.config import DenseSection, ModelSection
from services.common.errors import ConfigError
from services.common.families.shape import Activation
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.torch_on_device import torch_backend
from services.dense_worker.batch_invariant.check import check_batch_invariance
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear
from services.dense_worker.kernels.linear.linear import PlainWeight
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import empty_weights
from services.dense_worker.parameters import parts_of_type
from services.dense_worker.ranks.shard_backend import leading_backend
from services.dense_worker.tensorrt.prepare import TensorRTPlans, load_tensorrt_backend, prepare_tensorrt
from services.dense_worker.tensorrt.profiles import Limits

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SelectedBackend:
    """A dense backend with its name."""

    name: str
    backend: DenseBackend
    before_capture: Callable[[int], None] | None = None  # to be called for a number of rows before a graph is captured


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
        if self.tensorrt is not None:
            by_tensorrt = load_tensorrt_backend(
                self.tensorrt, self.section, self.model, self.limits, weights, takes_vectors=self.takes_vectors
            )
            if by_tensorrt is not None:
                return SelectedBackend(self.tensorrt.api.name, by_tensorrt)
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
        tensorrt = prepare_tensorrt(section, source, model, limits, report)
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
