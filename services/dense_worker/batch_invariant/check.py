"""What the dense worker cannot compute with `dense.deterministic`, by name."""

from __future__ import annotations

import torch

from services.common.errors import ConfigError
from services.common.quantization.schemes import Activations, Element
from services.common.resolve import ResolvedModel
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear
from services.dense_worker.kernels.linear.linear import (
    DTYPES_OF_16_BITS,
    MAX_IN_FEATURES,
    TILE_BYTES,
    Linear,
    PlainWeight,
)
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.model.expert_mlp import SharedExpert
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import empty_weights
from services.dense_worker.parameters import parts_of_type


def check_batch_invariance(model: ResolvedModel) -> None:
    """Raises ConfigError, which names the reason, if the bits of a row would depend on the other rows of a step."""
    weights = empty_weights(model.config, model.dtype, torch.device("meta"))
    reason = _why_not(model, weights)
    if reason is None and model.device.type != "cpu":
        reason = _why_not_on_gpu(model, weights)
    if reason is not None:
        raise ConfigError(f"dense.deterministic is true, but {reason}")


def _why_not(model: ResolvedModel, weights: ModelWeights) -> str | None:
    if model.config.parts.layer_inputs is not None:
        return f"{model.config.family!r} has inputs of each layer, whose products torch multiplies for all rows at once"
    if any(each.gate is not None for each in parts_of_type(SharedExpert, weights.layers)):
        return f"{model.config.family!r} has a gated shared expert, whose gate torch multiplies for all rows at once"
    return None


def _why_not_on_gpu(model: ResolvedModel, weights: ModelWeights) -> str | None:
    instead = "dense.device cpu and attention.device cpu have it"
    for experts in parts_of_type(ExpertLinear, weights.layers):
        if not isinstance(experts.weight, PlainWeight):
            format_name = type(experts.weight).__name__
            return f"{experts.name} is a {format_name}, the products of experts are those of 16 bits: {instead}"
    if model.dtype not in DTYPES_OF_16_BITS:
        return f"the model's dtype is {model.dtype}, its products need bfloat16 or float16: {instead}"
    found = torch.cuda.get_device_properties(model.device).shared_memory_per_block_optin
    if found < TILE_BYTES:  # GPUs that have so many also have the tensor cores of Hopper
        name = torch.cuda.get_device_name(model.device)
        return f"{name} has {found} bytes of shared memory for a program, its products need {TILE_BYTES}"
    for linear in parts_of_type(Linear, (weights.layers, weights.head)):
        if (lack := _why_no_product(linear)) is not None:
            return f"{linear.name} {lack}: {instead}"
    return None


def _why_no_product(linear: Linear) -> str | None:
    """Why `BatchInvariantLinear` does not multiply a layer; None if it does."""
    weight = linear.weight
    if isinstance(weight, PlainWeight):
        return None
    if not isinstance(weight, ScaledWeight) or weight.element is not Element.FP8:
        return f"is a {type(weight).__name__}, its products are those of 16 bits and of FP8 with a scale for each row"
    if weight.activations is not Activations.TOKEN:
        return f"has inputs quantized as {weight.activations.value!r}, its products need a scale for each token"
    if linear.in_features > MAX_IN_FEATURES:
        return f"has {linear.in_features} in_features, at most {MAX_IN_FEATURES} fit"
    return None
