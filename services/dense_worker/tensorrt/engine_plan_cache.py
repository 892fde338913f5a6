"""A directory of TensorRT plans, each beside a JSON record of what it was built from and for.

A plan is named after its key, so those of several GPUs, versions and models lie side by side and a wrong one
is never picked. The record is written last: without it there is no plan. Several processes may use one
directory; who builds holds its lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.dense_worker.tensorrt.atomic_file import TEMPORARY_SUFFIX, make_directory, write_atomically

RECIPE = 1  # grows when the builder's settings in api.py change


@dataclass(frozen=True, slots=True)
class EnginePlanKey:
    """Everything a plan depends on."""

    segment: str
    dtype: str
    tensorrt: str  # name and version
    gpu: str
    num_sms: int  # that the process could use: fewer than the GPU has under an MPS limit
    profiles: str
    network: str  # sha256 of the ONNX model
    recipe: int = RECIPE

    @property
    def file_stem(self) -> str:
        """The plan's file name without suffix."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return f"{self.segment}-{digest[:16]}"

    def differences(self, built: EnginePlanKey) -> list[str]:
        """What this key asks for that the plan `built` is not."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(built, f.name)]
        return [
            f"{name} {_short(getattr(self, name))} instead of {_short(getattr(built, name))}"
            for name in names
        ]


@dataclass(frozen=True, slots=True)
class EnginePlanRecord:
    """What is known of a plan."""

    key: EnginePlanKey
    plan_sha256: str
    plan_bytes: int
    build_s: float
    inputs: list[dict[str, Any]]  # name, dtype, shape
    outputs: list[dict[str, Any]]
    operators: dict[str, int]  # of the ONNX model, how often each
    layers: list[Any] | None = None  # TensorRT's own description; None: built where no GPU could load it
    measured_us: dict[str, dict[str, float]] | None = None  # by size, then by "tensorrt" and "torch"
    measured_with: str | None = None  # the torch that was measured


@dataclass(frozen=True, slots=True)
class CachedEnginePlan:
    """A plan and what is known of it."""

    record: EnginePlanRecord
    plan: bytes


class EnginePlanCache:
    """The plans in one directory. Reading needs no lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, key: EnginePlanKey) -> CachedEnginePlan | None:
        """The plan for `key`, if there is one and it is as it was built."""
        record = self._read_record(self._record_path(key))
        if record is None or record.key != key:
            return None
        try:
            plan = self._plan_path(key).read_bytes()
        except OSError:
            return None
        return CachedEnginePlan(record, plan) if hashlib.sha256(plan).hexdigest() == record.plan_sha256 else None

    def store(self, cached: CachedEnginePlan) -> None:
        """Adds or replaces a plan. Raises CapacityError or ConfigError where it cannot be written."""
        write_atomically(self._plan_path(cached.record.key), cached.plan)
        self.update(cached.record)

    def update(self, record: EnginePlanRecord) -> None:
        """Replaces the record of a plan that is there."""
        write_atomically(self._record_path(record.key), json.dumps(asdict(record), indent=1).encode())

    def why_missing(self, key: EnginePlanKey) -> str:
        """In words, why `find` gives nothing: it is damaged, or how the plan nearest to it differs."""
        others = [record.key for record in self.records() if record.key.segment == key.segment]
        if key in others:
            return f"{self._plan_path(key).name} is missing, damaged or was changed"
        if not others:
            return "no plan yet"
        return "; ".join(min((key.differences(other) for other in others), key=len))

    def records(self) -> list[EnginePlanRecord]:
        """Of all plans in the directory, by name."""
        records = map(self._read_record, sorted(self.directory.glob("*-*.json")))
        return [record for record in records if record is not None]

    @contextmanager
    def lock(self, report: Callable[[str], None]) -> Iterator[None]:
        """The right to build, waited for; it ends with the process at the latest. Clears what a kill left."""
        make_directory(self.directory)
        try:
            file = (self.directory / "build.lock").open("ab")
        except OSError as error:
            raise ConfigError(
                f"plan directory {self.directory} cannot be written: {error.strerror}"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"another process builds in {self.directory}, waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            for left in self.directory.glob(f".*{TEMPORARY_SUFFIX}"):
                left.unlink(missing_ok=True)
            yield

    def timing_cache(self, key: EnginePlanKey) -> bytes:
        """What earlier builds with this TensorRT on this GPU have timed; empty at first."""
        path = self._timing_path(key)
        return path.read_bytes() if path.is_file() else b""

    def store_timing_cache(self, key: EnginePlanKey, data: bytes) -> None:
        """Replaces it."""
        write_atomically(self._timing_path(key), data)

    def _timing_path(self, key: EnginePlanKey) -> Path:
        digest = hashlib.sha256(f"{key.tensorrt}\0{key.gpu}\0{key.num_sms}".encode()).hexdigest()
        return self.directory / f"timing-{digest[:16]}.cache"

    def _plan_path(self, key: EnginePlanKey) -> Path:
        return self.directory / f"{key.file_stem}.plan"

    def _record_path(self, key: EnginePlanKey) -> Path:
        return self.directory / f"{key.file_stem}.json"

    @staticmethod
    def _read_record(path: Path) -> EnginePlanRecord | None:
        """None for a file that is not there or is no record."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return replace(EnginePlanRecord(**values), key=EnginePlanKey(**values["key"]))
        except (OSError, ValueError, TypeError, LookupError):
            return None


def _short(value: Any) -> str:
    """A digest's beginning; anything else whole."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)
