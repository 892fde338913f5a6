"""Other forms of products, for which TensorRT 8.6 has faster kernels where a plan is for one size.

What they gain is in bench/results/tensorrt.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper

from services.dense_worker.tensorrt.engine_segments import KEPT
from services.dense_worker.tensorrt.profiles import Profile

_LONG_SUM = 8192  # numbers; of one row it makes kernels for sums of 4,096, and none for those of 11,008
_MAX_OUTPUTS = 4096  # its tiles of these are no more programs than a large GPU has SMs, which have places for more
_MAX_ROWS = 256  # of 384 halves gain nothing


def fit_products(network: bytes, profile: Profile) -> bytes:
    """The same network, or one with other forms of its products if `profile` is one size of up to 256 rows.

    One row: products with long sums become a multiplication and a sum. The input of each becomes an output whose name
    begins with `KEPT`, because otherwise TensorRT computes the input anew for each sum.
    More rows: products with few outputs become sums of two halves, if something is added to them: the kernel that adds
    it adds the halves, too.
    """
    num_rows = profile.high
    if profile.low != num_rows or num_rows > _MAX_ROWS:
        return network
    model = onnx.load_from_string(network)
    graph = model.graph
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    added = {name for node in graph.node if node.op_type == "Add" for name in node.input}
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        # A product of rows [n, in] and a weight [out, in], without a bias.
        is_added = node.op_type == "Gemm" and len(node.input) == 2 and node.output[0] in added
        weight = shapes.get(node.input[1]) if is_added else None
        if weight is not None and num_rows == 1 and weight[1] > _LONG_SUM:
            nodes += _long_sums(graph, node, *weight)
        elif weight is not None and num_rows > 1 and weight[0] <= _MAX_OUTPUTS and weight[1] % 2 == 0:
            nodes += _halves(graph, node, num_rows, *weight)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def _long_sums(
    graph: onnx.GraphProto, gemm: onnx.NodeProto, num_outputs: int, num_inputs: int
) -> Iterator[onnx.NodeProto]:
    """x [1, in], weight [out, in] -> [1, out]"""
    (x, weight), [output] = gemm.input, gemm.output
    elem_type = next(value.type.tensor_type.elem_type for value in graph.input if value.name == weight)
    num_kept = sum(value.name.startswith(KEPT) for value in graph.output)
    kept = f"{KEPT}_{num_kept}" if num_kept else KEPT
    graph.output.append(helper.make_tensor_value_info(kept, elem_type, [1, num_inputs]))
    yield _node("Identity", [x], kept)
    products, sums = f"{output}_products", f"{output}_sums"
    yield _node("Mul", [kept, weight], products)
    yield _node("ReduceSum", [products, _constant(graph, f"{output}_axis", [1])], sums, keepdims=0)
    yield _node("Reshape", [sums, _constant(graph, f"{output}_shape", [1, num_outputs])], output)


def _halves(
    graph: onnx.GraphProto, gemm: onnx.NodeProto, num_rows: int, num_outputs: int, num_inputs: int
) -> Iterator[onnx.NodeProto]:
    """x [n, in], weight [out, in], both read as they lie -> [n, out]"""
    (x, weight), [output] = gemm.input, gemm.output
    halves = []
    for name, size, order in ((x, num_rows, (1, 0, 2)), (weight, num_outputs, (1, 2, 0))):
        split = f"{output}_{name}_split"
        shape = _constant(graph, f"{split}_shape", [size, 2, num_inputs // 2])
        yield _node("Reshape", [name, shape], split)
        halves.append(f"{output}_{name}_halves")
        yield _node("Transpose", [split], halves[-1], perm=order)
    products = f"{output}_products"
    yield _node("MatMul", halves, products)
    yield _node("ReduceSum", [products, _constant(graph, f"{output}_axis", [0])], output, keepdims=0)


def _node(op: str, inputs: list[str], output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], f"{op}_{output}", **attributes)


def _constant(graph: onnx.GraphProto, name: str, values: list[int]) -> str:
    graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
    return name
