"""`SafetensorsFile`: a safetensors file that may be changed, cut or hostile while it is read.

It is read and not mapped: a file that is cut short while it is mapped would kill the process. All limits are checked
before memory is taken.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import InvalidRequest
from services.common.shorten import show

MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS = 8  # of a tensor: the product of a million of them would take minutes
# BF16 has no type in numpy; its bits are kept.
DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    start: int  # position in the file
    num_bytes: int


class SafetensorsFile:
    """An open file. Use it as a context manager. All methods raise `InvalidRequest`."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._file, size = open_regular(path)
        try:
            self.entries = self._read_header(size)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def read(self, name: str) -> np.ndarray:
        """A tensor's values; those of BF16 as uint16. All of them must be finite."""
        entry = self.entries[name]
        values = np.frombuffer(self._read(entry.start, entry.num_bytes), DTYPES[entry.dtype]).reshape(entry.shape)
        if not is_finite(values):
            raise InvalidRequest(f"{name} in {self._name} has values that are not finite")
        return values

    def _read_header(self, size: int) -> dict[str, TensorEntry]:
        num_bytes, most = int.from_bytes(self._read(0, 8), "little"), min(size - 8, MAX_HEADER_BYTES)
        if num_bytes > most:
            raise InvalidRequest(
                f"{self._name} is not safetensors, or truncated: its header has {num_bytes} bytes, at most {most} "
                "expected"
            )
        try:
            header = json.loads(self._read(8, num_bytes))
            if not isinstance(header, dict):
                raise ValueError("the header is no object")
            header.pop("__metadata__", None)
            return {name: self._read_entry(name, value, 8 + num_bytes, size) for name, value in header.items()}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"{self._name} is not safetensors: {type(error).__name__}: {error}") from error

    def _read_entry(self, name: str, value: Any, data_start: int, size: int) -> TensorEntry:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        if dtype not in DTYPES:
            supported = ", ".join(DTYPES)
            raise InvalidRequest(f"{show(name)} in {self._name} has dtype {show(dtype)}, supported: {supported}")
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"{show(name)} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} allowed")
        if not all(type(each) is int and 0 <= each <= size for each in (*shape, start, end)):
            raise ValueError(f"{show(name)} has shape {show(shape)} at {show(start)} to {show(end)} of {size} bytes")
        num_bytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if end - start != num_bytes or data_start + end > size:
            raise ValueError(f"{show(name)} lies at {start} to {end}, the file has {size} bytes")
        return TensorEntry(dtype, tuple(shape), data_start + start, num_bytes)

    def _read(self, start: int, num_bytes: int) -> bytes:
        return read_exactly(self._file, start, num_bytes, self._name)


def open_regular(path: Path) -> tuple[int, int]:
    """The descriptor and size of a file. Raises `InvalidRequest` if it is missing or not a regular file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: a pipe would block for ever
    except OSError as error:
        raise InvalidRequest(f"{path.name} cannot be read: {error.strerror}") from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise InvalidRequest(f"{path.name} is not a regular file")
    return file, status.st_size


def read_exactly(file: int, start: int, num_bytes: int, name: str) -> bytes:
    """A part of a file. Raises `InvalidRequest` if the file is shorter."""
    pieces, position = [], start
    try:
        while position < start + num_bytes:
            piece = os.pread(file, start + num_bytes - position, position)
            if not piece:
                raise InvalidRequest(f"{name} is truncated: it ends at byte {position}")
            pieces.append(piece)
            position += len(piece)
    except OSError as error:
        raise InvalidRequest(f"{name} cannot be read: {error.strerror}") from error
    return b"".join(pieces)


def is_finite(values: np.ndarray) -> bool:
    """Whether all values are finite; uint16 are the bits of BF16, whose exponent has bits 7 to 14."""
    if values.dtype == np.uint16:
        return not bool(((values & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(values).all())
