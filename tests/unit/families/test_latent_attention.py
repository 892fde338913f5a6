"""DeepSeek's latent attention: sizes of published models, bytes of the cache, FP8, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.make_spec import make_cache_spec
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.attn_worker.layers.select import select_backend
from services.common.config import AttentionSection, ModelSection
from services.common.errors import ConfigError, ModelError
from services.common.kv_cache.scheme import FP8_SCHEME
from services.common.model_config import load_model_config
from services.common.resolve import ResolvedModel, resolve_model
from services.dense_worker.model.weights import empty_weights, load_weights
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.lora.shapes import adapted_shapes
from tests.support.dense.family_models import make_family_model
from tests.support.dense.whole_model import WholeModel

torch.set_num_threads(1)
CPU, META = torch.device("cpu"), torch.device("meta")
BOUND = 2e-5  # as in test_families.py
PROMPT = torch.randint(3, 96, (21,), generator=torch.Generator().manual_seed(5)).tolist()

# What the config.json of DeepSeek-V3 says, besides fields without effect.
PUBLISHED_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# That of V2-Lite, where it says something else.
PUBLISHED_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": PUBLISHED_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


def resolved(path: Path, **fields: Any) -> ResolvedModel:
    (path / "config.json").write_text(json.dumps(PUBLISHED_V3 | fields))
    return resolve_model(ModelSection(path=path), "cpu")


# Parameters by the reports: 671 billion (arXiv:2412.19437) and 15.7 billion (arXiv:2405.04434). A token takes 512 + 64
# numbers in each layer. Scores are divided by the root of 128 + 64, times the square of 0.1 * mscale * ln(40) + 1.
@pytest.mark.parametrize(
    ("fields", "num_parameters", "token_bytes", "scale"),
    [
        ({}, 671e9, (512 + 64) * 2 * 61, 192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2),
        (PUBLISHED_V2_LITE, 15.7e9, (512 + 64) * 2 * 27, 192**-0.5 * (0.0707 * 3.6888794541139363 + 1) ** 2),
    ],
)
def test_published_models(
    fields: dict[str, Any], num_parameters: float, token_bytes: int, scale: float, tmp_path: Path
) -> None:
    model = resolved(tmp_path, **fields)
    config = model.config
    assert (config.num_kv_heads, config.head_dim, config.rope.rotary_dim) == (1, 576, 64)
    assert config.attention.scale == pytest.approx(scale, rel=1e-12)
    weights = empty_weights(replace(config, quantization=None), torch.bfloat16, META)
    assert sum(tensor.numel() for _, tensor in weights.named_tensors()) == pytest.approx(num_parameters, rel=1e-3)
    assert KVCacheSpec.of_model(config, torch.bfloat16, 1, 16).token_bytes == token_bytes


def test_v3_is_read_in_its_published_precision(tmp_path: Path) -> None:
    """Blocks of FP8, also where a matrix ends within a block, and kv_b_proj, which is dequantized."""
    config = load_model_config(resolved_path(tmp_path), num_layers=4)
    weights = dict(empty_weights(config, torch.bfloat16, META).named_tensors())
    down, scales = weights["layers.3.qkv_down_weight"], weights["layers.3.qkv_down_weight_scale"]
    assert (down.dtype, down.shape, scales.shape) == (torch.float8_e4m3fn, (1536 + 576, 7168), (12 + 5, 56))
    assert (weights["layers.3.latent_keys"].dtype, weights["layers.3.router"].dtype) == (torch.bfloat16,) * 2


def resolved_path(path: Path) -> Path:
    resolved(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_holds_one_vector_for_each_token_and_layer(dtype: torch.dtype, tmp_path: Path) -> None:
    """kv_lora_rank + qk_rope_head_dim numbers, and no values: also in the memory that is allocated."""
    make_family_model(tmp_path, "deepseek_v2")
    model = resolve_model(ModelSection(path=tmp_path, dtype=str(dtype).removeprefix("torch.")), "cpu")
    spec = make_cache_spec(AttentionSection(num_blocks=7, block_size=4), model)
    assert spec.token_bytes == (16 + 8) * dtype.itemsize * 2
    storage = BlockStorage(spec, spec.token_major_block, CPU)
    assert sum(layer.nbytes for layer in storage.layers) == (7 + 1) * 4 * spec.token_bytes
    TorchAttention(BackendSetup(model.config, spec, dtype, CPU, 128))


def test_kv_b_proj_in_blocks_of_fp8_is_dequantized(tmp_path: Path) -> None:
    """The same logits as by transformers with the dequantized matrix. No other layer is quantized."""
    sizes = {"kv_lora_rank": 160, "qk_nope_head_dim": 24, "v_head_dim": 16}  # [160, 160]: four blocks
    plain, quantized = make_family_model(tmp_path / "plain", "deepseek_v2", **sizes), tmp_path / "quantized"
    tensors = load_file(plain / "model.safetensors")
    codes: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
        codes[name] = (tensors[name] * 300).to(torch.float8_e4m3fn)
        scales = codes[f"{name}_scale_inv"] = torch.rand(2, 2) / 200 + 1 / 300
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :160]
        tensors[name] = codes[name].float() * whole
    save_file(tensors, plain / "model.safetensors")
    shutil.copytree(plain, quantized)
    save_file(tensors | codes, quantized / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    others = ["lm_head", "mlp", "q_proj", "kv_a_proj_with_mqa", "o_proj"]
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": others}
    (quantized / "config.json").write_text(json.dumps(raw | {"quantization_config": method}))

    model = WholeModel(quantized)
    model.open(1, PROMPT)
    (found,) = model.step((1, len(PROMPT), 0))
    with torch.inference_mode():
        truth = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        expected = truth(torch.tensor([PROMPT])).logits[0]
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()

    (quantized / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match=r"kv_b_proj is quantized as .*, supported: unquantized, or FP8 in blocks"):
        load_weights(quantized, load_model_config(quantized), torch.float32, CPU)


def test_layers_that_draft_tokens_are_not_read(tmp_path: Path) -> None:
    """V3's files have one after the last layer, and config.json says so. Any other is an error, and so is its name."""
    path = make_family_model(tmp_path, "deepseek_v3")
    config, file = load_model_config(path), tmp_path / "model.safetensors"
    tensors, expected = load_file(file), dict(load_weights(path, config, torch.float32, CPU).named_tensors())
    drafting = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.enorm.weight": torch.ones(32)}
    save_file(tensors | drafting, file)
    for name, tensor in load_weights(path, config, torch.float32, CPU).named_tensors():
        assert torch.equal(tensor, expected[name]), name
    load_weights(path, load_model_config(path, num_layers=1), torch.float32, CPU)
    for layer in (1, 3):
        save_file(tensors | {f"model.layers.{layer}.eh_proj.weight": torch.ones(32, 64)}, file)
        with pytest.raises(ModelError, match=rf"layers\.{layer}\.eh_proj\.weight, for which config.json has no place"):
            load_weights(path, config, torch.float32, CPU)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8", "auto"])
def test_a_cache_of_8_bits_is_refused_by_name(kv_cache_dtype: str, tmp_path: Path) -> None:
    model = replace(resolved(tmp_path), kv_cache_scheme=FP8_SCHEME)
    make_cache_spec(AttentionSection(kv_cache_dtype="model"), model)
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype is '{kv_cache_dtype}', .*latent vectors of 'deepseek_v3'"):
        make_cache_spec(AttentionSection(kv_cache_dtype=kv_cache_dtype), model)


def test_a_gpu_with_enough_shared_memory_runs_the_published_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of compute capability 9.0 is enough, that of 8.0 and 8.9 is not."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "its name")
    for fields in ({}, PUBLISHED_V2_LITE):
        on_gpu = replace(resolved(tmp_path, **fields), device=torch.device("cuda", 0))
        for num_bytes in (232448, 166912, 101376):
            properties = SimpleNamespace(shared_memory_per_block_optin=num_bytes)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
            if num_bytes == 232448:
                assert select_backend(AttentionSection(), on_gpu) == "triton"
                continue
            with pytest.raises(ConfigError, match=rf"need 226304 bytes of shared memory, its name has {num_bytes}"):
                select_backend(AttentionSection(), on_gpu)


def test_what_latent_attention_lacks_is_refused_by_name(tmp_path: Path) -> None:
    model = resolved(tmp_path, **PUBLISHED_V2_LITE)
    wide = replace(resolved(tmp_path, **PUBLISHED_V2_LITE | {"kv_lora_rank": 513}), device=torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=r"'cuda:0', but its kernels hold at most 512 latent .* has kv_lora_rank 513"):
        select_backend(AttentionSection(), wide)
    with pytest.raises(ConfigError, match="latent attention of 'deepseek_v2' is not exported to ONNX and TensorRT"):
        export_networks(model.config, torch.bfloat16)
    with pytest.raises(ConfigError, match="deepseek_v2 has no adapters here"):
        adapted_shapes(model.config)
    without_experts = replace(model.config, parts=replace(model.config.parts, experts=None))
    with pytest.raises(ConfigError, match="without experts or latent attention"):
        adapted_shapes(without_experts)
