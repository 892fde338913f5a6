"""The files of a model's directory that make a tokenizer."""

from __future__ import annotations

from pathlib import Path

from services.common.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a model that has none of them has no tokenizer


def has_tokenizer(path: Path) -> bool:
    """Whether a model's directory has one of the files that make a tokenizer."""
    return any((path / name).exists() for name in TOKENIZER_FILES)


def check_tokenizer(path: Path) -> None:
    """Raises `ModelError` if it has none of them. Whether they can be read is not looked at."""
    if not has_tokenizer(path):
        raise ModelError(f"model directory {path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
