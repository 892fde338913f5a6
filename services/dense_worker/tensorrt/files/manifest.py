"""`manifest.json` of an export: its files, their hashes, and the model that they are from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from services.common.errors import ModelError
from services.dense_worker.tensorrt.files.atomic_file import write_atomically

FILE = "manifest.json"
FORMAT = 2  # since 2 the segment `last` gets its rows selected


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of an export directory. Paths are relative to it."""

    fingerprint: str  # of the model's config, including the number of layers
    model: dict[str, Any]  # the config, for people to read
    dtype: str
    segments: dict[str, dict[str, Any]] = field(default_factory=dict)  # file, opset, sha256, inputs, outputs
    embed_tokens: dict[str, Any] | None = None  # file, tensor, shape
    tokenizer: list[str] | None = None  # files
    format: int = FORMAT


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes the manifest. Keeps the parts of an earlier export of the same model and dtype that this one lacks."""
    try:
        earlier = read_manifest(directory)
    except ModelError:
        earlier = manifest
    if (earlier.fingerprint, earlier.dtype) == (manifest.fingerprint, manifest.dtype):
        manifest = replace(
            manifest,
            segments=manifest.segments or earlier.segments,
            embed_tokens=manifest.embed_tokens or earlier.embed_tokens,
            tokenizer=manifest.tokenizer or earlier.tokenizer,
        )
    write_atomically(directory / FILE, json.dumps(asdict(manifest), indent=1).encode())


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`. Raises ModelError if there is none or this version cannot read it."""
    path = directory / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ModelError(f"{path} has format {values['format']}, supported: {FORMAT}; export again")
        return Manifest(**values)
    except FileNotFoundError:
        raise ModelError(f"{directory} is no export: it has no {FILE}") from None
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ModelError(f"{path} cannot be read as a manifest: {error!r}") from error


def read_networks(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    """The ONNX models of an export. Raises ModelError if one is missing or was changed after the export."""
    if not manifest.segments:
        raise ModelError(f"{directory} holds no segments: export with `--export batchful`")
    networks: dict[str, bytes] = {}
    for name, entry in manifest.segments.items():
        try:
            path, expected = directory / entry["file"], entry["sha256"]
            network = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        except (LookupError, TypeError) as error:
            raise ModelError(f"{directory / FILE} has no file and sha256 for the segment {name}") from error
        digest = hashlib.sha256(network).hexdigest()
        if digest != expected:
            raise ModelError(
                f"{path} was changed after its export: its sha256 is {digest[:12]}…, {FILE} says "
                f"{expected[:12]}…; change services/dense_worker/model/ instead, and export again"
            )
        networks[name] = network
    return networks
