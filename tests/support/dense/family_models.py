"""Tiny random models of every family that is served, one or more variants of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.dense.gated_variants import GATED_VARIANTS
from tests.support.dense.hybrid_variants import HYBRID_VARIANTS
from tests.support.dense.renamed_variants import RENAMED, AlibiLlama

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_EQUAL = "equal"  # the directory of the model that transformers can load, beside one that it cannot
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}

# The model_type and the fields of config.json, by name of the variant.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"head_dim": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe-plain-layer": (  # layer 0 has no experts, and their weights do not add up to 1
        "qwen3_moe",
        {
            "head_dim": 8,
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 8,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe-one-group": (
        "glm4_moe",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    **GATED_VARIANTS,
    **HYBRID_VARIANTS,
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "rope_parameters": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "attention_bias": True,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "kimi_k2": (  # as DeepSeek-V3 without groups
        "kimi_k2",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.8,
            "rope_parameters": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "intermediate_size": 64,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 6, "sliding_window_pattern": 2}),
    "exaone4-full": (
        "exaone4",
        {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "glm": ("glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25, "head_dim": None}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "head_dim": None}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]},
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 6,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            },
        },
    ),
    "gemma4": (  # as the dense 31B: layers that see everything have fewer and larger heads, and v is k
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
            },
        },
    ),
    "gemma4-shared": (  # as E2B: the last layers read the keys of earlier ones; each layer has an input of its own
        "gemma4_text",
        {
            "num_hidden_layers": 5,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_key_value_heads": 1,
            "vocab_size_per_layer_input": 1024,
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
        },
    ),
    "gemma4-moe": (  # as 26B-A4B
        "gemma4_text",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "baichuan-7b": ("baichuan", {"num_key_value_heads": 4}),
    "baichuan-13b": ("baichuan", {"num_key_value_heads": 4}),
    "chatglm": (
        "chatglm",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}},
    ),
    "internlm": (
        "internlm",
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    "internlm2": ("internlm2", {}),
    "qwen": ("qwen", {"num_key_value_heads": 4}),
    "skywork": ("skywork", {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "solar_open": (
        "solar_open",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.5,
        },
    ),
    "youtu": (
        "youtu",
        {"q_lora_rank": 20} | {name: size for name, size in _LATENT.items() if not name.startswith("moe")},
    ),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "dots1": (
        "dots1",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "num_hidden_layers": 3,
            "routed_scaling_factor": 1.8,
        },
    ),
    "granitemoeshared": (
        "granitemoeshared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "intermediate_size": 24,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
        },
    ),
    "internlm3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "helium": ("helium", {"head_dim": 8}),
    "ministral": (
        "ministral",
        {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "cwm": (
        "cwm",
        {
            "bos_token_id": 1,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "jais2": ("jais2", {}),
    "olmo": ("olmo", {}),
    "apertus": ("apertus", {"hidden_act": "xielu"}),
    "iquestcoder": ("iquestcoder", {"head_dim": 16}),
    "hyperclovax": (
        "hyperclovax",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "granite_swa": (
        "granite_swa",
        {
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "layer_rope_theta": [0, 1e3],
            "attention_multiplier": 0.4,
        },
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "layer_rope_theta": [1e3, 1e4],
            "shared_intermediate_size": 40,
            "attention_multiplier": 0.4,
        },
    ),
    "flex_olmo": ("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.5, 1.7, 2.0],
                "long_factor": [2.0, 4.0, 5.0, 6.0],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
            },
        },
    ),
    "exaone_moe": (
        "exaone_moe",
        {
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "hy_v3": (
        "hy_v3",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "arcee": ("arcee", {"mlp_bias": True}),
    "nemotron": ("nemotron", {"hidden_act": "relu2"}),
    "gptj": ("gptj", {"rotary_dim": 4, "activation_function": "gelu_new"}),
    "codegen": ("codegen", {"rotary_dim": 4, "n_inner": 40}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "falcon-7b": ("falcon", {"ffn_hidden_size": 48}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-one-norm": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-rw": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "bloom": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "mpt-grouped": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),  # as Replit Code 1.5
    "mpt-6-heads": ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 128}),
    "gpt2": ("gpt2", {"n_inner": None}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "n_inner": 40}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode-heads": ("gpt_bigcode", {"multi_query": False, "n_inner": 40}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 6}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-350m": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
}


RECURRENT = tuple(name for name in HYBRID_VARIANTS if not name.endswith("-rope"))  # variants with such layers


def make_family_model(path: Path, variant: str, seed: int = 0, **changes: Any) -> Path:
    """Writes config.json and safetensors of a random model of `VARIANTS` in float32; returns `path`.

    Norms and biases are random, too, so that a test notices a missing one.
    """
    family, fields = VARIANTS[variant]
    other = RENAMED.get(variant)
    if other is not None:
        family = other.model_type
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **(_COMMON | _TOKENS | {"initializer_range": 0.15} | fields | changes))
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states that last for a few dozens of tokens
                torch.nn.init.normal_(parameter, mean=-2.5, std=0.5)
            elif name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            elif parameter.dim() <= 1 or name.endswith("_bias"):  # stacked experts have biases in two dimensions
                torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.3)
            elif name.endswith("layer_scalar"):
                torch.nn.init.normal_(buffer, mean=0.8, std=0.2)
    if other is None:
        model.save_pretrained(path)
        return path
    other.prepare(model)
    model.save_pretrained(path / _EQUAL)
    tensors = other.tensors(load_file(path / _EQUAL / "model.safetensors"), config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    own = {"model_type": VARIANTS[variant][0], "architectures": [other.architecture], **_TOKENS}
    (path / "config.json").write_text(json.dumps(other.fields(config) | own))
    return path


def load_true_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model by transformers on a CPU, as config.json describes it.

    Version 5.17, which machines with a GPU may have, leaves the soft cap of attention out of `sdpa`, and gives the
    experts of gpt-oss the limit 7 whatever config.json says.
    """
    raw = json.loads((path / "config.json").read_text())
    has_alibi = raw["model_type"] == "baichuan" and "max_position_embeddings" not in raw
    model_class = AlibiLlama if has_alibi else AutoModelForCausalLM
    own = path / _EQUAL if (path / _EQUAL).is_dir() else path
    model = model_class.from_pretrained(own, dtype=dtype, experts_implementation="eager").eval()
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = model.config.swiglu_limit
    return model
