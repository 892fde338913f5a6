"""StreamingLLM: a model whose tokens see the first tokens of a text and a window of the last ones alone.

Source: arXiv:2309.17453. Places are counted among the tokens that are seen, so they stay below the length that the
model was trained with, however long the text becomes.
"""

from __future__ import annotations

from dataclasses import replace

from services.common.config import AttentionSection
from services.common.errors import ConfigError
from services.common.families.shape import ModelConfig

_LENGTH_DEPENDENT = ("dynamic", "longrope")  # types of rotary embeddings


def with_streaming(config: ModelConfig, section: AttentionSection) -> ModelConfig:
    """The model with `attention.window` and `attention.sink_tokens`, if they are set.

    Raises `ConfigError`, naming what is in the way, for a model that cannot be run so.
    """
    window, num_sinks = section.window, section.sink_tokens
    if window is None:
        return config
    asked = f"attention.window is {window} and attention.sink_tokens {num_sinks}, but"
    longest = config.max_position_embeddings
    if window + num_sinks > longest:
        raise ConfigError(f"{asked} the model was trained with {longest} tokens, fewer than these together")
    obstacles = {
        "windows of its own in its layers": any(each is not None for each in config.sliding_windows),
        "ALiBi": bool(config.attention.alibi_slopes),
        "learned positions": bool(config.parts.num_learned_positions),
        "learned sinks": config.attention.has_sinks,
        "recurrent layers": bool(config.recurrent_layers),
        "cross attention": config.encoder is not None,
        "rotary embeddings that depend on the length": any(
            rope is not None and rope.rope_type in _LENGTH_DEPENDENT for rope in config.layer_ropes
        ),
    }
    found = [what for what, is_there in obstacles.items() if is_there]
    if found:
        raise ConfigError(f"{asked} {config.family!r} has {', '.join(found)}")
    return replace(
        config,
        sliding_windows=(window,) * config.num_layers,
        attention=replace(config.attention, num_sink_tokens=num_sinks),
    )
