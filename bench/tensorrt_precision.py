"""How precisely TensorRT computes: its errors and torch's, both against the same computation in a wider dtype.

The error of an output is its difference from the wide computation. Torch in the same dtype rounds every intermediate
value. TensorRT may round other values instead, and its error may be twice torch's. TensorRT 8.6 has no setting for the
dtype in which a product is summed, and may sum in float16. Its limit is twice the error of torch with products whose
sums are rounded to float16 after every 16 terms, as tensor cores round them (`summed_error` in the results).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.parameters import tensors_by_name, with_tensors

MAX_RATIO = 2.0  # of TensorRT's error and the error of torch
TERMS_PER_SUM = 16  # products that a tensor core adds before it rounds the sum
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True, slots=True)
class Error:
    """The difference of a tensor from the exact one."""

    greatest: float  # as a fraction of the greatest exact value
    rms: float  # root of the mean square, as a fraction of the exact values' own

    def __str__(self) -> str:
        return f"{self.greatest:.1e} {self.rms:.1e}"

    def is_within(self, limit: Error) -> bool:
        """False also for NaN."""
        return self.greatest <= limit.greatest and self.rms <= limit.rms

    def times(self, factor: float, at_least: float) -> Error:
        """A limit: this error times `factor`, or `at_least`."""
        return Error(max(factor * self.greatest, at_least), max(factor * self.rms, at_least))


def error_of(found: torch.Tensor, exact: torch.Tensor) -> Error:
    """NaN if `found` has a value that is not finite."""
    exact = exact.to(torch.float64)
    difference = found.to(torch.float64) - exact
    greatest = (difference.abs().max() / exact.abs().max()).item()
    rms = (difference.square().mean() / exact.square().mean()).sqrt().item()
    return Error(greatest, rms)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The errors of one value for one number of tokens."""

    name: str  # such as "middle.qkv"
    num_tokens: int
    tensorrt: Error
    torch: Error
    summed: Error | None  # of torch with products summed in float16; None where TensorRT does not do that
    dtype: torch.dtype

    @property
    def limit(self) -> Error:
        """One rounding of the greatest value is within the limit: it cannot be avoided."""
        base = self.torch if self.summed is None else self.summed
        return base.times(MAX_RATIO, at_least=torch.finfo(self.dtype).eps)

    @property
    def is_good(self) -> bool:
        return self.tensorrt.is_within(self.limit)

    @property
    def ratio(self) -> float:
        """Of TensorRT's error to torch's."""
        return self.tensorrt.rms / self.torch.rms if self.torch.rms else float(self.tensorrt.rms > 0)

    def as_json(self) -> dict[str, Any]:
        errors = {"error": self.tensorrt, "torch_error": self.torch, "summed_error": self.summed}
        described = {name: None if error is None else str(error) for name, error in errors.items()}
        return {"tokens": self.num_tokens, "ratio": round(self.ratio, 2), **described}


def worst_by_name(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """For each name the comparison with the greatest ratio, those beyond their limits first."""
    worst: dict[str, Comparison] = {}
    for each in comparisons:
        known = worst.get(each.name)
        if known is None or (known.is_good, -known.ratio) > (each.is_good, -each.ratio):
            worst[each.name] = each
    return list(worst.values())


def print_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Errors as fractions: the greatest one, and the root of the mean square."""
    print(f"  {'value':<34}{'tokens':>7}  {'TensorRT':<17}{'torch':<17}{'summed in float16':<19}{'ratio':>6}")
    for each in worst_by_name(comparisons):
        summed = "" if each.summed is None else str(each.summed)
        mark = "" if each.is_good else "  beyond the limit"
        row = f"{each.name:<34}{each.num_tokens:>7}  {each.tensorrt!s:<17}{each.torch!s:<17}{summed:<19}"
        print(f"  {row}{each.ratio:>6.2f}{mark}", flush=True)


def in_dtype(weights: ModelWeights, dtype: torch.dtype) -> ModelWeights:
    """A copy of the weights in another dtype."""

    def convert(part: Any) -> Any:
        return with_tensors(part, {name: tensor.to(dtype) for name, tensor in tensors_by_name(part).items()})

    layers = tuple(map(convert, weights.layers))
    return replace(weights, embedding=convert(weights.embedding), layers=layers, head=convert(weights.head))


class SummingInFloat16(TorchOperations):
    """Torch's operations, with products summed as float16 tensor cores with float16 accumulators sum them."""

    def linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        weight = linear.weight.matrix.data
        total = summed_in_float16(x, weight)
        if linear.bias is not None:
            total = total + linear.bias.data
        return total if out is None else out.copy_(total)


def summed_in_float16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, k], weight [m, k] -> [n, m]; the sum is rounded to x's dtype after each TERMS_PER_SUM terms."""
    total = torch.zeros(len(x), len(weight), dtype=x.dtype, device=x.device)
    pairs = zip(x.split(TERMS_PER_SUM, dim=1), weight.split(TERMS_PER_SUM, dim=1), strict=True)
    for x_part, weight_part in pairs:
        total = torch.addmm(total.float(), x_part.float(), weight_part.float().T).to(x.dtype)
    return total


def summing_backend(weights: ModelWeights) -> TorchBackend:
    """A TorchBackend with these operations."""
    backend = TorchBackend(weights)
    backend._operations = SummingInFloat16()
    return backend
