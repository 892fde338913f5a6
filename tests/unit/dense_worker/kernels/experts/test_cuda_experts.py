"""Mixtures of experts on CudaBackend with kernels computed by torch: launches, logits, padding, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.config import DenseSection, ModelSection
from services.common.errors import ConfigError
from services.common.families.shape import Activation
from services.common.model_config import ModelConfig, load_model_config
from services.common.quantization.schemes import (
    Activations,
    Element,
    QuantizationConfig,
    ScaledScheme,
    SchemeGroup,
    on_the_fly_fp8,
)
from services.common.resolve import ResolvedModel
from services.dense_worker.backends.select import prepare_backend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.model.weights import load_weights
from services.dense_worker.parameters import parts_of_type
from services.dense_worker.tensorrt.profiles import Limits
from services.step import PlanEntries, PlanEntry, StepPlan
from tests.support.dense.fake_triton_kernels import LaunchRecorder, fake_triton_kernels
from tests.support.dense.family_models import make_family_model
from tests.support.dense.steps import relative_error, run_step
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

torch.set_num_threads(1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MAX_NUM_TOKENS = 70
VARIANTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe-plain-layer", "glm4_moe", "glm4_moe-one-group"),
    *("minimax_m2", "granitemoe", "gpt_oss", "phimoe"),
)


@pytest.fixture(autouse=True)
def measured_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LinearChoice, "measure", lambda choice, linears, *_: choice.set_all(linears, LinearKernel.CUBLAS)
    )


def make(path: Path, variant: str) -> ModelConfig:
    return load_model_config(make_family_model(path, variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_torch_backend(tmp_path: Path, variant: str) -> None:
    config = make(tmp_path, variant)
    weights = load_weights(tmp_path, config, torch.float32, CPU)
    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend, reference = CudaBackend(weights, config, MAX_NUM_TOKENS), TorchBackend(weights)
        for num_tokens, rows in ((1, [0]), (5, [4, 1, 1]), (MAX_NUM_TOKENS, [7, 69])):
            token_ids = [3 + token % 50 for token in range(num_tokens)]
            expected = run_step(reference, config, torch.float32, token_ids, rows)
            assert relative_error(run_step(backend, config, torch.float32, token_ids, rows), expected) < 1e-5


@pytest.mark.parametrize(
    ("num_tokens", "products", "kernels"),
    [
        (
            1,
            LinearKernel.STREAMED,
            ("few_router norm rounded {n}x2", "few_gate_up {p}x{i}", "few_down residual {n}x{h}"),
        ),
        (1, LinearKernel.CUBLAS, ("few_router rounded {n}x2", "few_gate_up {p}x{i}", "few_down residual {n}x{h}")),
        (
            9,
            LinearKernel.CUBLAS,
            (
                "router_logits rounded {n}x4",
                "choose_experts sorted {n}x2",
                "grouped_linear gated {p}x{i}",
                "grouped_linear {p}x{h}",
                "sum_pairs {n}x{h}",
            ),
        ),
    ],
)
def test_few_tokens_are_not_sorted_and_no_kernel_depends_on_the_choices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    products: LinearKernel,
    kernels: tuple[str, ...],
) -> None:
    """The norm before the router is that kernel's, unless it has to add what a product has left."""
    config = make(tmp_path, "mixtral")
    assert config.parts.experts is not None
    weights = load_weights(tmp_path, config, torch.bfloat16, CPU)
    names = {"n": num_tokens, "p": 2 * num_tokens, "h": config.hidden_size, "i": config.parts.experts.intermediate_size}
    monkeypatch.setattr(LinearChoice, "measure", lambda choice, linears, *_: choice.set_all(linears, products))
    expected = [kernel.format(**names) for kernel in kernels]
    with fake_triton_kernels() as recorder:
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend = CudaBackend(weights, config, MAX_NUM_TOKENS)
        sizes = (config.qkv_size, config.attn_size)
        qkv, attn_out = (torch.zeros(num_tokens, size, dtype=torch.bfloat16) for size in sizes)
        residual = backend.first(torch.arange(num_tokens), qkv)
        assert launches_of_experts(recorder, lambda: backend.middle(0, attn_out, residual, qkv)) == expected


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"])
def test_with_deterministic_every_number_of_tokens_has_the_same_kernels(tmp_path: Path, variant: str) -> None:
    config = make(tmp_path, variant)
    weights = load_weights(tmp_path, config, torch.float32, CPU)
    experts = next(parts_of_type(RoutedExperts, weights.layers))
    names = []
    with fake_triton_kernels() as recorder:
        from services.dense_worker.backends.cuda_operations import CudaOperations

        operations = CudaOperations(config, MAX_NUM_TOKENS, torch.float32, CPU, is_deterministic=True)
        assert operations.experts.variant_sizes() == [1]
        for num_tokens in (1, 2, 20, MAX_NUM_TOKENS):
            x = torch.randn(num_tokens, config.hidden_size, generator=torch.Generator().manual_seed(1))
            launches = launches_of_experts(recorder, lambda x=x: operations.mix_experts(x, experts, None))
            names.append([launch.rpartition(" ")[0] for launch in launches])
            assert relative_error(operations.mix_experts(x, experts, None), experts.mix(x)) < 1e-5
    assert names == [names[0]] * 4 and any("grouped_linear" in name for name in names[0])


def launches_of_experts(recorder: LaunchRecorder, run: object) -> list[str]:
    recorder.launches.clear()
    with recorder:
        run()  # type: ignore[operator]
    names = ("router_", "choose_", "few_", "grouped_", "sum_")
    return [launch for launch in recorder.launches if launch.startswith(names)]


def test_padding_gets_no_experts_and_changes_no_other_row(tmp_path: Path) -> None:
    config = make(tmp_path, "qwen3_moe")
    weights = load_weights(tmp_path, config, torch.float32, CPU)
    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend = CudaBackend(weights, config, MAX_NUM_TOKENS)
        attn_out = torch.randn(16, config.attn_size, generator=torch.Generator().manual_seed(1))
        results = []
        for num_rows in (5, 16):  # the same five tokens, alone and padded
            backend.begin_step(StepPlan(1, PlanEntries.of((PlanEntry(1, 0, 5, 1),))), num_rows)
            qkv = torch.empty(num_rows, config.qkv_size)
            residual = backend.first(torch.arange(num_rows), qkv)
            residual = backend.middle(0, attn_out[:num_rows], residual, qkv)
            results.append((residual, backend.last(attn_out[:num_rows], residual, torch.tensor([4, 0, 0]))))
        loads = next(parts_of_type(RoutedExperts, weights.layers)).loads
        assert loads.sum() == 2 * 5 * config.parts.experts.num_per_token, "neither padding nor measurements count"
        (alone, logits), (padded, padded_logits) = results
        assert torch.equal(padded[:5], alone) and torch.equal(padded_logits, logits)
        assert torch.isfinite(padded).all()


QUANTIZED = ("fp8 of transformers, dynamic", "fp8 channel, weight only", "fp8 blocks", "int8 channel, token", "awq g32")


@pytest.mark.parametrize("name", [*QUANTIZED, "gptq 8 bits", "mxfp4"])
def test_quantized_experts_run_by_their_kernels(tmp_path: Path, name: str) -> None:
    """Both round to bfloat16 a few times, at different places. An input between two codes of FP8 may become either."""
    make_family_model(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128, head_dim=32)
    quantize_model_dir(tmp_path, FORMATS[name])
    config = load_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.bfloat16, CPU)
    experts = next(parts_of_type(RoutedExperts, weights.layers))
    with fake_triton_kernels() as recorder:
        from services.dense_worker.backends.cuda_operations import CudaOperations

        operations = CudaOperations(config, MAX_NUM_TOKENS, torch.bfloat16, CPU)
        for num_tokens in (1, 20):
            x = torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
            with recorder:
                found = operations.mix_experts(x, experts, None)
            assert relative_error(found.float(), experts.mix(x)) < (6e-2 if "fp8" in name else 2e-2)
    assert sum(launch.startswith("grouped_quantized") for launch in recorder.launches) == 4


def test_what_the_kernels_lack_is_refused_by_name_before_weights_are_loaded(tmp_path: Path) -> None:
    config = make(tmp_path, "qwen3_moe")
    limits, section = Limits(8, 4), ModelSection(path=tmp_path)

    def prepare(changed: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> object:
        model = ResolvedModel(changed, dtype, CUDA, 64)
        with fake_triton_kernels():
            return prepare_backend(DenseSection(), section, model, limits, print).tensorrt

    quantized = replace(config, quantization=on_the_fly_fp8())
    assert prepare(config) is None and prepare(quantized) is None, "torch runs them"
    fp8 = r"experts \(fp8 on the fly, experts_gate_up: ScaledWeight\) do not run on 'cuda:0', because"
    with pytest.raises(ConfigError, match=fp8 + r" the model's dtype is torch.float32"):
        prepare(quantized, torch.float32)
    static = ScaledScheme(Element.FP8, is_per_channel=False, activations=Activations.STATIC)
    inputs = QuantizationConfig("fp8", (SchemeGroup(("Linear",), static),), ())
    with pytest.raises(ConfigError, match=r"ScaledWeight\) .* the 16 projections each have an input of their own"):
        prepare(replace(config, quantization=inputs))
    with pytest.raises(ConfigError, match="experts with the activation 'gelu' do not run on 'cuda:0'"):
        prepare(replace(config, parts=replace(config.parts, activation=Activation.GELU)))
