"""Whether `model.max_model_len` fits the model. Without torch, so that a start can be refused before anything loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.config import Config, ModelSection
from services.common.encoders.encoder_types import is_encoder_type
from services.common.errors import ConfigError, ModelError
from services.common.families.shape import ModelConfig
from services.common.json_files.read_json import read_json
from services.common.kv_cache.streaming import with_streaming
from services.common.process import importing

if TYPE_CHECKING:
    from services.common.encoders.encoder_config import TextEncoderConfig


def resolve_max_model_len(section: ModelSection, config: ModelConfig) -> int:
    """The configured length, or else the model's own. Raises `ConfigError` as `check_max_model_len` does."""
    check_max_model_len(section, config)
    return section.max_model_len or config.max_position_embeddings


def check_max_model_len(section: ModelSection, shape: ModelConfig | TextEncoderConfig) -> None:
    """Raises `ConfigError` for a length beyond the model's own, without scaled RoPE and sinks (`with_streaming`)."""
    why = ""
    if isinstance(shape, ModelConfig):
        if shape.rope.rope_type != "default" or shape.attention.num_sink_tokens > 0:
            return
        own, why = shape.max_position_embeddings, " and its RoPE is not scaled"
    else:
        own = shape.max_input_tokens
    if section.max_model_len is not None and section.max_model_len > own:
        raise ConfigError(
            f"model.max_model_len is {section.max_model_len}, the model's positions end at {own}{why}: set it to {own} "
            "or less"
        )


def check_before_start(config: Config) -> None:
    """Raises `ConfigError` for a `model.max_model_len` that the workers would refuse, and `ModelError` for no model.

    Reads the model's config by transformers, whose import takes a second, only if config.json itself does not say that
    the model is long enough. Of encoders it does not: positions of some begin behind that of padding.
    """
    asked, raw = config.model.max_model_len, read_json(config.model.path / "config.json")
    if raw is None:
        raise ModelError(f"model directory {config.model.path} has no config.json")
    if asked is None:
        return
    text = raw.get("text_config")
    said = (text if isinstance(text, dict) else raw).get("max_position_embeddings")
    if not isinstance(said, int) or asked > said or is_encoder_type(raw):
        check_max_model_len(config.model, read_shape(config))


def read_shape(config: Config) -> ModelConfig | TextEncoderConfig:
    """The shape of the model as the config lets it be run. Raises `ModelError` or `ConfigError`."""
    with importing():
        from services.common.encoders.encoder_config import read_served_config
    shape = read_served_config(config.model.path, config.model.num_layers)
    return with_streaming(shape, config.attention) if isinstance(shape, ModelConfig) else shape
