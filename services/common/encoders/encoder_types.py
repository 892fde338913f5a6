"""Which models are encoders. Imports nothing large: the launcher asks, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.json_files.read_json import read_json

ENCODER_TYPES = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert")  # of config.json's model_type


def is_encoder_type(raw: dict[str, Any]) -> bool:
    """Whether the model of a config.json sees whole inputs at once and generates nothing."""
    return raw.get("model_type") in ENCODER_TYPES


def is_encoder(path: Path) -> bool:
    """Whether the model in a directory is an encoder, which needs no attention worker. Raises `ModelError`."""
    return is_encoder_type(read_json(path / "config.json") or {})
