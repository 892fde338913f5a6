"""The exported segments against the torch segments and Hugging Face; what is in the graphs; the command."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import safetensors.torch
import torch
from onnx import TensorProto, numpy_helper
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.common.errors import ConfigError
from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends.onnxruntime_backend import OnnxRuntimeBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.segments import behind_lookup, bind_weights, segments_of
from services.dense_worker.model.weights import empty_weights, load_weights
from services.dense_worker.tensorrt import build, export
from services.dense_worker.tensorrt.export_check import OneSequenceAttention, greedy, load_hugging_face
from services.dense_worker.tensorrt.files.manifest import read_manifest, read_networks
from services.dense_worker.tensorrt.onnx_segments import TracedSegment, export_networks, export_segment
from tests.support.dense.steps import make_noisy, relative_error
from tests.support.imports import as_in_a_new_process
from tests.support.model_configs import VARIANTS, small_config, write_config
from tests.support.models import make_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
SEGMENTS = ("first", "middle", "last")
# The greatest difference, relative to the greatest value. Measured: at most 3e-7 and 1.1e-3.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3}


@cache
def config_of(variant: str) -> ModelConfig:
    family, overrides = VARIANTS[variant]
    return small_config(family, **overrides)


@cache
def networks_of(variant: str, dtype: torch.dtype) -> dict[str, bytes]:
    return export_networks(config_of(variant), dtype)


def graph_of(variant: str, segment: str, dtype: torch.dtype = torch.float16) -> onnx.GraphProto:
    return onnx.load_from_string(networks_of(variant, dtype)[segment]).graph


def noisy_weights(config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    return make_noisy(empty_weights(config, dtype, CPU))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_segments_equal_the_torch_segments(variant: str, dtype: torch.dtype) -> None:
    config = config_of(variant)
    weights = noisy_weights(config, dtype)
    torch_backend = TorchBackend(weights)
    exported = OnnxRuntimeBackend(networks_of(variant, dtype), weights)
    generator = torch.Generator().manual_seed(2)
    for n in (1, 17, 300):
        token_ids = torch.randint(config.vocab_size, (n,), generator=generator)
        rows = torch.randint(n, (5,), generator=generator)
        attn_out = torch.randn(n, config.attn_size, generator=generator).to(dtype)
        qkv, expected_qkv = torch.full((2, n, config.qkv_size), torch.nan, dtype=dtype)
        expected_residual = torch_backend.first(token_ids, expected_qkv)
        assert torch.equal(exported.first(token_ids, qkv), expected_residual)
        assert relative_error(qkv, expected_qkv) <= TOLERANCES[dtype]
        residual = torch.randn(n, config.hidden_size, generator=generator).to(dtype)
        expected_residual = torch_backend.middle(1, attn_out, residual, expected_qkv)
        next_residual = exported.middle(1, attn_out, residual, qkv)
        assert relative_error(next_residual, expected_residual) <= TOLERANCES[dtype]
        assert relative_error(qkv, expected_qkv) <= TOLERANCES[dtype]
        logits = exported.last(attn_out, residual, rows)
        assert logits.dtype == torch.float32
        assert relative_error(logits, torch_backend.last(attn_out, residual, rows)) <= TOLERANCES[dtype]


def test_norms_compute_in_float32() -> None:
    """Values whose squares are beyond float16, which a norm in float16 would turn into zeros."""
    config, dtype = config_of("llama"), torch.float16
    weights = noisy_weights(config, dtype)
    exported = OnnxRuntimeBackend(networks_of("llama", dtype), weights)
    residual = torch.randn(3, config.hidden_size).mul(3000).to(dtype)
    qkv, expected_qkv = torch.zeros(2, 3, config.qkv_size, dtype=dtype)
    attn_out = torch.zeros(3, config.attn_size, dtype=dtype)
    exported.middle(0, attn_out, residual, qkv)
    TorchBackend(weights).middle(0, attn_out, residual, expected_qkv)
    assert qkv.abs().max() > 0.1
    assert relative_error(qkv, expected_qkv) <= TOLERANCES[dtype]
    for segment in SEGMENTS:
        graph = onnx.shape_inference.infer_shapes(
            onnx.load_from_string(networks_of("qwen3", dtype)[segment])
        ).graph
        types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
        means = [node for node in graph.node if node.op_type == "ReduceMean"]
        assert means and all(
            types[name] == TensorProto.FLOAT for node in means for name in (*node.input, *node.output)
        )


@pytest.fixture(scope="module")
def embedded() -> tuple[ModelConfig, ModelWeights, Any]:
    config = load_model_config(EMBEDDED_MODEL)
    return (
        config,
        load_weights(EMBEDDED_MODEL, config, torch.float32, CPU),
        load_hugging_face(EMBEDDED_MODEL, config, torch.float32),
    )


def test_generation_of_the_embedded_model_equals_torch_and_hugging_face(embedded: Any) -> None:
    config, weights, model = embedded
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    exported = OnnxRuntimeBackend(export_networks(config, torch.float32), weights)
    for text in ("San Francisco is a", "Q: What", "The"):
        prompt = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            found, by_torch = (
                greedy(backend, OneSequenceAttention(model, config), config, torch.float32, prompt, 24)
                for backend in (exported, TorchBackend(weights))
            )
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[
                0, len(prompt) :
            ]
        assert found == by_torch == expected.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_hold_projections_norms_and_swiglu_and_nothing_of_attention(variant: str) -> None:
    config = config_of(variant)
    head_norms = 2 * config.qk_norm
    num_norms = {"first": 1 + head_norms, "middle": 2 + head_norms, "last": 2}
    num_projections = {"first": 1, "middle": 4, "last": 4}
    for segment in SEGMENTS:
        counts = Counter(node.op_type for node in graph_of(variant, segment).node)
        assert counts["Gemm"] == num_projections[segment]
        assert counts["ReduceMean"] == counts["Reciprocal"] == counts["Sqrt"] == num_norms[segment]
        assert counts["Sigmoid"] == (segment != "first")
        allowed = {"Gemm", "ReduceMean", "Reciprocal", "Sqrt", "Sigmoid", "Add", "Mul", "Cast"}
        allowed |= {"Split", "Concat", "Reshape"} if head_norms or segment != "first" else set()
        assert (
            counts.keys() <= allowed
        )  # no MatMul of two activations, Softmax, Sin, Cos, Range, Trilu, Where, and no Gather of embeddings


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_inputs_in_order_and_none_is_inside(variant: str) -> None:
    config = config_of(variant)
    weights = empty_weights(config, torch.float16, torch.device("meta"))
    parts = segments_of(weights)
    segments = {"first": behind_lookup(parts.first), "middle": parts.middle[0], "last": parts.last}
    activations = {
        "first": ["embeddings"],
        "middle": ["attn_out", "residual"],
        "last": ["attn_out", "residual"],
    }
    tensors = bind_weights(weights)
    for segment in SEGMENTS:
        graph = graph_of(variant, segment)
        assert [value.name for value in graph.input] == [
            *activations[segment],
            *TracedSegment(segments[segment]).weight_names,
        ]
        for value in graph.input[len(activations[segment]) :]:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            assert shape == list(tensors[segment][0][value.name].shape)
        inside = [numpy_helper.to_array(tensor) for tensor in graph.initializer]
        assert sum(array.nbytes for array in inside) <= 150  # epsilons, split sizes, shapes
        assert not any(node.op_type == "Constant" for node in graph.node)


def test_dynamic_dimensions_and_names_are_stable() -> None:
    first, middle, last = (graph_of("llama", segment) for segment in SEGMENTS)

    def describe(graph: onnx.GraphProto) -> list[tuple[str, str, int]]:
        values = [*graph.input, *graph.output]
        return [
            (value.name, value.type.tensor_type.shape.dim[0].dim_param, value.type.tensor_type.elem_type)
            for value in values
            if value.type.tensor_type.shape.dim[0].dim_param
        ]

    half, single = TensorProto.FLOAT16, TensorProto.FLOAT
    tokens, rows = "num_tokens", "num_rows"
    outputs = [("qkv", tokens, half), ("residual_out", tokens, half)]
    inputs = [("attn_out", tokens, half), ("residual", tokens, half)]
    assert describe(first) == [("embeddings", tokens, half), outputs[0]], "the residual is the embeddings"
    assert describe(middle) == [*inputs, *outputs]
    assert describe(last) == [("attn_out", rows, half), ("residual", rows, half), ("logits", rows, single)]
    model = onnx.load_from_string(networks_of("llama", torch.float16)["middle"])
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]


def test_float32_graphs_need_no_casts() -> None:
    for segment in SEGMENTS:
        assert not any(node.op_type == "Cast" for node in graph_of("qwen3", segment, torch.float32).node)


def test_export_is_deterministic_and_does_not_depend_on_depth() -> None:
    again = export_networks(
        small_config("qwen3", num_hidden_layers=33, **VARIANTS["qwen3"][1]), torch.float16
    )
    assert again == networks_of("qwen3", torch.float16)


def test_a_worker_exports_the_same_graphs() -> None:
    program = """
import hashlib
from services.common.process import importing
with importing():  # as a worker, without what torch needs for an export
    from services.dense_worker.tensorrt import prepare
import torch
from services.dense_worker.tensorrt.onnx_segments import export_networks
from tests.support.model_configs import small_config
for name, network in export_networks(small_config("llama"), torch.float16).items():
    print(name, hashlib.sha256(network).hexdigest())
"""
    found = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120).splitlines()
    expected = export_networks(small_config("llama"), torch.float16)
    assert found == [f"{name} {hashlib.sha256(network).hexdigest()}" for name, network in expected.items()]


def test_a_70b_model_is_exported_without_its_memory() -> None:
    sizes = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    config = small_config("llama", num_hidden_layers=80, head_dim=128, vocab_size=128256, **sizes)
    graph = export_segment("middle", config, torch.bfloat16).graph
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input
    }
    assert shapes["gate_up_weight"] == [57344, 8192]
    assert graph.ByteSize() < 4000


def run_export(*arguments: object) -> int:
    return export.main([str(argument) for argument in arguments])


def test_command_writes_segments_embedding_tokenizer_and_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    assert (
        run_export("--model", EMBEDDED_MODEL, "--output-dir", out, "--num_layers", 2, "--dtype", "float32")
        == 0
    )
    printed = capsys.readouterr().out
    assert all(
        line in printed
        for line in ("[1/3] first.onnx", "[3/3] last.onnx", "embed_tokens.safetensors", "llama, 2 layers")
    )
    manifest = json.loads((out / "manifest.json").read_text())
    for segment in SEGMENTS:
        entry = manifest["segments"][segment]
        assert hashlib.sha256((out / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
    assert manifest["model"]["num_layers"] == 2 and manifest["dtype"] == "float32" and entry["opset"] == 17
    embed = safetensors.torch.load_file(out / "embed_tokens.safetensors")["embed_tokens.weight"]
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    assert torch.equal(embed, model.get_input_embeddings().weight)
    text = "San Francisco is a city"
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (out, EMBEDDED_MODEL)]
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_parts_exported_one_by_one_make_one_manifest(tmp_path: Path) -> None:
    for part in ("batchful", "embed_tokens", "tokenizer"):
        assert run_export("--model", EMBEDDED_MODEL, "--output-dir", tmp_path, "--export", part) == 0
    manifest = read_manifest(tmp_path)
    assert list(manifest.segments) == list(SEGMENTS) and manifest.embed_tokens and manifest.tokenizer
    # Another dtype is another export: what is left of the first one does not belong to it.
    assert (
        run_export(
            "--model", EMBEDDED_MODEL, "--output-dir", tmp_path, "--export", "tokenizer", "--dtype", "float16"
        )
        == 0
    )
    assert read_manifest(tmp_path).segments == {}


def test_dummy_weights_need_only_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "model", "qwen2")
    arguments = ("--model", model, "--output-dir", tmp_path / "out")
    assert run_export(*arguments, "--load-format", "dummy") == 0
    assert "has none, left out" in capsys.readouterr().out
    assert read_manifest(tmp_path / "out").tokenizer is None
    assert run_export(*arguments) == 1
    assert "has neither model.safetensors nor" in capsys.readouterr().err
    assert run_export(*arguments, "--export", "tokenizer") == 1
    assert "has no tokenizer: none of tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "model directory nowhere does not exist"),
        (["--num-layers", "0"], "num_layers is 0, the model in"),
        (["--output-dir", "/dev/null/out"], "directory /dev/null/out cannot be made"),
        (["--test", "--input", "x", "--load-format", "dummy"], "--test compares with Hugging Face"),
        (["--test", "--input", "x", "--export", "tokenizer"], "--test runs the exported segments"),
        (
            ["--test", "--input", "x", "--dtype", "bfloat16", "--export", "batchful"],
            "onnxruntime has no bfloat16",
        ),
    ],
)
def test_command_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_export("--model", EMBEDDED_MODEL, "--output-dir", tmp_path, *arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_unsupported_architecture_is_named_with_the_supported_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]})
    )
    assert run_export("--model", tmp_path, "--output-dir", tmp_path / "out") == 1
    assert "model_type 'rwkv', supported: llama, mistral, qwen2, qwen3" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_cut_model_is_compared_with_a_cut_hugging_face_model(family: str, tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, family)
    config = load_model_config(path, num_layers=2)
    weights = load_weights(path, config, torch.float32, CPU)
    model = load_hugging_face(path, config, torch.float32)
    exported = OnnxRuntimeBackend(export_networks(config, torch.float32), weights)
    prompt = [5, 6, 7]
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)
        found = greedy(exported, OneSequenceAttention(model, config), config, torch.float32, prompt, 6)
    assert found == expected[0, 3:].tolist()


def test_test_flag_prints_both_continuations(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", EMBEDDED_MODEL, "--test", "--input", "San Francisco is a", "--max-tokens", 7)
    assert run_export(*arguments, "--export", "batchful") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3].split(":")[0] == "Hugging Face" and "San Francisco is a city" in printed[-3]
    assert printed[-2].split(":")[0] == "exported" and printed[-2].split()[1:] == printed[-3].split()[2:]
    assert printed[-1] == "equal: 7 tokens"


def test_test_flag_fails_where_the_continuations_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the exported graph: a negation where SwiGLU has a sigmoid."""

    def wrong_networks(directory: Path, manifest: Any) -> dict[str, bytes]:
        networks = read_networks(directory, manifest)
        model = onnx.load_from_string(networks["middle"])
        next(node for node in model.graph.node if node.op_type == "Sigmoid").op_type = "Neg"
        return networks | {"middle": model.SerializeToString()}

    monkeypatch.setattr(export, "read_networks", wrong_networks)
    arguments = ("--model", EMBEDDED_MODEL, "--test", "--input", "San Francisco is a", "--max-tokens", 7)
    assert run_export(*arguments, "--export", "batchful") == 1
    assert "different from token" in capsys.readouterr().out


def test_missing_packages_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command in (export.main, build.main):
        assert command(["--model", str(EMBEDDED_MODEL), "--output-dir", "unused"]) == 1
        assert "onnx is not installed: `pip install -r requirements-export.txt`" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="onnxruntime is not installed"):
        OnnxRuntimeBackend({}, empty_weights(config_of("llama"), torch.float32, CPU))


def test_the_commands_and_the_worker_start_without_the_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    optional = ("onnx", "onnxruntime", "tensorrt")
    for name in {*optional, *(each for each in sys.modules if each.partition(".")[0] in optional)}:
        monkeypatch.setitem(sys.modules, name, None)  # so that its import fails
    with as_in_a_new_process():
        for name in ("service", "tensorrt.build", "tensorrt.export"):
            importlib.import_module(f"services.dense_worker.{name}")
