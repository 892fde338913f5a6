"""Variants of families in which some layers have a Mamba 2 recurrence or a short convolution, for `family_models`."""

from __future__ import annotations

from typing import Any

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2}
_GRANITE = {
    **_MAMBA,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
}

HYBRID_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("bamba", {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_proj_bias": True}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "granitemoehybrid-plain": (  # as Granite 4.0 H 350M: no experts
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 0, "mamba_conv_bias": False, "time_step_limit": [0.01, 0.8]},
    ),
    "granitemoehybrid-rope": (  # as Granite 4.0 Micro: attention alone
        "granitemoehybrid",
        {
            **_GRANITE,
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M-M*-M",
            "num_hidden_layers": 6,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 12,
            "n_groups": 2,
        },
    ),
    "mamba": ("mamba", {"state_size": 6, "expand": 2, "use_bias": True}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 6, "expand": 2, "mixer_rms_eps": 1e-4}),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
        },
    ),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "tie_word_embeddings": True},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "block_multiple_of": 8,
        },
    ),
}
