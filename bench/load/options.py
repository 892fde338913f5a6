"""Types of command-line options, and the JSON file of a benchmark's run."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from bench.load.stats import LIMITED_MS, RequestRecord

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("grpcio", "protobuf", "numpy", "uvloop", "uvicorn", "fastapi")


def whole_number(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def non_negative(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive(text: str) -> float:
    """A number above 0; may be inf."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def rates(text: str) -> list[float]:
    """Numbers above 0, separated by commas, all different; may be inf."""
    values = [positive(part) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text} has a rate twice")
    return values


def non_negative_number(text: str) -> float:
    """A finite number of at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def ratio(text: str) -> float:
    """A number in [0, 1)."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def goodput_limit(text: str) -> tuple[str, float]:
    """`NAME:MS`, such as ttft:200."""
    name, colon, value = text.partition(":")
    if not colon or name not in LIMITED_MS:
        raise argparse.ArgumentTypeError(f"{text} is not NAME:MS, where NAME is one of {', '.join(LIMITED_MS)}")
    return name, positive(value)


def counts(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [whole_number(part) for part in text.split(",")]


def run_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """The time, code and options of a benchmark's run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "versions": _versions(),
        "config": {name: _json_value(value) for name, value in vars(arguments).items()},
    }


def save_run(
    file: Path, facts: dict[str, Any], model: Message, records: Sequence[RequestRecord], **figures: Any
) -> None:
    """Writes a run as JSON: its facts, the server's description of the model, figures, and the time of every token."""
    document = facts | {
        "model": {field.name: _json_value(value) for field, value in model.ListFields()},
        **figures,
        "requests": [dataclasses.asdict(record) for record in records],
    }
    file.write_text(json.dumps(document, allow_nan=False))


def _json_value(value: Any) -> Any:
    """Converts to a type that JSON has: infinities and paths become strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, Path) else [_json_value(each) for each in value]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def describe_commit() -> str | None:
    """The commit of this repository, with `-dirty` if files differ from it; `None` without git or repository."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
