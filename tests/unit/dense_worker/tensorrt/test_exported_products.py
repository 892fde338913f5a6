"""Quantized layers as ONNX: onnxruntime computes what the reference does, TensorRT-RTX builds it, or it is refused."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch

from services.common.errors import ConfigError, ModelError
from services.common.model_config import load_model_config
from services.dense_worker.backends.onnxruntime_backend import OnnxRuntimeBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import build, export
from services.dense_worker.tensorrt.api import TensorRT, load_tensorrt
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import code_dtypes, export_networks
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.support.dense.steps import run_step
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir
from tests.support.workers.fake_tensorrt import make_tensorrt

torch.set_num_threads(1)
CPU = torch.device("cpu")
TOKENS = [token % 50 for token in range(23)]
# ‖found − reference‖ / ‖reference‖ in float32. If inputs are quantized, one between two codes may become the other one:
# by a last bit of a scale. Measured: 5e-7, and 3e-3.
SAME_CODES, OTHER_CODE = 1e-5, 1e-2
QUANTIZED_INPUTS = (
    "fp8 channel, token",
    "fp8 tensor, static",
    "fp8 blocks",
    "fbgemm",
    "int8 channel, token",
    "int8 channel, static",
)
WEIGHTS_ALONE = (
    "fp8 channel, weight only",
    "int8 channel, weight only",
    "int4 g32",
    "awq g128",
    "gptq g32 with zeros, act-order",
    "gptq 8 bits",
)


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: its two segments have all linear layers. The heads are such that blocks of 128 divide projections."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return make_model_dir(tmp_path_factory.mktemp("plain"), "qwen2", dtype=torch.bfloat16, **sizes, **heads)


def quantized(plain_dir: Path, path: Path, name: str) -> Path:
    shutil.copytree(plain_dir, path)
    quantize_model_dir(path, FORMATS[name])
    return path


@pytest.mark.parametrize("name", [*QUANTIZED_INPUTS, *WEIGHTS_ALONE])
def test_onnxruntime_computes_what_the_reference_computes(plain_dir: Path, tmp_path: Path, name: str) -> None:
    path = quantized(plain_dir, tmp_path / "model", name)
    config = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    networks = export_networks(config, torch.float32)
    expected = run_step(TorchBackend(weights), config, torch.float32, TOKENS, [0, 5, 22])
    found = run_step(OnnxRuntimeBackend(networks, weights), config, torch.float32, TOKENS, [0, 5, 22])
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < (OTHER_CODE if name in QUANTIZED_INPUTS else SAME_CODES)

    graph = onnx.load_from_string(networks["last"]).graph
    assert not any(len(each.dims) > 1 for each in graph.initializer), "weights are inputs"
    operators = Counter(node.op_type for node in graph.node)
    assert operators["QuantizeLinear"] == (3 if name in QUANTIZED_INPUTS else 0) + (1 if "static" in name else 0)


def test_codes_are_multiplied_with_codes(plain_dir: Path, tmp_path: Path) -> None:
    """Both factors of a product come from DequantizeLinear, without anything between: TensorRT needs that."""
    for name in ("int8 channel, token", "fp8 tensor, static"):
        config = load_model_config(quantized(plain_dir, tmp_path / name, name))
        graph = onnx.load_from_string(export_networks(config, torch.float32)["last"]).graph
        writers = {output: node for node in graph.node for output in node.output}
        products = [node for node in graph.node if node.op_type == "Gemm" and node.input[1] != "lm_head"]
        for product in products:
            x, matrix = (writers[each] for each in product.input[:2])
            matrix = writers[matrix.input[0]] if matrix.op_type == "Split" else matrix
            assert x.op_type == matrix.op_type == "DequantizeLinear"
            assert writers[x.input[0]].op_type == "QuantizeLinear"
        assert len(products) == (3 if "token" in name else 4)


@pytest.mark.parametrize("name", ["fp8 channel, token", "fp8 blocks", "int8 channel, static", "awq g128"])
def test_tensorrt_rtx_builds_the_networks(plain_dir: Path, tmp_path: Path, name: str) -> None:
    config = load_model_config(quantized(plain_dir, tmp_path / "model", name))
    builder = EnginePlanBuilder(load_tensorrt(), None, parse_profiles("1-4"), EnginePlanCache(tmp_path / "plans"))
    plans = builder.find_or_build(export_networks(config, torch.bfloat16), torch.bfloat16, None, lambda line: None)
    names = {each["name"]: each["dtype"] for each in plans["last"][0].record.inputs}
    assert names["down_weight"] in ("float8_e4m3fn", "int8", "uint8"), names


@pytest.mark.parametrize("name", ["int8 channel, token", "awq g128", "fp8 channel, weight only"])
def test_a_tensorrt_without_these_types_refuses_them_before_a_build(plain_dir: Path, tmp_path: Path, name: str) -> None:
    config = load_model_config(quantized(plain_dir, tmp_path / "model", name))
    networks, trt = export_networks(config, torch.float32), make_tensorrt("8.6.0")
    builder = EnginePlanBuilder(
        TensorRT(trt), Gpu("GPU A", (9, 0), 100), parse_profiles("1-4"), EnginePlanCache(tmp_path / "plans")
    )
    [dtype] = code_dtypes(networks["last"])
    with pytest.raises(ConfigError, match=rf"8\.6\.0 is given no quantized weights \({str(dtype)[6:]}\)"):
        builder.find_or_build(networks, torch.float32, None, lambda line: None)
    assert not trt.named("parse", "build_serialized_network")


def test_formats_without_an_exported_product_are_refused_by_name(
    plain_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = quantized(plain_dir, tmp_path / "mxfp4", "mxfp4")
    message = "cannot be exported to ONNX and TensorRT: the format Mxfp4Weight has no exported product"
    with pytest.raises(ModelError, match=f"qkv {message}"):
        export_networks(load_model_config(path), torch.float16)
    for command in (export, build):
        arguments = ["--model", str(path), "--output-dir", str(tmp_path / "out"), "--load-format", "dummy"]
        assert command.main(arguments) == 1
        assert message in capsys.readouterr().err
    ragged = make_model_dir(tmp_path / "ragged", "llama", dtype=torch.bfloat16, **FORMATS["fp8 blocks, ragged"].fields)
    quantize_model_dir(ragged, FORMATS["fp8 blocks, ragged"])
    with pytest.raises(ModelError, match=r"blocks of 128 x 128 must divide them"):
        export_networks(load_model_config(ragged), torch.float16)
    path = quantized(plain_dir, tmp_path / "awq", "awq g128")
    assert export.main(["--model", str(path), "--test", "--input", "a"]) == 1
    assert "--test compares with Hugging Face without quantization, the weights are awq" in capsys.readouterr().err


def test_the_export_makes_fp8_of_an_unquantized_checkpoint(
    plain_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--output-dir", str(tmp_path / "out"), "--quantization", "fp8", "--export", "batchful"]
    assert export.main(["--model", str(plain_dir), *arguments]) == 0
    assert code_dtypes((tmp_path / "out" / "last.onnx").read_bytes()) == {torch.float8_e4m3fn}
    path = quantized(plain_dir, tmp_path / "model", "awq g128")
    assert export.main(["--model", str(path), *arguments]) == 1
    assert "is quantized already (awq)" in capsys.readouterr().err
