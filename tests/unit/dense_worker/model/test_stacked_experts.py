"""gpt-oss with MXFP4 experts as published: a tensor of codes and one of scales for all experts of a layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.common.errors import ModelError
from services.common.model_config import load_model_config
from services.common.quantization.schemes import on_the_fly_fp8
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear
from services.dense_worker.kernels.linear.quantized.mxfp4_weight import Mxfp4Weight
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.model.weights import load_weights
from services.dense_worker.parameters import parts_of_type
from tests.support.dense.family_models import make_family_model
from tests.support.dense.whole_model import CPU, WholeModel
from tests.support.quantized.stacked_experts import quantize_experts, write_model

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
# Both compute in float32 with the same values, in another order of sums.
BOUND = 2e-5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_family_model(tmp_path / "model", "gpt_oss")


@torch.inference_mode()
def test_logits_equal_those_of_transformers(path: Path, tmp_path: Path) -> None:
    same = make_family_model(tmp_path / "plain", "gpt_oss")
    write_model(same, quantize_experts(path))
    prompt = torch.randint(3, 96, (1, 21), generator=torch.Generator().manual_seed(2))
    truth = AutoModelForCausalLM.from_pretrained(same, dtype=torch.float32).eval()
    expected = truth(prompt, use_cache=False).logits[0]
    model = WholeModel(path)
    model.open(1, prompt[0].tolist())
    (found,) = model.step((1, 21, 0))
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()
    stacked = list(parts_of_type(ExpertLinear, model.weights))
    assert len(stacked) == 4 and all(isinstance(each.weight, Mxfp4Weight) for each in stacked)


@torch.inference_mode()
def test_unquantized_experts_become_fp8_while_they_load(path: Path) -> None:
    config = load_model_config(path)
    plain = load_weights(path, config, torch.float32, CPU)
    quantized = load_weights(path, dataclasses.replace(config, quantization=on_the_fly_fp8()), torch.float32, CPU)
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(3))
    pairs = zip(parts_of_type(ExpertLinear, plain), parts_of_type(ExpertLinear, quantized), strict=True)
    for exact, rounded in pairs:
        assert isinstance(rounded.weight, ScaledWeight)
        if exact.in_features == config.hidden_size:
            for expert in range(exact.num_experts):
                expected, found = exact.multiply(expert, x), rounded.multiply(expert, x)
                assert (found - expected).norm() < 0.06 * expected.norm()  # e4m3 rounds both to 4 bits


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{GATE_UP}_scales": None}, r"lacks 1 tensors .*gate_up_proj\.weight_scales"),
        ({f"{GATE_UP}_blocks": None}, r"lacks 1 tensors .*gate_up_proj\.weight_blocks"),
        ({f"{GATE_UP}_bias": None}, r"lacks 1 tensors .*gate_up_proj\.bias"),
        ({"model.layers.0.mlp.router.bias": None}, r"lacks 1 tensors .*mlp\.router\.bias"),
        ({f"{GATE_UP}_blocks": torch.zeros(5, 128, 16, dtype=torch.uint8)}, r"has shape \(5, 128, 16\)"),
        ({f"{GATE_UP}_blocks": torch.zeros(5, 128, 1, 16, dtype=torch.int8)}, r"has dtype I8"),
        ({f"{GATE_UP}_scales": torch.full((5, 128, 1), 255, dtype=torch.uint8)}, r"the scale NaN .* at \[0, 0, 0\]"),
        ({f"{GATE_UP}_bias": torch.zeros(640)}, r"has shape \(640,\), config.json calls for \(5, 128\)"),
        ({f"{GATE_UP}_zeros": torch.zeros(1)}, r"gate_up_proj_zeros, for which config.json has no place"),
        ({GATE_UP: torch.zeros(5, 32, 128)}, r"gate_up_proj\.weight, for which config.json has no place"),
    ],
)
def test_a_damaged_checkpoint_is_refused(path: Path, changes: dict[str, torch.Tensor | None], words: str) -> None:
    quantize_experts(path)
    stored = load_file(path / "model.safetensors") | changes
    save_file({name: each for name, each in stored.items() if each is not None}, path / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        load_weights(path, load_model_config(path), torch.float32, CPU)


def test_features_that_no_block_of_32_divides_are_refused(tmp_path: Path) -> None:
    path = make_family_model(tmp_path, "gpt_oss", intermediate_size=48)
    write_model(path, load_file(path / "model.safetensors"), quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match=r"experts\.down_proj has in_features 48, expected a multiple of 32"):
        load_weights(path, load_model_config(path), torch.float32, CPU)
