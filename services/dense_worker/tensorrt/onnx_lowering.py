"""Converts a graph of torch.export to ONNX nodes. Supports only the operators that the segments use."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

from services.common.errors import ConfigError
from services.dense_worker.kernels.linear.quantized.activations import RANGES
from services.dense_worker.tensorrt.api import FLOAT32_MARK

ONNX_DTYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}

# Of the weights of quantized layers. FP8 and INT8 are converted by QuantizeLinear and DequantizeLinear, UINT8 by casts.
CODE_DTYPES = {
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
}

Node = torch.fx.Node
_aten = torch.ops.aten


class Lowering:
    """The ONNX nodes and constants of a graph whose tensors have dtype `dtype` or a wider one.

    `inputs` and `outputs` name the graph's placeholders and results, in order. Other values keep torch's names, and a
    node is named after its operator and its value. Raises ConfigError, naming the operator, for one that is not known.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        dtype: torch.dtype,
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
    ) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        _drop_checks(graph)
        _drop_needless_casts(graph)
        _drop_what_quantizing_does(graph)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        results = next(node for node in graph.nodes if node.op == "output").args[0]
        self.results: list[torch.Tensor] = [node.meta["val"] for node in results]
        self._dtype = dtype
        self._names: dict[Node, str] = dict(zip(placeholders, inputs, strict=True))
        self._names |= zip(results, outputs, strict=True)
        for node in graph.nodes:
            if node.op == "call_function":
                if node.target not in _LOWERINGS:
                    raise ConfigError(f"the operator {node.target}, which the model uses, is not exported to ONNX")
                _LOWERINGS[node.target](self, node)

    def name(self, node: Node) -> str:
        """The ONNX name of the value of `node`."""
        return self._names.setdefault(node, node.name)

    def rename(self, node: Node, name: str) -> None:
        """Gives the value of `node` the name of an existing value."""
        assert node not in self._names, f"result {self._names[node]} is only another name of {name}"
        self._names[node] = name

    def emit(self, op: str, inputs: Sequence[str], node: Node, output: str = "", **attributes: Any) -> str:
        """Adds an operator that computes the value of `node`, or the intermediate value `output`. Returns its name."""
        output = output or self.name(node)
        is_wider = op not in _UNMARKED and node.meta["val"].dtype == torch.float32 != self._dtype
        self._add(op, inputs, [output], FLOAT32_MARK if is_wider else "", **attributes)
        return output

    def emit_split(self, x: str, sizes: Sequence[int], dim: int, node: Node) -> None:
        """Adds a split. Its parts are named `node.name` with their index."""
        parts = [f"{node.name}_{i}" for i in range(len(sizes))]
        self._add("Split", [x, self.constant(sizes, node)], parts, axis=dim)

    def constant(self, value: float | Sequence[int], node: Node, index: int = 0) -> str:
        """Adds a constant operand of `node`: a number of the dtype of its value, or a list of int64.

        `index` tells several constants of one node apart.
        """
        name = f"constant_{node.name}" + (f"_{index}" if index else "")
        if isinstance(value, Sequence):
            tensor = helper.make_tensor(name, TensorProto.INT64, [len(value)], value)
        else:
            tensor = helper.make_tensor(name, ONNX_DTYPES[node.meta["val"].dtype], [], [value])
        return self.add_constant(tensor)

    def add_constant(self, tensor: onnx.TensorProto) -> str:
        """Adds a constant. Returns its name."""
        self.constants.append(tensor)
        return tensor.name

    def _add(
        self, op: str, inputs: Sequence[str], outputs: list[str], mark: str = "", **attributes: Any
    ) -> None:
        self.nodes.append(helper.make_node(op, inputs, outputs, f"{mark}{op}_{outputs[0]}", **attributes))


def _drop_checks(graph: torch.fx.Graph) -> None:
    """Removes torch's checks, which compute nothing."""
    for node in list(graph.nodes):
        if node.target is _aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def _drop_needless_casts(graph: torch.fx.Graph) -> None:
    """Removes casts to a dtype that the value already has; float32 models have many."""
    for node in list(graph.nodes):
        if node.target is _aten.to.dtype and node.args[0].meta["val"].dtype == node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _drop_what_quantizing_does(graph: torch.fx.Graph) -> None:
    """Removes the rounding and the clamp before a cast to codes: QuantizeLinear rounds and saturates."""
    for node in list(graph.nodes):
        if node.target is _aten.to.dtype and node.args[1] in CODE_DTYPES:
            x = before = node.args[0]
            if x.target is _aten.round.default:
                x = x.args[0]
            if x.target is _aten.clamp.default and x.args[1:] in RANGES.values():
                x = x.args[0]
            node.replace_input_with(before, x)
    graph.eliminate_dead_code()


def _elementwise(op: str) -> Callable[[Lowering, Node], None]:
    def lower(to: Lowering, node: Node) -> None:
        left, right = node.args
        other = to.name(right) if isinstance(right, Node) else to.constant(right, node)
        to.emit(op, [to.name(left), other], node)

    return lower


def _embedding(to: Lowering, node: Node) -> None:
    table, indices = node.args
    to.emit("Gather", [to.name(table), to.name(indices)], node, axis=0)


def _index_select(to: Lowering, node: Node) -> None:
    x, dim, indices = node.args
    to.emit("Gather", [to.name(x), to.name(indices)], node, axis=dim)


def _linear(to: Lowering, node: Node) -> None:
    to.emit("Gemm", [to.name(argument) for argument in node.args], node, transB=1)


def _to_dtype(to: Lowering, node: Node) -> None:
    x, dtype = node.args
    source = x.meta["val"].dtype
    codes = next((each for each in (source, dtype) if each in (torch.int8, torch.float8_e4m3fn)), None)
    if codes is None:
        to.emit("Cast", [to.name(x)], node, to=ONNX_DTYPES[dtype])
        return
    # Scale and zero point are constants of every node: TensorRT finds products of 8 bits only beside such.
    scale = to.add_constant(helper.make_tensor(f"scale_{node.name}", TensorProto.FLOAT, [], [1.0]))
    zero = to.add_constant(helper.make_tensor(f"zero_{node.name}", CODE_DTYPES[codes], [], [0]))
    to.emit("DequantizeLinear" if codes == source else "QuantizeLinear", [to.name(x), scale, zero], node)


def _square(to: Lowering, node: Node) -> None:
    to.emit("Mul", [to.name(node.args[0])] * 2, node)


def _reduce(op: str) -> Callable[[Lowering, Node], None]:
    def lower(to: Lowering, node: Node) -> None:
        x, dims, keepdim = node.args
        if to.opset < 18:
            to.emit(op, [to.name(x)], node, axes=dims, keepdims=int(keepdim))
        else:
            to.emit(op, [to.name(x), to.constant(dims, node)], node, keepdims=int(keepdim))

    return lower


def _clamp(to: Lowering, node: Node) -> None:
    x, low, high = [*node.args, None, None][:3]
    inputs, dtype = [to.name(x)], ONNX_DTYPES[node.meta["val"].dtype]
    for name, bound in (("low", low), ("high", high)):
        constant = None if bound is None else helper.make_tensor(f"{name}_{node.name}", dtype, [], [bound])
        inputs.append("" if constant is None else to.add_constant(constant))
    to.emit("Clip", inputs, node)


def _unsqueeze(to: Lowering, node: Node) -> None:
    x, dim = node.args
    to.emit("Unsqueeze", [to.name(x), to.constant([dim], node)], node)


def _select(to: Lowering, node: Node) -> None:
    x, dim, index = node.args
    at = to.add_constant(helper.make_tensor(f"constant_{node.name}", TensorProto.INT32, [], [index]))
    to.emit("Gather", [to.name(x), at], node, axis=dim)


def _stack(to: Lowering, node: Node) -> None:
    parts, dim = node.args
    axes = to.constant([dim], node)
    raised = [
        to.emit("Unsqueeze", [to.name(part), axes], node, f"{node.name}_part_{i}") for i, part in enumerate(parts)
    ]
    to.emit("Concat", raised, node, axis=dim)


def _rsqrt(to: Lowering, node: Node) -> None:
    root = to.emit("Sqrt", [to.name(node.args[0])], node, f"{node.name}_root")
    to.emit("Reciprocal", [root], node)


def _silu(to: Lowering, node: Node) -> None:
    x = to.name(node.args[0])
    gate = to.emit("Sigmoid", [x], node, f"{node.name}_gate")
    to.emit("Mul", [x, gate], node)


def _gelu(to: Lowering, node: Node) -> None:
    """0.5 x (1 + erf(x / sqrt(2))), or its approximation 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    x = to.name(node.args[0])
    steps = iter(range(1, 9))

    def step(op: str, left: str, right: str | float = "") -> str:
        index = next(steps)
        inputs = [left]
        if right != "":
            inputs.append(right if isinstance(right, str) else to.constant(right, node, index))
        return to.emit(op, inputs, node, f"{node.name}_{index}")

    if node.kwargs.get("approximate", "none") == "tanh":
        square = step("Mul", x, x)
        factor = step("Add", step("Mul", square, 0.044715), 1.0)
        gate = step("Tanh", step("Mul", step("Mul", x, factor), math.sqrt(2 / math.pi)))
    else:
        gate = step("Erf", step("Mul", x, math.sqrt(0.5)))
    half = step("Mul", x, 0.5)
    to.emit("Mul", [half, step("Add", gate, 1.0)], node)


def _layer_norm(to: Lowering, node: Node) -> None:
    x, shape, weight, *rest = node.args
    bias, eps = [*rest, None, 1e-5][:2] if len(rest) < 2 else rest[:2]
    eps = node.kwargs.get("eps", eps)
    inputs = [to.name(x), to.name(weight)] + ([] if bias is None else [to.name(bias)])
    to.emit("LayerNormalization", inputs, node, axis=-len(shape), epsilon=eps)


def _unary(op: str) -> Callable[[Lowering, Node], None]:
    def lower(to: Lowering, node: Node) -> None:
        to.emit(op, [to.name(node.args[0])], node)

    return lower


def _split(to: Lowering, node: Node) -> None:
    x, size, *rest = node.args
    dim = rest[0] if rest else 0
    width = x.meta["val"].shape[dim]
    sizes = size if isinstance(size, Sequence) else [min(size, width - at) for at in range(0, width, size)]
    to.emit_split(to.name(x), sizes, dim, node)


def _getitem(to: Lowering, node: Node) -> None:
    parts, index = node.args
    to.rename(node, f"{parts.name}_{index}")


def _view(to: Lowering, node: Node) -> None:
    x, shape = node.args
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    to.emit("Reshape", [to.name(x), to.constant(sizes, node)], node)


def _cat(to: Lowering, node: Node) -> None:
    parts, dim = node.args
    to.emit("Concat", [to.name(part) for part in parts], node, axis=dim)


# Casts, and what TensorRT 8.6 runs in 8 bits if no precision is demanded: products in float32 are those of codes.
_UNMARKED = ("Cast", "QuantizeLinear", "DequantizeLinear", "Gemm")

_LOWERINGS: dict[Callable[..., Any], Callable[[Lowering, Node], None]] = {
    operator.getitem: _getitem,
    _aten.abs.default: _unary("Abs"),
    _aten.add.Tensor: _elementwise("Add"),
    _aten.amax.default: _reduce("ReduceMax"),
    _aten.cat.default: _cat,
    _aten.clamp.default: _clamp,
    _aten.div.Tensor: _elementwise("Div"),
    _aten.embedding.default: _embedding,
    _aten.floor.default: _unary("Floor"),
    _aten.index_select.default: _index_select,
    _aten.gelu.default: _gelu,
    _aten.layer_norm.default: _layer_norm,
    _aten.linear.default: _linear,
    _aten.mean.dim: _reduce("ReduceMean"),
    _aten.mul.Tensor: _elementwise("Mul"),
    _aten.relu.default: _unary("Relu"),
    _aten.rsqrt.default: _rsqrt,
    _aten.select.int: _select,
    _aten.sigmoid.default: _unary("Sigmoid"),
    _aten.silu.default: _silu,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.square.default: _square,
    _aten.stack.default: _stack,
    _aten.sub.Tensor: _elementwise("Sub"),
    _aten.tanh.default: _unary("Tanh"),
    _aten.to.dtype: _to_dtype,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.view.default: _view,
}
