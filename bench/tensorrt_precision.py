"""How precisely TensorRT computes: its errors and torch's, both against the same computation in a wider dtype.

The error of an output is its difference from the wide computation. Torch in the same dtype rounds every intermediate
value. TensorRT may round other values instead, and its error may be twice torch's. TensorRT 8.6 has no setting for the
dtype in which a product is summed, and may sum in float16. Its limit is twice the error of torch with products whose
sums are rounded to float16 after every 16 terms, as tensor cores round them (`summed_error` in the results).

The own error of an operation is computed from the inputs that TensorRT gave this operation, so it does not contain the
errors of earlier operations. It shows which operation loses precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch.nn import functional as F

from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.linear import Linear
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.parameters import tensors_by_name, with_tensors
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.profiles import Profile, profile_index

MAX_RATIO = 2.0  # of TensorRT's error and the error of torch
# The same for a single operation. A fused kernel takes its inputs before they are rounded, so that an own error also
# contains the roundings of two inputs: √3 times torch's. And the greatest of few errors scatters.
MAX_OWN_RATIO = 3.0
TERMS_PER_SUM = 16  # products that a tensor core adds before it rounds the sum
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
_DTYPES = {TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}
Tensors = Mapping[str, torch.Tensor]


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

    name: str  # such as "middle.qkv", or "middle: product qkv_weight"
    num_tokens: int
    tensorrt: Error
    torch: Error
    summed: Error | None  # of torch with products summed in float16; None where TensorRT does not do that
    dtype: torch.dtype
    max_ratio: float = MAX_RATIO

    @property
    def limit(self) -> Error:
        """One rounding of the greatest value is within the limit: it cannot be avoided."""
        base = self.torch if self.summed is None else self.summed
        return base.times(self.max_ratio, at_least=torch.finfo(self.dtype).eps)

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


class Probe:
    """A segment's network whose intermediate values are outputs, too, and a plan of it.

    The plan is not the one that serves, since TensorRT cannot fuse beyond an output. Its products are the same.
    """

    def __init__(self, network: bytes, dtype: torch.dtype) -> None:
        model = onnx.shape_inference.infer_shapes(onnx.load_from_string(network))
        self.graph = model.graph
        self.dtype = dtype
        self.names = _values_to_compare(model.graph, dtype)  # what each value is, by its name
        known = {value.name for value in model.graph.output}
        types = {value.name: value for value in model.graph.value_info}
        model.graph.output.extend(types[name] for name in self.names if name not in known)
        self.network = model.SerializeToString(deterministic=True)

    def run(
        self, api: TensorRT, plan: bytes, profiles: Sequence[Profile], size: int, feeds: Tensors, stream: int
    ) -> dict[str, torch.Tensor]:
        """All outputs for `feeds`, the activations and weights by name. `size` chooses the profile."""
        engine = api.load("the probe", plan)
        device = next(iter(feeds.values())).device
        memory = torch.empty(max(engine.context_bytes(len(profiles)), 512), dtype=torch.uint8, device=device)
        context = engine.create_context(profile_index(profiles, size), memory, stream)
        tensors = dict(feeds)
        for name, kind in engine.tensors().items():
            if name not in feeds:
                shape = [size if length == -1 else length for length in kind.shape]
                tensors[name] = torch.empty(shape, dtype=kind.dtype, device=device)
            elif -1 in kind.shape:
                context.set_input_shape(name, tuple(feeds[name].shape))
            context.set_tensor_address(name, tensors[name].data_ptr())
        if not context.execute_async_v3(stream):
            raise RuntimeError(f"TensorRT cannot run the probe: {engine.take_errors()}")
        if device.type == "cuda":
            torch.cuda.synchronize()  # before the context goes
        return {name: tensor for name, tensor in tensors.items() if name not in feeds}

    def compare(self, segment: str, size: int, feeds: Tensors, found: Tensors, may_sum: bool) -> list[Comparison]:
        """The own error of each operation between two compared values, from the inputs that it had."""
        wide = WIDER[self.dtype]
        exact = self._evaluate(feeds, found, wide, _multiply)
        by_torch = self._evaluate(feeds, found, None, _multiply)
        summed = self._evaluate(feeds, found, None, _multiply_summed) if may_sum else None
        return [
            Comparison(
                f"{segment}: {what}",
                size,
                error_of(found[name], exact[name]),
                error_of(by_torch[name], exact[name]),
                None if summed is None else error_of(summed[name], exact[name]),
                self.dtype,
                MAX_OWN_RATIO,
            )
            for name, what in self.names.items()
        ]

    def _evaluate(
        self, feeds: Tensors, found: Tensors, wide: torch.dtype | None, multiply: Callable[..., torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Each compared value, computed from the `found` ones before it; in dtype `wide` if one is given."""

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(wide) if wide is not None and tensor.is_floating_point() else tensor

        values = {name: widen(tensor) for name, tensor in feeds.items()}
        device = next(iter(feeds.values())).device
        for constant in self.graph.initializer:
            tensor = torch.tensor(numpy_helper.to_array(constant).tolist(), device=device)
            values[constant.name] = widen(tensor.to(_DTYPES.get(constant.data_type, torch.int64)))
        computed: dict[str, torch.Tensor] = {}
        for node in self.graph.node:
            attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            if node.op_type == "Gemm":
                outputs = [multiply(*(values[name] for name in node.input))]
            else:
                outputs = _OPERATIONS[node.op_type]([values[name] for name in node.input], attributes)
            for name, value in zip(node.output, outputs, strict=True):
                values[name] = computed[name] = widen(value)
                if name in self.names:
                    values[name] = widen(found[name])
        return computed


def _values_to_compare(graph: onnx.GraphProto, dtype: torch.dtype) -> dict[str, str]:
    """The values between norms, products, residuals and SiLUs, by name, with what each one is."""
    constants = {constant.name for constant in graph.initializer}
    inputs = {value.name for value in graph.input}
    multiplied = {node.input[0] for node in graph.node if node.op_type == "Gemm"} - inputs
    outputs = {value.name for value in graph.output}
    found: dict[str, str] = {}
    since: set[str] = set()  # operators since the last compared value
    for node in graph.node:
        since.add(node.op_type)
        is_residual = node.op_type == "Add" and constants.isdisjoint(node.input)
        output = node.output[-1]
        if node.op_type == "Gemm":
            found[output] = f"product {node.input[1]}"
        elif is_residual:
            found[output] = "residual"
        elif output in multiplied | outputs:
            found[output] = "silu" if "Sigmoid" in since else "norm" if "ReduceMean" in since else "copy"
        else:
            continue
        number = sum(what.split(" #")[0] == found[output] for what in found.values())
        found[output] += f" #{number}" if number > 1 else ""
        since.clear()
    return found


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _multiply_summed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    total = summed_in_float16(x, weight)
    return total if bias is None else total + bias


_OPERATIONS: dict[str, Callable[[list[torch.Tensor], dict[str, Any]], Sequence[torch.Tensor]]] = {
    "Add": lambda x, _: [x[0] + x[1]],
    "Cast": lambda x, options: [x[0].to(_DTYPES[options["to"]])],
    "Concat": lambda x, options: [torch.cat(x, dim=options["axis"])],
    "Gather": lambda x, options: [x[0].index_select(options["axis"], x[1])],
    "Mul": lambda x, _: [x[0] * x[1]],
    "ReduceMean": lambda x, options: [x[0].mean(tuple(options["axes"]), keepdim=bool(options["keepdims"]))],
    "Reciprocal": lambda x, _: [x[0].reciprocal()],
    "Reshape": lambda x, _: [x[0].reshape(x[1].tolist())],
    "Sigmoid": lambda x, _: [x[0].sigmoid()],
    "Split": lambda x, options: x[0].split(x[1].tolist(), dim=options["axis"]),
    "Sqrt": lambda x, _: [x[0].sqrt()],
}
