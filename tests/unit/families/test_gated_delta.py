"""Gated delta layers: published sizes, forms of checkpoints, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config import AttentionSection, Config, ModelSection
from services.common.errors import ConfigError, ModelError
from services.common.kv_cache.format import resolve_kv_cache_format
from services.common.kv_cache.scheme import FP8_SCHEME
from services.common.model_config import load_model_config
from services.common.resolve import resolve_model
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.build import resolve_dense_model
from services.dense_worker.features.drafting.draft_model.load import unsupported_part
from services.dense_worker.kernels.linear.linear import PlainWeight
from services.dense_worker.model.learned import (
    load_recurrence_weights,
    random_recurrence_weights,
)
from services.dense_worker.model.on_the_fly import with_quantization
from services.dense_worker.model.weights import empty_weights, load_weights, weights_hash
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.lora.shapes import adapted_shapes
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.family_models import make_family_model
from tests.support.plans import make_plan

torch.set_num_threads(1)

CPU, META = torch.device("cpu"), torch.device("meta")

# What the config.json of Qwen3-Next-80B-A3B says, besides fields without effect.
PUBLISHED_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# That of Qwen3.5-35B-A3B: the text part of a model of text and images.
PUBLISHED_MOE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "qwen3_5_moe"},
}


def write_config(path: Path, published: dict[str, Any], **fields: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(published | fields))
    return path


# Parameters without those that draft tokens or read images, by the models' cards: 80 and 35 billion.
@pytest.mark.parametrize(("published", "num_parameters"), [(PUBLISHED_NEXT, 80e9), (PUBLISHED_MOE, 35e9)])
def test_published_models(published: dict[str, Any], num_parameters: float, tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, published))
    recurrent = [layer for layer in range(config.num_layers) if layer % 4 != 3]
    assert list(config.recurrent_layers) == recurrent
    first, fourth = config.layer_heads[0], config.layer_heads[3]
    assert (first.kv_size, first.attn_size, first.qkv_size) == (0, 32 * 128, 2 * 16 * 128 + 32 * 128 + 2 * 32)
    assert (fourth.kv_size, fourth.attn_size, fourth.qkv_size) == (2 * 256, 16 * 256, (16 + 2 * 2) * 256)
    assert (config.rope.rotary_dim, config.rope.theta, config.parts.experts.renormalizes) == (64, 1e7, True)
    weights = empty_weights(config, torch.bfloat16, META)
    assert sum(tensor.numel() for _, tensor in weights.named_tensors()) == pytest.approx(num_parameters, rel=0.02)
    conv_bytes = sum(4 * each.conv_dim * each.conv_size for each in config.recurrent_layers.values())
    assert conv_bytes < 8 * 2**20  # in one message, of at most 64 MiB


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"] * 24}, r"layer_types .*sliding_attention"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24, expected a multiple of its .* 16"),
        ({"layer_types": ["full_attention"] * 47}, "layer"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1, expected at least 2"),
        ({"attn_output_gate": False}, "attn_output_gate False, supported: True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', supported: silu"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok 513, expected at most its 512 experts"),
    ],
)
def test_what_no_worker_computes_is_refused_by_name(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load_model_config(write_config(tmp_path, PUBLISHED_NEXT, **fields))


def test_stacked_experts_are_those_of_single_tensors(tmp_path: Path) -> None:
    """As the published files of Qwen3.5 have them, with the names of a model of text and images."""
    path = make_family_model(tmp_path / "single", "qwen3_5_moe")
    config, single = load_model_config(path), load_file(path / "model.safetensors")
    expected = dict(load_weights(path, config, torch.float32, CPU).named_tensors())
    stacked = {name: tensor for name, tensor in single.items() if ".experts." not in name}
    for layer in range(config.num_layers):
        module = f"model.layers.{layer}.mlp.experts"

        def of_all(name: str, module: str = module) -> torch.Tensor:
            return torch.stack([single[f"{module}.{expert}.{name}.weight"] for expert in range(5)])

        stacked[f"{module}.gate_up_proj"] = torch.cat((of_all("gate_proj"), of_all("up_proj")), dim=1)
        stacked[f"{module}.down_proj"] = of_all("down_proj")
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stacked.items()}
    text = json.loads((path / "config.json").read_text())
    other = write_config(tmp_path / "stacked", PUBLISHED_MOE, text_config=text)
    save_file(wrapped | {"mtp.fc.weight": torch.ones(2), "model.visual.x": torch.ones(2)}, other / "model.safetensors")
    assert load_model_config(other) == config
    found = load_weights(other, config, torch.float32, CPU)
    for name, tensor in found.named_tensors():
        assert torch.equal(tensor, expected[name]), name
    assert load_recurrence_weights(other, config) == load_recurrence_weights(path, config)

    six = {name: each.new_zeros(6, *each.shape[1:]) if "experts." in name else each for name, each in wrapped.items()}
    save_file(six, other / "model.safetensors")
    with pytest.raises(ModelError, match=r"gate_up_proj in .* has shape \(6, 48, 32\), .* calls for \(5, 48, 32\)"):
        load_weights(other, config, torch.float32, CPU)


def backends(path: Path) -> Iterator[DenseBackend]:
    """By torch, and by `CudaOperations` with its kernels replaced by torch."""
    config = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    yield TorchBackend(weights)
    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        yield CudaBackend(weights, config, 16)


@torch.inference_mode()
def test_rows_that_need_logits_keep_their_own_gates(tmp_path: Path) -> None:
    """The last layer computes these rows alone. Attention and recurrences give random numbers here."""
    path = make_family_model(tmp_path, "qwen3_next")
    config, num_tokens = load_model_config(path), 6
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(96, (num_tokens,), generator=generator)
    attn_out = torch.randn(config.num_layers, num_tokens, config.attn_size, generator=generator)
    all_rows, some_rows = torch.arange(num_tokens), torch.tensor([4, 1])
    found = []
    for backend in backends(path):
        for rows in (all_rows, some_rows, all_rows):
            backend.begin_step(make_plan([(1, num_tokens, 0)]), num_tokens)
            qkv = torch.full((num_tokens, config.qkv_size), torch.nan)
            residual = backend.first(token_ids, qkv)
            for layer in range(config.num_layers - 1):
                residual = backend.middle(layer, attn_out[layer].clone(), residual, qkv)
            found.append(backend.last(attn_out[-1].clone(), residual, rows))
    expected = found[0]
    for logits, rows in zip(found, (all_rows, some_rows, all_rows) * 2, strict=True):
        torch.testing.assert_close(logits, expected[rows], rtol=1e-5, atol=1e-5)
    assert (expected[some_rows] - expected[:2]).abs().max() > 0.1


def test_weights_may_be_made_fp8_while_loading(tmp_path: Path) -> None:
    """Also those whose rows get another order."""
    for variant in ("qwen3_next", "qwen3_5_moe"):
        path = make_family_model(tmp_path / variant, variant, hidden_size=64)
        config = load_model_config(path)
        plain = load_weights(path, config, torch.float32, CPU)
        weights = load_weights(path, with_quantization(config, "fp8", path), torch.float32, CPU)
        for layer, of_plain in zip(weights.layers, plain.layers, strict=True):
            projection, exact = layer.before.projection, of_plain.before.projection
            assert not isinstance(projection.weight, PlainWeight)
            x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
            difference = projection.weight.multiply(x, None) - exact.weight.multiply(x, None)
            assert 0 < difference.norm() < 0.06 * exact.weight.multiply(x, None).norm()


def test_weights_of_recurrences_in_a_checkpoint(tmp_path: Path) -> None:
    path = make_family_model(tmp_path, "qwen3_next")
    config, tensors = load_model_config(path), load_file(path / "model.safetensors")
    found = load_recurrence_weights(path, config)
    assert list(found) == [0, 2]
    for layer, weights in found.items():
        stored = {name: tensors[f"model.layers.{layer}.linear_attn.{name}"] for name in ("A_log", "dt_bias")}
        conv = tensors[f"model.layers.{layer}.linear_attn.conv1d.weight"]
        assert np.array_equal(np.frombuffer(weights.conv, "<f4").reshape(80, 4), conv[:, 0].numpy())
        assert (weights.a_log, weights.dt_bias) == tuple(tuple(each.tolist()) for each in stored.values())

    for name, value, words in (
        ("A_log", None, "lacks model.layers.2.linear_attn.A_log"),
        ("dt_bias", torch.ones(3), r"dt_bias in .* has shape \(3,\), config.json calls for \(4,\)"),
        ("conv1d.weight", torch.full((80, 1, 4), torch.nan), "conv1d.weight in .* has nan, expected finite"),
    ):
        changed = tensors | {f"model.layers.2.linear_attn.{name}": value}
        save_file({key: each for key, each in changed.items() if each is not None}, path / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            load_recurrence_weights(path, config)


def test_the_hash_of_the_weights_covers_recurrences(tmp_path: Path) -> None:
    """The tensors lie between its samples."""
    path = make_family_model(tmp_path, "qwen3_next")
    config = load_model_config(path)
    names = [f"model.layers.0.linear_attn.{name}" for name in ("A_log", "dt_bias", "conv1d.weight")]
    small = {name: load_file(path / "model.safetensors")[name] for name in names}
    hashes = set()
    for changed in (None, *names):
        for other in small.values():
            other.view(-1)[-1] = 0.25
        if changed is not None:
            small[changed].view(-1)[-1] = 0.5
        save_file({"a": torch.zeros(1 << 20), **small, "z": torch.zeros(1 << 20)}, path / "model.safetensors")
        hashes.add(weights_hash(path, config))
    assert len(hashes) == 4


def test_random_recurrences_depend_on_the_seed_and_keep_a_part_of_the_state(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, PUBLISHED_NEXT), num_layers=4)
    found = random_recurrence_weights(config, 3)
    assert found == random_recurrence_weights(config, 3) != random_recurrence_weights(config, 4)
    for weights in found.values():
        rates = torch.tensor(weights.a_log).exp() * torch.nn.functional.softplus(torch.tensor(weights.dt_bias))
        decays = (-rates).exp()  # of a token with a = 0
        assert 0.49 < decays.min() < 0.6 and 0.9 < decays.max() < 0.97


@pytest.mark.parametrize("published", [PUBLISHED_NEXT, PUBLISHED_MOE])
def test_what_recurrent_layers_lack_is_refused_by_name(published: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path, published)
    section, family = ModelSection(path=path), published["model_type"]
    model = resolve_model(section, "cpu")
    for speculation in ("ngram", "suffix"):
        config = Config(model=section, scheduler={"speculation": speculation})
        with pytest.raises(
            ConfigError, match=f"speculation is '{speculation}', but .*states of recurrent layers.*{family}"
        ):
            resolve_dense_model(config)
    with pytest.raises(ConfigError, match=f"attention.window is 64 .*{family}.* has recurrent layers"):
        resolve_model(section, "cpu", AttentionSection(window=64, sink_tokens=4))
    for dtype, scheme in (("fp8", None), ("int8", None), ("auto", FP8_SCHEME)):
        asking = replace(model, kv_cache_scheme=scheme)
        with pytest.raises(ConfigError, match=f"kv_cache_dtype is '{dtype}', .*beside recurrent layers of '{family}"):
            resolve_kv_cache_format(AttentionSection(kv_cache_dtype=dtype), asking)
    assert resolve_kv_cache_format(AttentionSection(kv_cache_dtype="model"), model) == "model"
    with pytest.raises(ConfigError, match=f"recurrent layers of '{family}.*' are not exported to ONNX and TensorRT"):
        export_networks(model.config, torch.bfloat16)
    with pytest.raises(ConfigError, match=f"max_loras is set, but {family}.* has no adapters here"):
        adapted_shapes(model.config)
    without_experts = replace(model.config, parts=replace(model.config.parts, experts=None))
    assert unsupported_part(without_experts) == "recurrent layers"
