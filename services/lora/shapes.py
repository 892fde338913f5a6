"""The shapes of the linear layers that adapters may change, as a model's config.json gives them."""

from __future__ import annotations

from services.common.errors import ConfigError
from services.common.model_config import ModelConfig

# Families whose checkpoints name their linear layers as Llama's do. The layers of the others can have no adapters yet.
ADAPTED_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "seed_oss", "olmo2", "cohere", "cohere2"),
    *("stablelm", "gemma", "gemma2", "gemma3_text"),
)


def adapted_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of each linear layer of each transformer layer, by its checkpoint's name.

    Raises `ConfigError` for a family whose layers have other names than Llama's.
    """
    if config.family not in ADAPTED_FAMILIES:
        supported = ", ".join(ADAPTED_FAMILIES)
        raise ConfigError(f"dense.max_loras is set, but {config.family} has no adapters here, supported: {supported}")
    hidden, intermediate = config.hidden_size, config.intermediate_size
    of_layer = {
        "self_attn.q_proj": (config.attn_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.attn_size),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {
        f"model.layers.{layer}.{name}": shape for layer in range(config.num_layers) for name, shape in of_layer.items()
    }
