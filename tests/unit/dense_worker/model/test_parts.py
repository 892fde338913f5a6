"""A model family and a weight format that exist only here. Their parts run by torch, ONNX and the CUDA backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from services.common.families.names import NAMES
from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends import DenseBackend, InputEmbeds
from services.dense_worker.backends.onnxruntime_backend import OnnxRuntimeBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.model import weights as weights_module
from services.dense_worker.model.allocator import WeightAllocator, checkpoint_sources, sum_of_sizes
from services.dense_worker.model.builder import Builder
from services.dense_worker.model.families import (
    build_decoder,
    build_embedding_table,
    build_head,
    build_normed_qkv,
    build_o,
)
from services.dense_worker.model.layer import DecoderLayer, Mlp
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.model.weights import empty_weights, load_weights
from services.dense_worker.parameters import Parameter, parts_of_type, with_tensors
from services.dense_worker.tensorrt.onnx_segments import export_networks
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.steps import attend, make_noisy, relative_error, run_step
from tests.support.model_configs import small_config
from tests.support.models import make_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
TOKEN_IDS, ROWS = [3, 1, 4, 15, 92], [4, 0, 4]
SCALE = 8.0


@dataclass(frozen=True, slots=True)
class ParallelResidual:
    """Like GPT-NeoX: the MLP's input is the layer's input, without the output of attention."""

    o: Linear
    mlp: Mlp

    @property
    def attn_size(self) -> int:
        return self.o.in_features

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        residual, activation = self.mlp.activate(operations, residual)
        residual = operations.linear_add(residual, self.o, attn_out)
        return operations.linear_add(residual, self.mlp.down, activation)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """An MLP without a gate: down(SiLU(up(x)))."""

    norm: RmsNorm
    up: Linear
    down: Linear

    def activate(self, operations: Operations, residual: Residual) -> tuple[Residual, torch.Tensor]:
        residual, up = operations.norm_linear(residual, self.norm, self.up)
        return residual, F.silu(up)


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """An embedding multiplied by a constant, like Gemma's."""

    table: Parameter | None  # None: only `of_rows` is called
    is_lookup = False

    def forward(
        self, operations: Operations, token_ids: torch.Tensor, input_embeds: InputEmbeds | None = None
    ) -> Residual:
        assert input_embeds is None, "these steps have token ids only"
        return self.of_rows(operations, operations.embed(self.table, token_ids), token_ids)

    def of_rows(self, operations: Operations, residual: Residual, token_ids: torch.Tensor | None) -> Residual:
        return Residual(residual.hidden * SCALE)


def build_parallel(config: ModelConfig, allocator: WeightAllocator) -> ModelWeights:
    model, hidden = Builder(config, NAMES["llama"], allocator), config.hidden_size
    table = build_embedding_table(model)

    def layer(prefix: str) -> DecoderLayer:
        up = (Projection(f"{prefix}.mlp.up_proj", config.intermediate_size),)
        down = (Projection(f"{prefix}.mlp.down_proj", hidden),)
        mlp = PlainMlp(
            allocator.norm("post_norm", f"{prefix}.post_attention_layernorm", hidden, config.norm_eps),
            allocator.linear("up", hidden, up, Cut.OUT, has_bias=True),
            allocator.linear("down", config.intermediate_size, down, Cut.IN, has_bias=False),
        )
        own = model.of_layer(prefix)
        o, before = build_o(own, config.heads), build_normed_qkv(own, config.heads)
        return DecoderLayer(before, ParallelResidual(o, mlp))

    layers = tuple(layer(f"model.layers.{i}") for i in range(config.num_layers))
    return ModelWeights(ScaledEmbedding(table), layers, build_head(model, table))


def parallel_formula(weights: ModelWeights, config: ModelConfig) -> torch.Tensor:
    """The logits in float64, computed from the tensors by their names."""
    w = {name: tensor.double() for name, tensor in weights.named_tensors()}

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    x = w["embed"][TOKEN_IDS] * SCALE
    for i in range(config.num_layers):
        attn_out = attend(norm(x, w[f"layers.{i}.input_norm"]) @ w[f"layers.{i}.qkv_weight"].T, config)
        up = norm(x, w[f"layers.{i}.post_norm"]) @ w[f"layers.{i}.up_weight"].T + w[f"layers.{i}.up_bias"]
        mlp = (up / (1 + (-up).exp())) @ w[f"layers.{i}.down_weight"].T
        x = x + attn_out @ w[f"layers.{i}.o_weight"].T + mlp
    return (norm(x, w["final_norm"]) @ w["lm_head"].T)[ROWS]


@contextmanager
def by_torch(weights: ModelWeights, config: ModelConfig) -> Iterator[DenseBackend]:
    yield TorchBackend(weights)


@contextmanager
def by_onnx(weights: ModelWeights, config: ModelConfig) -> Iterator[DenseBackend]:
    yield OnnxRuntimeBackend(export_networks(config, weights.dtype), weights)


@contextmanager
def by_cuda(weights: ModelWeights, config: ModelConfig) -> Iterator[DenseBackend]:
    with fake_triton_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearChoice, "measure", lambda self, linears, *_: self.set_all(linears, LinearKernel.STREAMED))
        from services.dense_worker.backends.cuda_backend import CudaBackend

        yield CudaBackend(weights, config, 64)


BACKENDS: dict[str, tuple[Callable, torch.dtype, float]] = {  # dtype and limit of the relative error
    "torch": (by_torch, torch.float32, 1e-5),
    "onnx": (by_onnx, torch.float32, 1e-5),
    "cuda, by references": (by_cuda, torch.float32, 1e-5),
    "cuda, streamed": (by_cuda, torch.float16, 1e-2),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_family_needs_only_new_parts(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "build_decoder", build_parallel)
    make, dtype, tolerance = BACKENDS[backend]
    config = replace(small_config("llama"), family="parallel")
    weights = make_noisy(empty_weights(config, dtype, CPU))
    with make(weights, config) as dense:
        found = run_step(dense, config, dtype, TOKEN_IDS, ROWS)
    assert relative_error(found, parallel_formula(weights, config)) < tolerance


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight in float16 with a scale for each row. It is dequantized before the multiplication."""

    matrix: Parameter  # float16 [out_features, in_features]
    scale: Parameter  # [out_features, 1]

    @property
    def kind(self) -> str:
        return "float16 scaled by row"

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = F.linear(x, self.matrix.data.to(x.dtype) * self.scale.data, bias)
        return y if out is None else out.copy_(y)


class ScaledAllocator(WeightAllocator):
    """Gives this format to every linear layer except lm_head."""

    def weight(self, name: str, in_features: int, merged_from: tuple[Projection, ...]) -> ScaledWeight:
        if name == "lm_head":
            return super().weight(name, in_features, merged_from)
        sources = checkpoint_sources(merged_from, "weight"), checkpoint_sources(merged_from, "weight_scale")
        num_rows = sum_of_sizes(merged_from)
        matrix = self.parameter(name, num_rows, in_features, sources=sources[0], dtype=torch.float16)
        return ScaledWeight(matrix, self.parameter(f"{name}_scale", num_rows, 1, sources=sources[1]))


def quantize_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Rewrites the checkpoint in this format; returns the dequantized tensors of an equal plain checkpoint."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if "_proj.weight" in name:
            scale = tensor.abs().amax(dim=1, keepdim=True) / 3
            stored[name], stored[name.replace("weight", "weight_scale")] = (tensor / scale).half(), scale
            plain[name] = stored[name].float() * scale
    save_file(stored, file)
    return plain


@pytest.mark.parametrize("backend", ["torch", "onnx", "cuda, by references"])
def test_a_new_weight_format_needs_no_change_of_the_layer(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = make_model_dir(tmp_path, "qwen2")
    config = load_model_config(path)
    plain_file = quantize_checkpoint(path)

    def build(config: ModelConfig, allocator: WeightAllocator) -> ModelWeights:
        return build_decoder(config, ScaledAllocator(allocator.dtype, allocator.device))

    with monkeypatch.context() as patch:
        patch.setattr(weights_module, "build_decoder", build)
        weights = load_weights(path, config, torch.float32, CPU)
        with BACKENDS[backend][0](weights, config) as dense:
            found = run_step(dense, config, torch.float32, TOKEN_IDS, ROWS)
    assert weights.layers[1].before.qkv.weight.matrix.data.dtype == torch.float16
    save_file(plain_file, path / "model.safetensors")
    plain = load_weights(path, config, torch.float32, CPU)
    expected = run_step(TorchBackend(plain), config, torch.float32, TOKEN_IDS, ROWS)
    assert relative_error(found, expected) < 1e-5


def test_linear_layers_know_their_merged_projections() -> None:
    config = small_config("qwen2", tie_word_embeddings=True)
    weights = make_noisy(empty_weights(config, torch.float32, CPU))
    linears = {linear.name: linear for linear in parts_of_type(Linear, (weights.layers[1], weights.head))}
    attn, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert {
        name: [(each.name, each.out_features) for each in linear.merged_from] for name, linear in linears.items()
    } == {
        "qkv": [(f"{attn}.q_proj", 64), (f"{attn}.k_proj", 32), (f"{attn}.v_proj", 32)],
        "o": [(f"{attn}.o_proj", 64)],
        "gate_up": [(f"{mlp}.gate_proj", 96), (f"{mlp}.up_proj", 96)],
        "down": [(f"{mlp}.down_proj", 64)],
        "lm_head": [("lm_head", 160)],
    }
    for linear in linears.values():
        assert tuple(linear.weight.matrix.data.shape) == (linear.out_features, linear.in_features)
        assert linear.bias is None or tuple(linear.bias.data.shape) == (linear.out_features,)


@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_the_parts_of_a_cut_layer_give_the_result_of_the_whole(name: str) -> None:
    """Cuts each layer into two parts, as for two GPUs. The results are concatenated or added."""
    config = small_config("llama", attention_bias=True, mlp_bias=True)
    weights = make_noisy(empty_weights(config, torch.float32, CPU))
    [linear] = [each for each in parts_of_type(Linear, weights.layers[0]) if each.name == name]
    x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(0))
    sizes = [projection.out_features for projection in linear.merged_from]
    matrix, bias = linear.weight.matrix.data, linear.bias.data

    def part(i: int) -> torch.Tensor:
        tensors = {f"{name}_weight": matrix.chunk(2, dim=1)[i], f"{name}_bias": bias * (i == 0)}
        inputs = x.chunk(2, dim=1)[i]
        if linear.cut is Cut.OUT:
            rows = torch.cat([each.chunk(2)[i] for each in torch.arange(linear.out_features).split(sizes)])
            tensors, inputs = {f"{name}_weight": matrix[rows], f"{name}_bias": bias[rows]}, x
        return TorchOperations().linear(with_tensors(linear, tensors), inputs)

    parts, expected = [part(0), part(1)], F.linear(x, matrix, bias)
    if linear.cut is Cut.IN:
        torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-4, atol=1e-4)
        return
    columns = [each.split([size // 2 for size in sizes], dim=1) for each in parts]
    whole = torch.cat([half for pair in zip(*columns, strict=True) for half in pair], dim=1)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
