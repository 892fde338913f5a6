"""The timings that TensorRT keeps from one build for the next one, in a file with a header and a checksum.

A damaged timing cache can crash TensorRT, and timings of another version, GPU or driver mislead it. So TensorRT gets
only what `read_timings` has checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from services.dense_worker.tensorrt.files.atomic_file import write_atomically

_KIND = "timings of TensorRT, format 1"


@dataclass(frozen=True, slots=True)
class TimingOrigin:
    """What timings depend on."""

    tensorrt: str  # name and version
    gpu: str
    num_sms: int  # SMs that the process could use
    driver: str


def read_timings(path: Path, origin: TimingOrigin, report: Callable[[str], None]) -> bytes:
    """The timings in a file; empty if there is none.

    Also empty, with a line to `report`, if the file cannot be read, is damaged, or is of another origin.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        report(f"{path} is not used: it cannot be read: {error.strerror}")
        return b""
    header, _, data = content.partition(b"\n")
    try:
        values = json.loads(header)
        if values["kind"] != _KIND:
            raise ValueError
        found, is_whole = TimingOrigin(**values["origin"]), values["sha256"] == _digest(data)
    except (ValueError, TypeError, LookupError):
        report(f"{path} is not used: it has no header of this version")
        return b""
    if not is_whole:
        report(f"{path} is not used: it is damaged, its sha256 is not the one in its header")
        return b""
    if found != origin:
        own, other = asdict(origin), asdict(found)
        differences = (f"{name} {other[name]} instead of {own[name]}" for name in own if own[name] != other[name])
        report(f"{path} is not used: it is of {', '.join(differences)}")
        return b""
    return data


def write_timings(path: Path, origin: TimingOrigin, data: bytes) -> None:
    """Replaces the file. Raises CapacityError if the disk is full, ConfigError if the file cannot be written."""
    header = json.dumps({"kind": _KIND, "sha256": _digest(data), "origin": asdict(origin)})
    write_atomically(path, header.encode() + b"\n" + data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
