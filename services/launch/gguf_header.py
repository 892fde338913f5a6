"""What a GGUF file states about itself before its weights, checked against its size.

The package `gguf` makes an object for each element that a length promises, whether or not the file has it: so a damaged
length would fill the memory. Here nothing is read that does not lie in the file.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from services.common.errors import ModelError

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by the number of a type
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # as in llama.cpp


def check_header(file: Path) -> None:
    """Raises `ModelError` for a key, or a tensor's entry, that is not whole within the file, and `OSError`."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{file} is truncated, damaged or no GGUF file: it does not begin with 'GGUF'")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            try:
                _Walk(memory).check()
            except (ValueError, struct.error) as error:
                raise ModelError(f"{file} is truncated, damaged or no GGUF file: {error}") from error


class _Walk:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._at = 4
        # The high half of the version is 0 in files of this byte order, and of those of the other one the low half.
        self._order = "<" if struct.unpack_from("<I", memory, 4)[0] & 0xFFFF else ">"

    def check(self) -> None:
        """Raises `ValueError` or `struct.error` for what is not whole."""
        self._number("I")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        for _ in range(num_keys):
            self._value(self._text("a key"), self._number("I"))
        for _ in range(num_tensors):
            name = self._text("the name of a tensor")
            num_dims = self._number("I")
            if num_dims > _MAX_DIMS:
                raise ValueError(f"{name} has {num_dims} dimensions, at most {_MAX_DIMS} are read")
            self._skip(8 * num_dims + 4 + 8, name)  # the dimensions, the type and the place

    def _value(self, key: str, kind: int) -> None:
        if kind == _STRING:
            self._text(key)
        elif kind == _ARRAY:
            kind, length = self._number("I"), self._number("Q")
            if kind == _STRING:
                for _ in range(length):
                    self._text(key)
            else:
                self._skip(length * self._scalar_bytes(key, kind), key)
        else:
            self._skip(self._scalar_bytes(key, kind), key)

    def _scalar_bytes(self, key: str, kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise ValueError(f"{key} has values of the type {kind}, which are not read")
        return _SCALAR_BYTES[kind]

    def _text(self, what: str) -> str:
        length = self._number("Q")
        start = self._at
        self._skip(length, what)
        return self._memory[start : self._at].decode()

    def _number(self, code: str) -> int:
        """An unsigned integer."""
        layout = self._order + code
        (number,) = struct.unpack_from(layout, self._memory, self._at)
        self._at += struct.calcsize(layout)
        return int(number)

    def _skip(self, num_bytes: int, what: str) -> None:
        left = len(self._memory) - self._at
        if num_bytes > left:
            raise ValueError(f"{what} takes {num_bytes} bytes where the file has {left} left")
        self._at += num_bytes
