"""What the files of a model's processor say, in each form that transformers writes: how pictures and sound become
numbers, and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.errors import ModelError
from services.common.json_files.read_json import read_json

PREPROCESSOR_FILE = "preprocessor_config.json"  # before transformers 5
PROCESSOR_FILE = "processor_config.json"  # since then, with a part for each kind of input
TEMPLATE_FILE = "chat_template.json"  # of processors before chat_template.jinja
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


def read_processor_template(path: Path) -> str | None:
    """None: there is none, or it is in chat_template.jinja, which is the tokenizer's, too.

    Raises `ModelError` for anything but a text, or several of which one is the default.
    """
    for name in (PROCESSOR_FILE, TEMPLATE_FILE):  # the first that has one, as in transformers
        template = (read_json(path / name) or {}).get("chat_template")
        if isinstance(template, dict):
            template = template.get("default", template)
        if isinstance(template, str):
            return template
        if template is not None:
            raise ModelError(f"{path / name} has a chat_template that is neither a text nor texts with a default")
    return None
