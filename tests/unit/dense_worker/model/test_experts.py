"""Mixtures of experts: their config, quantized experts, missing ones, and where they are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.common.errors import ConfigError, ModelError
from services.common.model_config import load_model_config
from services.common.quantization.schemes import on_the_fly_fp8
from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.linear.linear import PlainWeight
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.model.expert_mlp import ExpertMlp
from services.dense_worker.model.weights import load_weights
from services.dense_worker.parameters import parts_of_type, tensors_by_name
from services.dense_worker.tensorrt.onnx_segments import export_networks
from tests.support.dense.family_models import make_family_model
from tests.support.dense.steps import relative_error
from tests.support.dense.whole_model import WholeModel
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
PROMPT = torch.randint(3, 96, (21,), generator=torch.Generator().manual_seed(5)).tolist()
WIDTHS = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32}  # groups of 32 divide all
EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **WIDTHS)


def copy_model(path: Path, to: Path, **fields: Any) -> Path:
    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | fields))
    return to


def logits(path: Path) -> torch.Tensor:
    model = WholeModel(path)
    model.open(1, PROMPT)
    (found,) = model.step((1, len(PROMPT), 0))
    return found


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (3,)),
    ],
)
def test_layers_with_experts_are_those_of_transformers(
    tmp_path: Path, fields: dict[str, Any], layers: tuple[int, ...]
) -> None:
    make_family_model(tmp_path, "qwen3_moe", num_hidden_layers=4, **fields)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert tuple(i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")) == layers
    config = load_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32, CPU)
    assert tuple(i for i, layer in enumerate(weights.layers) if any(parts_of_type(ExpertMlp, layer))) == layers


def test_fields_of_published_files_that_say_what_the_class_does_anyway(path: Path, tmp_path: Path) -> None:
    fields = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "mlp_only_layers": []}
    assert load_model_config(copy_model(path, tmp_path / "model", **fields)) == load_model_config(path)


@pytest.mark.parametrize("name", ["gptq g32, act-order", "awq g32", "mxfp4"])
def test_quantized_experts_mean_what_the_formula_of_their_format_says(path: Path, tmp_path: Path, name: str) -> None:
    plain_dir, quantized_dir = copy_model(path, tmp_path / "plain"), copy_model(path, tmp_path / "quantized")
    plain = quantize_model_dir(quantized_dir, FORMATS[name])
    assert f"{EXPERT}.gate_proj.weight" not in load_file(quantized_dir / "model.safetensors")
    save_file(plain, plain_dir / "model.safetensors")
    truth = AutoModelForCausalLM.from_pretrained(plain_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = truth(torch.tensor([PROMPT])).logits[0]
    assert relative_error(logits(quantized_dir), expected) < 1e-5


def test_fp8_on_the_fly_quantizes_experts_and_not_the_router(path: Path) -> None:
    config = load_model_config(path)
    plain = load_weights(path, config, torch.float32, CPU)
    object.__setattr__(config, "quantization", on_the_fly_fp8())
    weights = load_weights(path, config, torch.float32, CPU)
    expected, found = (list(parts_of_type(ExpertMlp, each.layers)) for each in (plain, weights))
    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before.routed.router.weight.data, after.routed.router.weight.data)
        for linears in zip(
            (before.routed.gate_up, before.routed.down), (after.routed.gate_up, after.routed.down), strict=True
        ):
            assert [type(linear.weight) for linear in linears] == [PlainWeight, ScaledWeight]


@pytest.mark.parametrize("name", [None, "gptq g32, act-order", "awq g32", "mxfp4"])
def test_the_weights_of_all_experts_are_one_tensor_that_each_expert_sees_its_rows_of(
    path: Path, tmp_path: Path, name: str | None
) -> None:
    stored = copy_model(path, tmp_path / "model")
    plain = load_file(stored / "model.safetensors")
    if name is not None:
        plain |= quantize_model_dir(stored, FORMATS[name])
    weights = load_weights(stored, load_model_config(stored), torch.float32, CPU)
    linear = weights.layers[1].after.mlp.routed.gate_up
    whole = tensors_by_name(linear.weight)
    for expert in range(8):
        for key, share in tensors_by_name(linear.weight.share(expert, 8)).items():
            assert share.nbytes * 8 == whole[key].nbytes
            assert share.data_ptr() == whole[key].data_ptr() + expert * share.nbytes
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    for expert in (0, 2, 7):
        names = (f"model.layers.1.mlp.experts.{expert}.{part}.weight" for part in ("gate_proj", "up_proj"))
        expected = torch.cat([x @ plain[each].float().t() for each in names], dim=1)
        torch.testing.assert_close(linear.multiply(expert, x), expected, rtol=1e-4, atol=1e-4)


def test_all_layers_but_the_last_count_the_tokens_of_each_expert(tmp_path: Path) -> None:
    make_family_model(tmp_path, "qwen3_moe", num_hidden_layers=3)
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        router_logits = truth(torch.tensor([PROMPT]), output_router_logits=True).router_logits
    model = WholeModel(tmp_path)
    model.open(1, PROMPT)
    model.step((1, 9, 0))
    model.step((1, len(PROMPT) - 9, 9))
    *counted, last = (next(parts_of_type(RoutedExperts, layer)).loads for layer in model.weights.layers)
    for loads, logits in zip(counted, router_logits[:2], strict=True):
        chosen = logits.topk(model.config.parts.experts.num_per_token).indices
        assert torch.equal(loads, torch.bincount(chosen.flatten(), minlength=len(loads)))
    assert last is None


@pytest.mark.parametrize(
    ("fields", "left_out", "message"),
    [
        ({}, f"{EXPERT}.up_proj.weight", rf"lacks 1 tensors .*{EXPERT}\.up_proj\.weight"),
        ({}, "model.layers.0.mlp.gate.weight", r"lacks 1 tensors .*layers\.0\.mlp\.gate\.weight"),
        ({"num_local_experts": 7}, None, r"experts\.7\..*, for which config\.json has no place"),
        ({"num_local_experts": 9}, None, r"lacks 6 tensors .*experts\.8\.gate_proj"),
        ({"moe_intermediate_size": 32}, None, r"experts\.0\.gate_proj\.weight .*\(64, 128\).*calls for \(32, 128\)"),
    ],
)
def test_experts_that_do_not_fit_the_config_are_named(
    path: Path, tmp_path: Path, fields: dict[str, Any], left_out: str | None, message: str
) -> None:
    changed = copy_model(path, tmp_path / "model", **fields)
    file = changed / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != left_out}, file)
    with pytest.raises(ModelError, match=message):
        load_weights(changed, load_model_config(changed), torch.float32, CPU)


def test_onnx_is_refused_by_name(path: Path) -> None:
    config = load_model_config(path)
    with pytest.raises(ConfigError, match="experts of 'qwen3_moe' are not exported to ONNX"):
        export_networks(config, torch.float32)
