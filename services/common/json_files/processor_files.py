"""How a model's files say that pictures and sound become numbers, in either form that transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.errors import ModelError
from services.common.json_files.read_json import read_json

PREPROCESSOR_FILE = "preprocessor_config.json"  # before transformers 5
PROCESSOR_FILE = "processor_config.json"  # since then, with a part for each kind of input
IMAGE_PROCESSOR, FEATURE_EXTRACTOR = "image_processor", "feature_extractor"


def read_processor(path: Path, part: str) -> dict[str, Any] | None:
    """The fields of one part; None: neither file has them. As in transformers the newer form comes first.

    Raises `ModelError` for a file that cannot be read.
    """
    newer = (read_json(path / PROCESSOR_FILE) or {}).get(part)
    if newer is None:
        return read_json(path / PREPROCESSOR_FILE)
    if not isinstance(newer, dict):
        raise ModelError(f"{path / PROCESSOR_FILE} has {part} {newer!r}, expected an object")
    return newer


def no_processor(part: str) -> str:
    """What a directory lacks for which `read_processor` gives None, in words."""
    return f"neither {PREPROCESSOR_FILE} nor {PROCESSOR_FILE} with {part!r}"
