"""Which files a model's weights are in. Without torch, so that a start can be refused before anything loads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from services.common.config import Config
from services.common.errors import ModelError
from services.common.json_files.read_json import read_json
from services.common.process import available_bytes

_INDEX_FILE = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth")
_DANGER = (
    ". Files of pickled tensors are never loaded: loading one can run any program that its author put there. Convert"
    " it in a place where that does no harm, or take a conversion that you trust."
)
_PIECE_BYTES = 2**17  # the kernel reads no more ahead at a time if the disk's read_ahead_kb is Linux's default


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of `path`, sorted by name. A single file takes precedence, as in transformers."""
    single, index = path / "model.safetensors", path / _INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(f.name for f in path.glob("*") if f.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"found {', '.join(others[:3])}, supported: safetensors" if others else "found no weights"
        is_pickled = any(name.endswith(_PICKLED) for name in others)
        raise ModelError(f"{path} has neither model.safetensors nor {_INDEX_FILE} ({found})" + _DANGER * is_pickled)
    try:
        names = set((read_json(index) or {})["weight_map"].values())
        return [path / name for name in sorted(names)]
    except (LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from error


def check_weights(config: Config) -> None:
    """Raises `ModelError` for files that a dense worker, if one is started, would look for and not find."""
    section = config.model
    if "dense_worker" not in config.launch.services or section.load_format == "dummy":
        return
    files = checkpoint_files(section.path)
    if missing := [file.name for file in files if not file.is_file()]:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"{section.path} lacks {len(missing)} of {len(files)} files of weights: {shown}")


def begin_reading_weights(config: Config) -> None:
    """Has the kernel read the files while a dense worker, if one is started, imports its modules: on a thread.

    No more than half of the free memory has room for: what is read first must not make place for what comes later.
    """
    section = config.model
    if "dense_worker" in config.launch.services and section.load_format != "dummy":
        arguments = checkpoint_files(section.path), available_bytes() // 2
        threading.Thread(target=_begin_reading, args=arguments, name="read-weights", daemon=True).start()


def _begin_reading(files: Iterable[Path], most_bytes: int) -> None:
    for file in files:
        with contextlib.suppress(OSError), file.open("rb") as stream:  # of which the dense worker will say more
            for start in range(0, os.fstat(stream.fileno()).st_size, _PIECE_BYTES):
                most_bytes -= _PIECE_BYTES
                if most_bytes < 0:
                    return
                os.posix_fadvise(stream.fileno(), start, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
