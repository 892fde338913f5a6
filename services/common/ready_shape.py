"""The shape of a model, read once for all workers: a worker then imports no transformers, which takes seconds.

The launcher starts `python -m services.launch.shape_reader`, and the workers import their own modules meanwhile. The
reader holds a lock (flock) on the file that it writes. The kernel releases it when the reader ends, however it ends. A
worker for which there is no shape, or the shape of other files, reads config.json itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from services.common.encoders.encoder_config import TextEncoderConfig, read_encoder_config, read_served_config
from services.common.families.shape import ModelConfig
from services.common.model_config import load_model_config

if TYPE_CHECKING:
    from services.common.config import ModelSection

READ_TIMEOUT_S = 60.0  # of the reader; on a busy machine it takes several seconds
POLL_S = 0.01


def write_shape(file: BinaryIO, path: Path, num_layers: int | None) -> None:
    """Writes the shape of the model in directory `path` for `read_decoder` and `read_encoder`. Raises `ModelError`."""
    key = _key(path, num_layers)  # before: files that change while they are read have another key then
    pickle.dump((key, read_served_config(path, num_layers)), file)
    file.flush()


async def read_decoder(file: Path | None, section: ModelSection) -> ModelConfig:
    """The shape of a decoder, from `file` if that is ready or becomes so. Raises `ModelError`."""
    shape = await _ready_shape(file, section)
    return shape if isinstance(shape, ModelConfig) else load_model_config(section.path, section.num_layers)


async def read_encoder(file: Path | None, section: ModelSection) -> TextEncoderConfig:
    """The shape of an encoder, from `file` if that is ready or becomes so. Raises `ModelError`."""
    shape = await _ready_shape(file, section)
    return shape if isinstance(shape, TextEncoderConfig) else read_encoder_config(section.path, section.num_layers)


async def _ready_shape(file: Path | None, section: ModelSection) -> object:
    if file is None:
        return None
    try:
        with file.open("rb") as stream:
            await _wait_written(stream)
            key, shape = pickle.load(stream)
    except (OSError, EOFError, pickle.UnpicklingError):  # the reader has failed, was killed, or hangs
        return None
    return shape if key == _key(section.path, section.num_layers) else None


async def _wait_written(stream: BinaryIO) -> None:
    """Waits until the reader has ended. Raises `TimeoutError`."""
    deadline = time.monotonic() + READ_TIMEOUT_S
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no shape after {READ_TIMEOUT_S:g} s") from None
        await asyncio.sleep(POLL_S)


def _key(path: Path, num_layers: int | None) -> tuple[Any, ...]:
    """What the shape depends on: the small files of the directory, by size and time of the last change."""
    files = [(each.name, each.stat()) for each in sorted(path.glob("*.json")) if each.exists()]  # not links to nothing
    return str(path.absolute()), num_layers, [(name, status.st_size, status.st_mtime_ns) for name, status in files]
