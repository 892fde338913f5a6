"""Model directories with a config.json and no weights, for code that needs only shapes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from services.common.model_config import ModelConfig, load_model_config

# Together these models have every optional weight and every kind of merged weight of our families.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
}


def write_config(path: Path, family: str, **overrides: Any) -> Path:
    """Writes `path`/config.json of a small model of 3 layers; returns `path`."""
    fields = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
        "architectures": None,
    } | overrides
    AutoConfig.for_model(family, **fields).save_pretrained(path)
    return path


def small_config(family: str, **overrides: Any) -> ModelConfig:
    """The `ModelConfig` of `write_config`."""
    with tempfile.TemporaryDirectory() as directory:
        return load_model_config(write_config(Path(directory), family, **overrides))
