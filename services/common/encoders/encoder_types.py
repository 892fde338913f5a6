"""Which models are encoders. Imports nothing large: the launcher asks, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.json_files.read_json import read_json

ENCODER_TYPES = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "deberta-v2")  # model_type
BIDIRECTIONAL_TYPE = "gemma3_text"  # a decoder's, which is an encoder if config.json says that attention sees all


def is_encoder_type(raw: dict[str, Any]) -> bool:
    """Whether the model of a config.json sees whole inputs at once and generates nothing."""
    kind = raw.get("model_type")
    return kind in ENCODER_TYPES or (kind == BIDIRECTIONAL_TYPE and bool(raw.get("use_bidirectional_attention")))


def is_encoder(path: Path) -> bool:
    """Whether the model in a directory is an encoder, which needs no attention worker. Raises `ModelError`."""
    return is_encoder_type(read_json(path / "config.json") or {})
