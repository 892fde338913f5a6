"""Small random models in Hugging Face format, one call per directory; milliseconds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# A setting: of the embedded model only half the layers run. For tests that compare its answers with each other.
TWO_LAYERS = "model.num_layers=2"
# Only the first one runs. For tests that measure what requests cost the gateway.
ONE_LAYER = "model.num_layers=1"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def make_model_dir(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes config.json, generation_config.json and safetensors of a random model into `path`; returns `path`.

    `overrides` are config.json fields, over a grouped-query model of 3 layers without any EOS token (so
    that generation runs to its length limit). A `max_shard_size` such as "50KB" makes several shards.
    Biases and norm weights are random too, so that a test notices a missing one. Call it from a session-scoped
    fixture if several tests use the model.
    """
    fields = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,  # the logits lie so far apart that rounding does not change a greedy token
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return path
