"""Files that `torch.save` writes, and files that only look so."""

from __future__ import annotations

import base64
import functools
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import torch


def saved(value: object, **options: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def encoded(value: object) -> str:
    """The same in base64, as clients of vLLM send it."""
    return base64.b64encode(saved(value)).decode()


def changed(
    data: bytes, change: Callable[[dict[str, bytes]], object], compression: int = zipfile.ZIP_STORED
) -> bytes:
    """The archive `data` after a change of its entries, by name without the first folder."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(entries)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def with_pickle(content: bytes) -> bytes:
    """An archive of torch with another pickle."""
    return changed(saved(torch.ones(2, 4)), lambda entries: entries.update({"data.pkl": content}))


class Runs:
    """Its pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self._call


def hostile_files(marker: str) -> dict[str, bytes]:
    """Files that must be refused, by what they do. Code in them would create the file `marker`."""
    ones = saved(torch.ones(2, 4))
    run = Runs(open, marker, "w")
    return {
        "empty": b"",
        "text": b"no tensor",
        "legacy": saved(torch.ones(2, 4), _use_new_zipfile_serialization=False),
        "code": with_pickle(pickle.dumps(run, protocol=2)),
        "code, newer pickle": with_pickle(pickle.dumps(run, protocol=4)),
        "code in torch.save": saved(run),
        "code as bare pickle": pickle.dumps(run),
        "memory by bytearray": with_pickle(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R."),
        "memory by memo": with_pickle(b"\x80\x02Nr\xff\xff\xff\x7f."),
        "long pickle": with_pickle(b"\x80\x02" + b"(" * 5000 + b"."),
        "pickle ends early": with_pickle(b"\x80\x02(((("),
        "bomb": _bomb(),
        "claims more than it has": changed(ones, lambda entries: entries.update({"data/0": b"\0" * 8})),
        "many entries": changed(ones, lambda entries: entries.update({f"data/{i}": b"" for i in range(1, 100)})),
        "cut": ones[: len(ones) // 2],
        "entries overlap": _overlapping(ones),
        "no pickle": changed(ones, lambda entries: entries.pop("data.pkl")),
        "no values": changed(ones, lambda entries: entries.pop("data/0")),
        "big-endian": changed(ones, lambda entries: entries.update({"byteorder": b"middle"})),
        "a list": saved([torch.ones(2, 4)]),
        "a dictionary": saved({"a": torch.ones(2, 4)}),
        "sparse": saved(torch.ones(2, 4).to_sparse()),
        "float64": saved(torch.ones(2, 4).double()),
        "integers": saved(torch.ones(2, 4, dtype=torch.int64)),
        "a module": saved(torch.nn.Linear(2, 2)),
    }


@functools.cache
def _bomb() -> bytes:
    ones = saved(torch.ones(2, 4))
    return changed(ones, lambda entries: entries.update({"data/0": bytes(50_000_000)}), zipfile.ZIP_DEFLATED)


def _overlapping(data: bytes) -> bytes:
    """The archive with an entry's size in the directory beyond the file's end."""
    place = data.rindex(b"PK\1\2")
    return data[: place + 20] + struct.pack("<II", 2**31, 2**31) + data[place + 28 :]
