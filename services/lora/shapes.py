"""The shapes of the linear layers that adapters may change, as a model's config.json gives them."""

from __future__ import annotations

from services.common.errors import ConfigError
from services.common.families.names import CheckpointNames, names_of
from services.common.model_config import ModelConfig


def adapted_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of each linear layer of each transformer layer, by its checkpoint's name.

    Raises `ConfigError` for a family whose linear layers are not those of Llama.
    """
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
    names = names_of(config)
    has_same_layers = not config.attention.layer_heads and config.parts.experts is None
    if _linear_layers(names) != [*of_layer] or not has_same_layers or config.parts.latent is not None:
        raise ConfigError(
            f"dense.max_loras is set, but {config.family} has no adapters here, supported: families with the linear "
            f"layers {', '.join(of_layer)}, with the same heads in all layers and without experts or latent attention"
        )
    layers = [f"{names.layers}.{layer}" for layer in range(config.num_layers)]
    return {f"{layer}.{name}": shape for layer in layers for name, shape in of_layer.items()}


def _linear_layers(names: CheckpointNames) -> list[str]:
    return [*names.qkv, names.o, *names.mlp_in, names.down]
