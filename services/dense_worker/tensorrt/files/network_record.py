"""The record of a model's ONNX networks, beside the plans: a worker that has it finds its plans without an export.

An export takes seconds and is needed only to build: to find plans, digests of the networks suffice. A record counts
only for the same config, dtype, sources of this program and versions of the packages that export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from services.common.errors import CapacityError, ConfigError
from services.common.model_config import ModelConfig
from services.common.vision.vision_config import VisionConfig
from services.dense_worker.tensorrt.files.atomic_file import write_atomically

SOURCES = Path(__file__).parents[3]  # services/: what an export runs may import any of it


class NetworkRecord:
    """The digests of one model's networks, in a directory of plans."""

    def __init__(self, directory: Path, config: ModelConfig | VisionConfig, dtype: torch.dtype) -> None:
        """config: of the model's text part, or of its tower.

        Reads the sources now: during a build of minutes somebody may install others. Raises OSError if it cannot."""
        self._origin = _origin(config, dtype)
        self._path = directory / f"networks_{self._origin[:16]}.json"

    def read(self) -> dict[str, str] | None:
        """The sha256 of each network by segment, from an earlier export; None if there was none like this."""
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            return dict(values["networks"]) if values["origin"] == self._origin else None
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def write(self, networks: Mapping[str, bytes], report: Callable[[str], None]) -> None:
        """Keeps the digests of exported networks. If the directory takes none, `report` receives the reason."""
        digests = {name: hashlib.sha256(network).hexdigest() for name, network in networks.items()}
        data = json.dumps({"origin": self._origin, "networks": digests}, indent=1).encode()
        try:
            write_atomically(self._path, data)
        except (CapacityError, ConfigError) as error:  # the next start takes longer, and nothing else
            report(f"the record of the networks is not kept: {error}")


def _origin(config: ModelConfig | VisionConfig, dtype: torch.dtype) -> str:
    """A digest of everything that an export depends on."""
    versions = f"torch {torch.__version__}, onnx {version('onnx')}"
    parts = [repr(config).encode(), str(dtype).encode(), versions.encode()]
    for source in sorted(SOURCES.rglob("*.py")):
        parts += [str(source.relative_to(SOURCES)).encode(), source.read_bytes()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
