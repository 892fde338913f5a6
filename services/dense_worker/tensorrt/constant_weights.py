"""Weights as constants of a plan, which TensorRT can lay out as it likes, instead of inputs.

Such a plan is built with any numbers, and each layer's engine gets the real ones after loading ("refit"). So one plan
still serves all layers, and other weights of the same shapes need no build.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_PERIOD = 4099  # of the random numbers; a prime, so that rows of a matrix differ


def make_constants(trt: Any, definition: Any, names: Iterable[str], dtypes: Mapping[Any, torch.dtype]) -> list[Any]:
    """Turns these inputs of a network into constants of the same names. The result must outlive the build.

    Their values are random: TensorRT might simplify zeros.
    """
    inputs = {tensor.name: tensor for tensor in map(definition.get_input, range(definition.num_inputs))}
    readers = _readers(definition)
    kept = []
    for name in names:
        tensor = inputs[name]
        shape = tuple(tensor.shape)
        numbers = _random_numbers(math.prod(shape), dtypes[tensor.dtype])
        weights = host_weights(trt, numbers)
        constant = definition.add_constant(shape, weights)
        definition.set_weights_name(weights, name)
        for layer, index in readers[name]:
            layer.set_input(index, constant.get_output(0))
        definition.remove_tensor(tensor)
        kept += [numbers, weights]
    return kept


def host_weights(trt: Any, tensor: torch.Tensor) -> Any:
    """TensorRT's view of a contiguous tensor on the CPU, which must outlive it."""
    if tensor.dtype == torch.bfloat16:  # numpy has none; versions with bfloat16 also accept an address
        return trt.Weights(trt.bfloat16, tensor.data_ptr(), tensor.numel())
    return trt.Weights(tensor.numpy())


def _readers(definition: Any) -> dict[str, list[tuple[Any, int]]]:
    """The layers that read each tensor, and at which of their inputs."""
    readers: dict[str, list[tuple[Any, int]]] = {}
    for layer in map(definition.get_layer, range(definition.num_layers)):
        for index in range(layer.num_inputs):
            tensor = layer.get_input(index)
            if tensor is not None:  # an optional input that is not used
                readers.setdefault(tensor.name, []).append((layer, index))
    return readers


def _random_numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    pattern = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)).to(dtype)
    return pattern.repeat(-(-count // _PERIOD))[:count]
