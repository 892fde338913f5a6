"""INT8 weights with TensorRT 8.6, by its stand-in: the numbers of the plans, and what a build asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
import pytest
import torch

from bench import tensorrt_check
from services.common.quantization.read import read_quantization
from services.dense_worker.tensorrt import engine_segments
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import export_segment
from tests.support.model_configs import small_config
from tests.support.quantized.built_plans import build_and_compare
from tests.support.quantized.checkpoints import FORMATS
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt
from tests.support.workers.fake_tensorrt_runtime import DataType

torch.set_num_threads(1)
INT8 = ("int8 channel, token", "int8 channel, static", "int8 channel, weight only")
SIZES = [{"attn_out": (1, 4, 16), "residual": (1, 4, 16)}]
# ‖found − reference‖ / ‖reference‖: a value between two codes may become the other one. Measured: 5e-3.
OTHER_CODE = 1e-2


@cache
def middle(name: str, dtype: torch.dtype = torch.float16) -> bytes:
    quantization = read_quantization("model", FORMATS[name].config, None)
    config = replace(small_config("qwen3"), quantization=quantization)
    return export_segment("middle", config, dtype).SerializeToString()


def build(trt: FakeTensorRT, network: bytes, dtype: torch.dtype = torch.float16) -> None:
    assert TensorRT(trt).build("middle", network, SIZES, dtype, b"")[0]


@pytest.mark.parametrize("name", INT8)
def test_plans_compute_what_the_reference_computes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_check, "current_gpu", lambda device: Gpu("GPU A", (9, 0), 132))
    monkeypatch.setattr(tensorrt_check, "current_stream", lambda: 7)
    monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)  # torch's on a CPU
    torch.manual_seed(0)
    built = build_and_compare(TensorRT(make_tensorrt("8.6.0")), name, tmp_path, torch.device("cpu"))
    assert len(built.errors) == 3 * 5 and max(built.errors.values()) < OTHER_CODE, built.errors
    for segment, weight in (("first", "qkv_weight"), ("middle", "o_weight"), ("last", "down_weight")):
        inputs = {each["name"]: each["dtype"] for each in built.plans[segment][0].record.inputs}
        assert inputs[weight] == "int8"


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_8_6_may_use_8_bits_exactly_where_weights_have_them(name: str, dtype: torch.dtype) -> None:
    trt, plain = make_tensorrt("8.6.0"), make_tensorrt("8.6.0")
    build(trt, middle(name, dtype), dtype)
    half = ["FP16", "OBEY_PRECISION_CONSTRAINTS"] if dtype == torch.float16 else []
    assert [flag for _, flag in trt.named("set_flag")] == ["INT8", *half]
    network = export_segment("middle", small_config("qwen3"), dtype).SerializeToString()
    build(plain, network, dtype)
    assert [flag for _, flag in plain.named("set_flag")] == half


def test_later_versions_take_8_bits_from_the_network() -> None:
    for trt in (make_tensorrt("10.0.1"), make_tensorrt("11.4.0"), make_tensorrt("1.7.1", is_rtx=True)):
        build(trt, middle("int8 channel, token"))
        assert ("set_flag", "INT8") not in trt.calls


def test_8_6_multiplies_codes_and_sums_them_in_float32() -> None:
    """Five products of codes can exceed float16."""
    trt, network = make_tensorrt("8.6.0"), middle("int8 channel, token")
    build(trt, network)
    nodes = onnx.load_from_string(network).graph.node
    products = {node.name for node in nodes if node.op_type == "Gemm"}
    may_be_8_bits = products | {node.name for node in nodes if node.op_type.endswith("eLinear")}
    in_float32 = {name for _, name, _ in trt.named("precision")}
    sums = {name for _, name, _, dtype in trt.named("set_output_type") if dtype == DataType.FLOAT}
    assert len(products) == 4 and products <= sums
    assert not in_float32 & may_be_8_bits


def test_scales_of_tokens_are_computed_in_float32() -> None:
    """The least one, of a row of zeros, is 0 in float16. TensorRT makes layers without the name of a Clip."""
    trt, network = make_tensorrt("8.6.0"), middle("int8 channel, token")
    build(trt, network)
    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(network)).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    unmarked = ("Cast", "Gemm", "DequantizeLinear")
    wide = {n.name for n in graph.node if types[n.output[0]] == onnx.TensorProto.FLOAT and n.op_type not in unmarked}
    assert {name for _, name, _ in trt.named("precision")} == wide
    operators = [node.op_type for node in graph.node]
    assert operators.count("Max") == 4 and "Clip" not in operators
