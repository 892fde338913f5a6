"""`read_json`: reads a JSON file of a model's directory, which may be damaged or much too large."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from services.common.errors import ModelError

MAX_JSON_BYTES = 64 * 2**20  # the index of a model of 140,000 tensors has 16 MB


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`, or None if the file does not exist. Raises ModelError for anything else."""
    return _read(file, dict, "an object")


def read_json_list(file: Path) -> list[Any] | None:
    """The JSON list in `file`, or None if the file does not exist. Raises ModelError for anything else."""
    return _read(file, list, "a list")


def _read(file: Path, kind: type, what: str) -> Any:
    try:
        with file.open("rb") as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            if num_bytes > MAX_JSON_BYTES:
                raise ModelError(f"{file} has {num_bytes} bytes, at most {MAX_JSON_BYTES} allowed")
            value = json.loads(stream.read(num_bytes))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}, expected {what}")
    return value
