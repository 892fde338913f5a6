"""Tiny random models of every family that is served, one or more variants of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

# The model_type and the fields of config.json, by name of the variant.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
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
}


def make_family_model(path: Path, variant: str, seed: int = 0, **changes: Any) -> Path:
    """Writes config.json and safetensors of a random model of `VARIANTS` in float32; returns `path`.

    Norms and biases are random, too, so that a test notices a missing one.
    """
    family, fields = VARIANTS[variant]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **(_COMMON | _TOKENS | {"initializer_range": 0.15} | fields | changes))
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(path)
    return path
