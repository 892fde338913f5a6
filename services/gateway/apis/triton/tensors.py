"""`Tensor`: one named tensor of an inference request or response, and its forms on the wire.

The wire has three forms: raw bytes (little-endian; a string as its length in 4 bytes and its bytes), JSON lists, and
typed lists in messages. All sizes are checked against the shape before anything is allocated.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.common.errors import InvalidRequest
from services.common.shorten import quote, show

BYTES = "BYTES"  # strings
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype("<u2"),  # no type of numpy: its bits
    BYTES: np.dtype(object),
}
VALUES_PER_PART = 1024  # that become Python's objects at a time
MAX_DIMS = 8
MAX_STRINGS = 8192  # in one tensor
MAX_SIZE = 2**63 - 1  # in one dimension, as in the messages
MAX_EMPTY = 4096  # product of the sizes that are not 0, in a tensor without elements


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor whose values fit its shape."""

    name: str
    datatype: str  # a key of `NUMPY_TYPES`
    values: np.ndarray  # in its shape; the elements of BYTES are `bytes`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def text_tensor(name: str, texts: Sequence[str]) -> Tensor:
    """A one-dimensional tensor of strings."""
    return Tensor(name, BYTES, np.array([text.encode() for text in texts] or [], dtype=object))


def from_raw(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    """A tensor from raw bytes. Raises `InvalidRequest` if they do not fit type and shape."""
    count = _check(name, datatype, shape)
    if datatype == BYTES:
        return Tensor(name, datatype, _strings(name, count, data).reshape(shape))
    numpy_type = NUMPY_TYPES[datatype]
    if len(data) != count * numpy_type.itemsize:
        raise InvalidRequest(
            f"input {quote(name)} has {len(data)} bytes, {datatype} of shape {_show(shape)} has "
            f"{count * numpy_type.itemsize}",
            name,
        )
    if datatype == "BOOL":
        return Tensor(name, datatype, (np.frombuffer(data, np.uint8) != 0).reshape(shape))
    return Tensor(name, datatype, np.frombuffer(data, numpy_type).reshape(shape))


def from_list(name: str, datatype: str, shape: Sequence[int], data: Iterable[Any]) -> Tensor:
    """A tensor from values in order, which may be nested lists. Raises `InvalidRequest` if they do not fit."""
    count = _check(name, datatype, shape)
    if datatype == "BF16":
        raise InvalidRequest(f"input {quote(name)} has the type BF16, which is read from raw bytes alone", name)
    flat = _flatten(data)
    if len(flat) != count:
        raise InvalidRequest(f"input {quote(name)} has {len(flat)} values, shape {_show(shape)} has {count}", name)
    return Tensor(name, datatype, _array(name, datatype, flat).reshape(shape))


def to_raw(tensor: Tensor) -> bytes | memoryview:
    """The tensor as raw bytes, those of numbers without a copy."""
    if tensor.datatype == BYTES:
        return b"".join(struct.pack("<I", len(each)) + each for each in tensor.values.ravel())
    values = np.ascontiguousarray(tensor.values, NUMPY_TYPES[tensor.datatype])
    return values.reshape(-1).view(np.uint8).data


def values_of(tensor: Tensor) -> Iterator[Any]:
    """The values in order, for JSON. Bytes that are not UTF-8 become replacement characters."""
    flat = tensor.values.reshape(-1)
    if tensor.datatype == BYTES:
        return (each.decode(errors="replace") for each in flat)
    parts = (flat[start : start + VALUES_PER_PART].tolist() for start in range(0, flat.size, VALUES_PER_PART))
    return itertools.chain.from_iterable(parts)


def _check(name: str, datatype: str, shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    if datatype not in NUMPY_TYPES:
        raise InvalidRequest(f"input {quote(name)} has the type {quote(datatype)}, which is not supported", name)
    if len(shape) > MAX_DIMS:
        raise InvalidRequest(f"input {quote(name)} has {len(shape)} dimensions, at most {MAX_DIMS} allowed", name)
    if any(size < 0 for size in shape):
        raise InvalidRequest(f"input {quote(name)} has the shape {_show(shape)}, no size may be negative", name)
    if any(size > MAX_SIZE for size in shape):
        raise InvalidRequest(f"input {quote(name)} has the shape {show(shape)}, a size is at most {MAX_SIZE}", name)
    count = math.prod(shape)
    if not count and math.prod(max(1, size) for size in shape) > MAX_EMPTY:
        raise InvalidRequest(
            f"input {quote(name)} has the shape {_show(shape)}, which has no elements, but more than {MAX_EMPTY} parts",
            name,
        )
    if datatype == BYTES and count > MAX_STRINGS:
        raise InvalidRequest(f"input {quote(name)} has {count} strings, at most {MAX_STRINGS} allowed", name)
    return count


def _strings(name: str, count: int, data: bytes) -> np.ndarray:
    strings = np.empty(count, dtype=object)
    end = 0
    for index in range(count):
        begin = end + 4
        if begin > len(data):
            raise InvalidRequest(f"input {quote(name)} ends before its string {index} of {count}", name)
        (length,) = struct.unpack_from("<I", data, end)
        end = begin + length
        if end > len(data):
            raise InvalidRequest(
                f"string {index} of input {quote(name)} has {length} bytes by its length, {len(data) - begin} are left",
                name,
            )
        strings[index] = data[begin:end]
    if end != len(data):
        raise InvalidRequest(f"input {quote(name)} has {len(data) - end} bytes after its {count} strings", name)
    return strings


def _flatten(data: Iterable[Any]) -> list[Any]:
    flat = list(data)
    for _ in range(MAX_DIMS):
        if list not in set(map(type, flat)):
            break
        flat = [value for each in flat for value in (each if isinstance(each, list) else (each,))]
    return flat


def _array(name: str, datatype: str, flat: list[Any]) -> np.ndarray:
    numpy_type = NUMPY_TYPES[datatype]
    if datatype == BYTES:
        strings = np.empty(len(flat), dtype=object)
        strings[:] = [each.encode() if isinstance(each, str) else each for each in flat]
        _check_kinds(name, datatype, strings, (bytes,))
        return strings
    kinds = {"b": (bool,), "f": (int, float)}.get(numpy_type.kind, (int,))
    _check_kinds(name, datatype, flat, kinds)
    try:
        with np.errstate(over="ignore"):
            return np.array(flat, dtype=numpy_type)
    except OverflowError:
        limits = np.finfo(numpy_type) if numpy_type.kind == "f" else np.iinfo(numpy_type)
        kind = float if numpy_type.kind == "f" else int  # NumPy's own numbers do not compare with larger integers
        least, most = kind(limits.min), kind(limits.max)
        wrong = next(each for each in flat if not least <= each <= most)
        raise InvalidRequest(
            f"input {quote(name)} has the value {show(wrong)}, {datatype} is from {least} to {most}", name
        ) from None


def _check_kinds(name: str, datatype: str, values: Iterable[Any], kinds: tuple[type, ...]) -> None:
    if not set(map(type, values)) <= set(kinds):
        wrong = next(value for value in values if type(value) not in kinds)
        raise InvalidRequest(f"input {quote(name)} has the value {show(wrong)}, not of type {datatype}", name)


def _show(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
