"""What families read from a config.json besides sizes, and what they refuse. The truth is transformers' models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from services.common.errors import ModelError
from services.common.families.alibi import alibi_slopes, bfloat16, mpt_alibi_slopes
from services.common.families.names import NAMES
from services.common.families.registry import FAMILIES, TEXT_PARTS
from services.common.model_config import load_model_config
from services.dense_worker.model.weights import empty_weights, load_weights
from tests.support.dense.encoder_decoder_models import ENCODER_DECODERS
from tests.support.dense.family_models import VARIANTS, make_family_model

CPU = torch.device("cpu")


def rewrite(path: Path, **fields: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


def test_every_family_has_a_page_of_names_and_a_random_model() -> None:
    older = {"llama", "mistral", "qwen2", "qwen3"}  # compared with transformers elsewhere
    of_encoders = {family for family, _ in ENCODER_DECODERS.values()}
    seeing = {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}  # compared together with their towers
    compared = {family for family, _ in VARIANTS.values()} | older | of_encoders | seeing
    assert set(NAMES) == set(FAMILIES) == compared


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("granite", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0, which changes the computation"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv 8.0, which changes the computation.*'olmo2'"),
        ("olmo2", {"num_experts": 64}, "num_experts 64, which changes the computation"),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta 10000.0, but 500000.0 in layers of full_attention"),
        ("olmo3", {"sliding_window": None}, "layer_types 'sliding_attention'"),
        ("exaone4", {"sliding_window": 0}, "sliding_window 0, expected at least 1"),
        ("exaone4", {"attention_bias": True}, "attention_bias True, supported: False"),
        ("ernie4_5", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "factor 0.5, supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True, supported: False"),
        ("gemma2", {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers \[1\], expected one number for each of its 2 layers"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True, supported: False"),
        ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}}, "0.4"),
        ("glm", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.7}}, "0.7"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm True, supported: False"),
        ("bloom", {"seq_length": "2048"}, "seq_length '2048', expected a whole number"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi False, supported: True"),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "attn_config.clip_qkv 6.0, supported: None"),
        ("mpt", {"logit_scale": 0.5}, "logit_scale 0.5, supported: none"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx True, supported: False"),
        ("gpt2", {"activation_function": "mish"}, "activation_function 'mish', supported: silu"),
        ("mpt-grouped", {"attn_config": {"attn_type": "grouped_query_attention"}}, "kv_n_heads None, expected a whole"),
        ("baichuan-13b", {"model_max_length": None}, "model_max_length None, expected a whole number"),
        ("chatglm", {"position_encoding_2d": True}, "position_encoding_2d True, supported: False"),
        ("chatglm", {"add_bias_linear": True}, "add_bias_linear True, supported: False"),
        ("chatglm", {"rope_ratio": -1}, "rope_ratio -1, expected a number above 0"),
        ("internlm", {"rotary": {"type": "linear", "base": 1e4}}, "type 'linear', supported: origin, dynamic"),
        ("internlm2", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type 'ntk', supported: default"),
        ("qwen", {"visual": {"width": 1664}}, "has visual: this is Qwen-VL, of which transformers has no class"),
        ("chatglm", {"vision_config": {"width": 1792}}, "has vision_config: this is GLM-4V, of which"),
        ("qwen", {"no_bias": False}, "no_bias False, supported: True"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct 0.5, supported: 1.0"),
        ("qwen", {"intermediate_size": 97}, "intermediate_size 97, expected an even number"),
        ("nemotron_h", {"layer_types": ["linear_attention", "moe"] * 3}, "layers_block_type .*'moe'.*expected linear"),
        ("nemotron_h", {"layer_types": ["mlp", "full_attention"] * 3}, "layers_block_type .*after each .* one mlp"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu', supported: silu"),
        ("bamba", {"mamba_n_groups": 3}, "number of heads 8, expected a multiple of its number of groups 3"),
        ("bamba", {"mamba_d_conv": 1}, "the convolution's size 1, expected at least 2"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi', supported: rope"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache 0, expected a whole number"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace 1, supported: 0"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias True, supported: False"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0, supported: none"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func 'softmax', supported: sigmoid"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types .*expected dense, then"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace 2, supported: 1"),
        ("granitemoeshared", {"shared_intermediate_size": -1}, "shared_intermediate_size -1, expected a whole number"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act 'gelu', supported: silu"),
        ("mamba2", {"conv_kernel": 0}, "conv_kernel 0, expected a whole number"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias False, supported: True"),
        ("lfm2_moe", {"num_dense_layers": 3}, "num_dense_layers 3, expected less than its 3 layers"),
        ("ministral", {"sliding_window": None}, "layer_types 'sliding_attention'"),
        ("gptj", {"rotary_dim": 10}, "rotary_dim 10, expected an even part of the head's 8 dimensions"),
        ("gptj", {"rotary_dim": 0}, "rotary_dim 0, expected a whole number from 1 to"),
        ("gpt_neo", {"window_size": 0}, "window_size 0, expected a whole number from 1 to"),
        ("gpt_neo", {"attention_layers": ["global", "near"]}, "attention_layers .*'near'.*expected 2 of global"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention True, supported: False"),
        ("opt", {"layer_norm_elementwise_affine": False}, "elementwise_affine False, supported: True"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim 0, expected a whole number"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False, supported: True"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax', supported: sigmoid"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list \[1, 0\], supported: \[1, 1\]"),
        ("minimax_m2", {"num_local_experts": 1}, "num_local_experts 1, expected at least 2"),
        ("granitemoe", {"num_experts_per_tok": 6}, "num_experts_per_tok 6, expected at most its 5 experts"),
        ("granitemoe", {"n_shared_experts": 1}, "n_shared_experts 1, supported: 0"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit 0.0, expected a number above 0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu', supported: silu"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token 2, but also num_experts_per_tok 3"),
        ("gpt_oss", {"num_experts_per_tok": 6}, "num_experts_per_tok 6, expected at most its 5 experts"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all', supported: vision"),
        ("gemma4", {"enable_moe_block": True, "num_experts": 4}, "top_k_experts None, expected a whole number"),
        ("gemma4-moe", {"top_k_experts": 7}, "top_k_experts 7, expected at most its 6 experts"),
        ("gemma4-shared", {"vocab_size_per_layer_input": 95}, "vocab_size_per_layer_input 95, expected at least .* 96"),
        ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers 3, expected less than its 3 layers, and before"),
        ("gemma4-shared", {"num_kv_shared_layers": 4}, "num_kv_shared_layers 4, expected less than its 5 layers, and"),
        ("gemma4", {"per_layer_config": {"1": {"sliding_window": 4}}}, r"\['sliding_window'\], supported: head_dim"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 12}}}, "head_dim of layer 1 12, but 8 in others"),
        ("gemma4", {"per_layer_config": {"0": {"num_key_value_heads": 3}}}, "num_key_value_heads of layer 0 3"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True, supported: False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc', supported: greedy, group_limited_greedy"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid', supported: softmax"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2, supported: 1"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True, supported: False"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias True, supported with q_lora_rank only"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads 2, expected its num_attention_heads 4"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank 0, expected a whole number from 1 to"),
        ("deepseek_v2", {"rope_interleave": False}, "rope_interleave False, supported: True"),
        ("deepseek_v2", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar 8, which changes the computation"),
        ("deepseek_v2-groups", {"n_group": 5}, "n_group 5, expected equal groups of at least 1 of its 12 experts"),
        ("deepseek_v2-groups", {"topk_group": 5}, "topk_group 5, expected at most 4"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy', supported: noaux_tc"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax', supported: sigmoid"),
        ("deepseek_v3", {"n_group": 12}, "n_group 12, expected equal groups of at least 2 of its 12 experts"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers -1, expected a number of layers"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank 0, expected a whole number"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "'su', supported: default"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2, supported: 1"),
        ("falcon-new", {"parallel_attn": False}, "parallel_attn False, supported: True"),
        ("gpt_neox", {"hidden_size": 30}, "hidden size is not divisible"),
        ("falcon-new", {"layer_norm_epsilon": None}, "layer_norm_epsilon None, expected a finite number"),
        ("gpt2", {"n_inner": -1}, "n_inner -1, expected a whole number from 1 to"),
        ("mpt", {"attn_config": {"alibi": True, "alibi_bias_max": -8}}, "alibi_bias_max -8, expected a number above 0"),
        (
            "mpt",
            {"attn_config": {"alibi": True, "softmax_scale": float("nan")}},
            "softmax_scale nan, expected a",
        ),
        ("bloom", {"seq_length": 10**18}, "seq_length 1000000000000000000, expected a whole number from 1 to"),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": None}},
            "rope_parameters.full_attention is None, expected",
        ),
        ("gemma4", {"rope_parameters": {}}, "rope_parameters.full_attention is None, expected an object"),
    ],
)
def test_a_field_that_changes_the_computation_is_refused(
    variant: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = rewrite(make_family_model(tmp_path, variant), **fields)
    with pytest.raises(ModelError, match=message):
        load_model_config(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_dropout": 0.5, "initializer_range": 3.0, "use_cache": False},
        {"attn_logit_softcapping": None, "residual_multiplier": 1.0, "num_experts": 0, "clip_qkv": None},
        {"unsloth_version": "2026.1", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}, "_name_or_path": "a/b"},
    ],
)
def test_fields_without_effect_are_accepted(fields: dict[str, Any], tmp_path: Path) -> None:
    path = make_family_model(tmp_path, "olmo2")
    expected = load_model_config(path)
    assert load_model_config(rewrite(path, **fields)) == expected


def test_a_multiplier_that_is_null_is_like_one_that_is_missing(tmp_path: Path) -> None:
    path = make_family_model(tmp_path, "granitemoe")
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    found = load_model_config(rewrite(path, **dict.fromkeys(names)))
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if name not in names}))
    assert load_model_config(path) == found
    assert (found.parts.embedding_multiplier, found.attention.scale) == (1.0, 1.0)


@pytest.mark.parametrize("num_heads", [1, 4, 6, 8, 12, 71])
def test_alibi_slopes_are_those_of_transformers(num_heads: int) -> None:
    ones = torch.ones(1, 2)
    by_falcon = falcon_alibi(ones, num_heads, torch.float32)[:, 0, 1].tolist()  # the biases of position 1
    assert [bfloat16(slope) for slope in alibi_slopes(num_heads)] == by_falcon
    by_mpt = -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0]
    torch.testing.assert_close(torch.tensor(mpt_alibi_slopes(num_heads, 8)), by_mpt, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("model_type", "variant"),
    [
        ("mistral3", None),
        ("gemma3", "gemma3"),
        ("gemma4", "gemma4"),
        ("gemma4", "gemma4-shared"),
        ("gemma4", "gemma4-moe"),
    ],
)
@pytest.mark.parametrize("prefixes", [("model.language_model.", ""), ("language_model.model.", "language_model.")])
def test_the_text_part_of_a_model_of_text_and_images(
    model_type: str, variant: str | None, prefixes: tuple[str, str], tmp_path: Path
) -> None:
    """The text part alone and within its model, in both spellings of the names, give the same config and weights."""
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    if variant is None:
        make_family_model(alone, "mistral")
    else:
        make_family_model(alone, variant, tie_word_embeddings=False)
    text = json.loads((alone / "config.json").read_text())
    whole.mkdir()
    around = {"model_type": model_type, "architectures": [TEXT_PARTS[model_type]], "vision_config": {"hidden_size": 8}}
    (whole / "config.json").write_text(json.dumps(around | {"text_config": text}))
    tensors = load_file(alone / "model.safetensors")
    renamed = {
        (prefixes[0] + name.removeprefix("model.") if name.startswith("model.") else prefixes[1] + name): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed | {"vision_tower.layers.0.weight": torch.ones(2)}, whole / "model.safetensors")
    config = load_model_config(whole)
    attention = replace(config.attention, sees_spans=False)  # which only pictures need
    assert config.attention.sees_spans == (model_type == "gemma3")
    assert replace(config, attention=attention) == load_model_config(alone)
    expected = dict(load_weights(alone, config, torch.float32, CPU).named_tensors())
    for name, tensor in load_weights(whole, config, torch.float32, CPU).named_tensors():
        assert torch.equal(tensor, expected[name]), name


def test_a_text_part_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "gemma3n_text"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    with pytest.raises(ModelError, match="model_type 'gemma3n_text', supported: llama, mistral"):
        load_model_config(tmp_path)


def test_another_model_of_pictures_whose_text_part_has_an_encoder_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "t5"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="model_type 'llava' and a text_config of 't5'"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("half", "fields", "reason"),
    [
        ("encoder", {"model_type": "vit"}, "encoder.model_type 'vit', supported: donut-swin"),
        ("decoder", {"model_type": "trocr"}, "decoder.model_type 'trocr', supported: mbart"),
        ("encoder", {"embed_dim": 16}, "encoder.hidden_size 64, expected the decoder's d_model 32"),
        ("encoder", {"window_size": 5}, "window_size 5, expected at most the last stage's 3 rows"),
        ("encoder", {"use_absolute_embeddings": True}, "use_absolute_embeddings True"),
    ],
)
def test_pages_that_no_encoder_here_reads(half: str, fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    kind, config = ENCODER_DECODERS["nougat"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | config | {half: config[half] | fields}))
    with pytest.raises(ModelError, match=reason):
        load_model_config(tmp_path)


@pytest.mark.parametrize("variant", ["gpt2", "bloom", "opt"])
def test_names_without_their_first_part_are_found(variant: str, tmp_path: Path) -> None:
    """The files of GPT-2, BLOOM and OPT on the hub leave out "transformer." or "model."."""
    path = make_family_model(tmp_path, variant)
    config = load_model_config(path)
    expected = dict(load_weights(path, config, torch.float32, CPU).named_tensors())
    file = path / "model.safetensors"
    base = "model." if variant == "opt" else "transformer."
    tensors = {name.removeprefix(base): tensor for name, tensor in load_file(file).items()}
    if variant == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # a constant of old files
    save_file(tensors, file)
    for name, tensor in load_weights(path, config, torch.float32, CPU).named_tensors():
        assert torch.equal(tensor, expected[name]), name


def test_the_head_of_baichuan_2_has_rows_of_length_1(tmp_path: Path) -> None:
    """Its vocabulary says that it is Baichuan 2, whose published code normalises the head before the first product."""
    path = make_family_model(tmp_path, "baichuan-7b", vocab_size=125_696, hidden_size=8, num_hidden_layers=1)
    config = load_model_config(path)
    stored = load_file(path / "model.safetensors")["lm_head.weight"]
    found = dict(load_weights(path, config, torch.float32, CPU).named_tensors())["lm_head"]
    torch.testing.assert_close(found, stored / stored.square().sum(1, keepdim=True).sqrt())


def test_qwen_1_is_served_up_to_the_length_from_which_its_rotation_changes(tmp_path: Path) -> None:
    path = make_family_model(tmp_path, "qwen")
    assert load_model_config(path).max_position_embeddings == 128
    plain = rewrite(path, use_dynamic_ntk=False, use_logn_attn=False)
    assert load_model_config(plain).max_position_embeddings == 512


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """The config.json of the model of 20 billion parameters, in the spelling of its publication."""
    published = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_model_config(tmp_path)
    experts, rope = config.parts.experts, config.rope
    assert (experts.num_experts, experts.num_per_token, experts.intermediate_size) == (32, 4, 2880)
    assert (experts.clamped.alpha, experts.clamped.limit, experts.has_router_bias) == (1.702, 7.0, True)
    assert config.sliding_windows == (128, None) * 12 and config.attention.has_sinks
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert (rope.rope_type, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert (rope.original_max_position_embeddings, config.eos_token_ids) == (4096, (200002,))
    weights = empty_weights(config, torch.bfloat16, torch.device("meta"))
    num_bytes = sum(tensor.nbytes for _, tensor in weights.named_tensors())
    assert 13.6e9 < num_bytes < 13.8e9  # the published files have 13.76e9 bytes
