"""Variants of the families with gated delta layers, for `family_models`."""

from __future__ import annotations

from typing import Any

_GATED_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_GATED_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}

GATED_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (  # layer 1 has no experts
        "qwen3_next",
        {
            **_GATED_DELTA,
            **_GATED_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            **_GATED_DELTA,
            "num_hidden_layers": 4,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_GATED_DELTA, **_GATED_EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    ),
}
