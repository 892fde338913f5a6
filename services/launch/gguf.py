"""A model in a GGUF file: made a Hugging Face directory in a cache, once, which is then served.

A process of its own makes it (`convert_gguf.py`), because that needs torch, transformers and the package `gguf`, and
the launcher none of them. The directory's name has a hash of the file's path, size and time, so a changed file is
converted again.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import CapacityError, ConfigError, ModelError
from services.common.shorten import shorten

CACHE = Path("~/.cache/twostroke/gguf")
OWN_ERROR = 1  # exit status of a conversion that has said what is wrong


def is_gguf(text: str) -> bool:
    """Whether a model that is asked for is a GGUF file."""
    return text.lower().endswith(".gguf")


def convert_model(file: Path, cache: Path = CACHE) -> Path:
    """The directory of the model in `file`. Takes about as long as copying the file, the first time.

    Raises `ModelError` for what is missing, damaged or not supported, `ConfigError` without the package, and
    `CapacityError` without room.
    """
    if not file.is_file():
        raise ModelError(f"{file} is not a file")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{file} needs the package gguf: pip install 'twostroke[gguf]'")
    facts, cache = file.stat(), cache.expanduser()
    digest = hashlib.sha256(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()
    directory = cache / f"{file.stem}-{digest[:16]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{directory.name}.lock"):
            if not directory.is_dir():
                partial = cache / f"{directory.name}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was ended
                _convert(file, partial)
                partial.rename(directory)
    except OSError as error:
        raise CapacityError(f"{file} cannot be converted in {cache}: {error.strerror}") from error
    return directory


def _convert(file: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "services.launch.convert_gguf", str(file), str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # a bar goes to standard error
    if done.returncode == OWN_ERROR and done.stdout.strip():
        raise ModelError(done.stdout.strip().splitlines()[-1])
    if done.returncode:
        raise ModelError(f"{file} was not converted: the process ended with {done.returncode} {shorten(done.stdout)}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits while another server converts the same file."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
