"""A directory of TensorRT plans, each with a JSON record of its network and its target.

Plans are named after their keys, so plans for several GPUs, versions and models can share a directory, and a wrong one
is never used. The record is written last: a plan without a record does not count. Several processes may use one
directory; a process that builds holds the directory's lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.dense_worker.tensorrt.files.atomic_file import TEMPORARY_SUFFIX, make_directory, write_atomically
from services.dense_worker.tensorrt.files.timing_cache import TimingOrigin, read_timings, write_timings
from services.dense_worker.tensorrt.profiles import Profile, parse_profile

RECIPE = 9  # increase it when the builder's settings in api.py, onnx_forms.py or the fields of `EnginePlanKey` change


@dataclass(frozen=True, slots=True)
class EnginePlanKey:
    """Everything a plan depends on."""

    segment: str
    dtype: str
    tensorrt: str  # name and version
    gpu: str
    num_sms: int  # SMs that the process could use; under an MPS limit fewer than the GPU has
    profile: str  # the sizes that it is for
    network: str  # sha256 of the ONNX model
    recipe: int = RECIPE

    @property
    def title(self) -> str:
        """The segment and the plan's profile, for messages."""
        return f"{self.segment} {self.profile}"

    @property
    def file_stem(self) -> str:
        """The plan's file name without suffix."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return f"{self.segment}-{digest[:16]}"

    @property
    def plan_name(self) -> str:
        """The plan's file name."""
        return f"{self.file_stem}.plan"

    def differences(self, built: EnginePlanKey) -> list[str]:
        """The differences between this key and the key of the plan `built`, in words."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(built, f.name)]
        return [f"{name} {_short(getattr(self, name))} instead of {_short(getattr(built, name))}" for name in names]


@dataclass(frozen=True, slots=True)
class EnginePlanRecord:
    """The record of a plan."""

    key: EnginePlanKey
    plan_sha256: str
    plan_bytes: int
    build_s: float
    inputs: list[dict[str, Any]]  # name, dtype, shape
    outputs: list[dict[str, Any]]
    operators: dict[str, int]  # operators of the ONNX model with their numbers
    layers: list[Any] | None = None  # TensorRT's description; None: built without a GPU that could load it
    measured_us: dict[str, dict[str, float]] | None = None  # microseconds, by size, then by "tensorrt" and "torch"
    measured_with: str | None = None  # the version of torch that was measured


@dataclass(frozen=True, slots=True)
class CachedEnginePlan:
    """A plan and its record."""

    record: EnginePlanRecord
    plan: bytes

    @property
    def profile(self) -> Profile:
        """The sizes that the plan is for."""
        return parse_profile(self.record.key.profile)


EnginePlans = Mapping[str, Sequence[CachedEnginePlan]]  # by segment, in the order of their profiles


class EnginePlanCache:
    """The plans in one directory. Reading needs no lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, key: EnginePlanKey) -> CachedEnginePlan | None:
        """The plan for `key`; None if there is none or its file has changed."""
        record = self._read_record(self._record_path(key))
        if record is None or record.key != key:
            return None
        try:
            plan = self._plan_path(key).read_bytes()
        except OSError:
            return None
        return CachedEnginePlan(record, plan) if hashlib.sha256(plan).hexdigest() == record.plan_sha256 else None

    def store(self, cached: CachedEnginePlan) -> None:
        """Adds or replaces a plan. Raises CapacityError or ConfigError if it cannot be written."""
        write_atomically(self._plan_path(cached.record.key), cached.plan)
        self.update(cached.record)

    def update(self, record: EnginePlanRecord) -> None:
        """Replaces the record of an existing plan."""
        write_atomically(self._record_path(record.key), json.dumps(asdict(record), indent=1).encode())

    def why_missing(self, key: EnginePlanKey) -> str:
        """Why `find` returns None, in words: a file is damaged, or how the most similar plan differs.

        Only plans of the same segment and profile are compared.
        """
        path = self._record_path(key)
        if path.exists() and self._read_record(path) is None:
            return f"{path.name} is damaged or cannot be read"
        keys = (record.key for record in self.records())
        others = [other for other in keys if (other.segment, other.profile) == (key.segment, key.profile)]
        if key in others:
            return f"{key.plan_name} is missing, damaged or was changed"
        if not others:
            return "no plan yet"
        return "; ".join(min((key.differences(other) for other in others), key=len))

    def records(self) -> list[EnginePlanRecord]:
        """The records of all plans in the directory, sorted by name."""
        records = map(self._read_record, sorted(self.directory.glob("*-*.json")))
        return [record for record in records if record is not None]

    @contextmanager
    def lock(self, report: Callable[[str], None]) -> Iterator[None]:
        """A context that holds the directory's build lock; waits for it. Removes files that killed processes left."""
        make_directory(self.directory)
        try:
            file = (self.directory / "build.lock").open("ab")
        except OSError as error:
            raise ConfigError(f"plan directory {self.directory} cannot be written: {error.strerror}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"another process builds in {self.directory}, waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            for left in self.directory.glob(f".*{TEMPORARY_SUFFIX}"):
                left.unlink(missing_ok=True)
            yield

    def timing_cache(self, key: EnginePlanKey, driver: str, report: Callable[[str], None]) -> bytes:
        """The timings of earlier builds with this TensorRT, GPU and driver; empty at first.

        `report` receives a line if there are timings that cannot be used.
        """
        return read_timings(self._timing_path(key), _origin(key, driver), report)

    def store_timing_cache(self, key: EnginePlanKey, driver: str, data: bytes) -> None:
        """Replaces the timings for this TensorRT on this GPU. Raises CapacityError or ConfigError if it cannot."""
        write_timings(self._timing_path(key), _origin(key, driver), data)

    def _timing_path(self, key: EnginePlanKey) -> Path:
        digest = hashlib.sha256(f"{key.tensorrt}\0{key.gpu}\0{key.num_sms}".encode()).hexdigest()
        return self.directory / f"timing-{digest[:16]}.cache"

    def _plan_path(self, key: EnginePlanKey) -> Path:
        return self.directory / key.plan_name

    def _record_path(self, key: EnginePlanKey) -> Path:
        return self.directory / f"{key.file_stem}.json"

    @staticmethod
    def _read_record(path: Path) -> EnginePlanRecord | None:
        """The record in a file; None if the file is missing or not a record."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return replace(EnginePlanRecord(**values), key=EnginePlanKey(**values["key"]))
        except (OSError, ValueError, TypeError, LookupError):
            return None


def _origin(key: EnginePlanKey, driver: str) -> TimingOrigin:
    return TimingOrigin(key.tensorrt, key.gpu, key.num_sms, driver)


def _short(value: Any) -> str:
    """The beginning of a digest; any other value in full."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)
