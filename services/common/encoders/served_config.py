"""`read_served_config`: the shape of any model that is served, a decoder or an encoder."""

from __future__ import annotations

from pathlib import Path

from services.common.encoders.encoder_config import TextEncoderConfig, read_encoder_config
from services.common.encoders.encoder_types import is_encoder
from services.common.model_config import ModelConfig, load_model_config


def read_served_config(path: Path, num_layers: int | None = None) -> ModelConfig | TextEncoderConfig:
    """`path`/config.json; `num_layers` keeps only so many first layers. Raises `ModelError`."""
    return read_encoder_config(path, num_layers) if is_encoder(path) else load_model_config(path, num_layers)
