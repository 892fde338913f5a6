"""The plan cache: what it finds again, why it does not, what interruptions and full disks leave behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import CapacityError, ConfigError
from services.dense_worker.tensorrt.engine_plan_cache import (
    CachedEnginePlan,
    EnginePlanCache,
    EnginePlanKey,
    EnginePlanRecord,
)
from services.dense_worker.tensorrt.profiles import Profile

KEY = EnginePlanKey(
    segment="middle",
    dtype="float16",
    tensorrt="TensorRT 8.6.0",
    gpu="NVIDIA H200",
    num_sms=132,
    profile="1-16@4",
    network="a" * 64,
)
ROOT = Path(__file__).parents[4]


def cached(key: EnginePlanKey = KEY, plan: bytes = b"plan") -> CachedEnginePlan:
    record = EnginePlanRecord(
        key, hashlib.sha256(plan).hexdigest(), len(plan), 1.5, [{"name": "attn_out"}], [], {"Gemm": 4}
    )
    return CachedEnginePlan(record, plan)


@pytest.fixture
def cache(tmp_path: Path) -> EnginePlanCache:
    return EnginePlanCache(tmp_path)


def test_a_stored_plan_is_found_again_by_an_equal_key(cache: EnginePlanCache) -> None:
    assert cache.find(KEY) is None
    cache.store(cached())
    assert EnginePlanCache(cache.directory).find(replace(KEY)) == cached()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segment", "last"),
        ("dtype", "float32"),
        ("tensorrt", "TensorRT 10.3.0"),
        ("gpu", "NVIDIA H100"),
        ("num_sms", 66),
        ("profile", "1-32@8"),
        ("network", "b" * 64),
        ("recipe", 99),
    ],
)
def test_any_other_key_finds_nothing_and_the_reason_is_named(
    cache: EnginePlanCache, field: str, value: object
) -> None:
    cache.store(cached())
    other = replace(KEY, **{field: value})
    assert cache.find(other) is None
    assert cache.find(KEY) is not None
    why = cache.why_missing(other)
    if field in ("segment", "profile"):
        assert why == "no plan yet"
    else:
        assert why.startswith(f"{field} {str(value)[:12]}") and " instead of " in why and ";" not in why


def test_the_reason_is_the_difference_to_the_nearest_plan(cache: EnginePlanCache) -> None:
    cache.store(cached(replace(KEY, gpu="NVIDIA A100", num_sms=108, network="c" * 64)))
    cache.store(cached(replace(KEY, num_sms=66)))
    assert cache.why_missing(KEY) == "num_sms 132 instead of 66"


def test_plans_of_other_profiles_are_no_reason(cache: EnginePlanCache) -> None:
    """The other plans of one build differ by their profiles alone."""
    cache.store(cached(replace(KEY, profile="17-32@32")))
    cache.store(cached(replace(KEY, gpu="NVIDIA H100", num_sms=66)))
    assert cache.why_missing(KEY) == "gpu NVIDIA H200 instead of NVIDIA H100; num_sms 132 instead of 66"


def test_a_plan_names_its_profile(cache: EnginePlanCache) -> None:
    stored = cached(replace(KEY, profile="17-32@24"))
    cache.store(stored)
    found = cache.find(stored.record.key)
    assert found.profile == Profile(17, 24, 32)
    assert found.record.key.title == "middle 17-32@24"


def test_plans_of_several_keys_lie_side_by_side(cache: EnginePlanCache) -> None:
    other = replace(KEY, gpu="NVIDIA H100")
    cache.store(cached(plan=b"one"))
    cache.store(cached(other, plan=b"two"))
    assert cache.find(KEY).plan == b"one" and cache.find(other).plan == b"two"
    assert {record.key for record in cache.records()} == {KEY, other}


def test_a_damaged_or_half_written_plan_counts_as_missing(cache: EnginePlanCache) -> None:
    cache.store(cached())
    plan, record = cache.directory / f"{KEY.file_stem}.plan", cache.directory / f"{KEY.file_stem}.json"
    plan.write_bytes(b"pl")
    assert cache.find(KEY) is None
    assert "missing, damaged or was changed" in cache.why_missing(KEY)
    plan.unlink()
    assert cache.find(KEY) is None
    cache.store(cached())
    record.write_text(record.read_text()[:50])
    assert cache.find(KEY) is None and cache.records() == []
    record.write_text(json.dumps({"format": "of a later version"}))
    assert cache.find(KEY) is None and cache.why_missing(KEY) == f"{record.name} is damaged or cannot be read"
    record.unlink()
    assert cache.find(KEY) is None and cache.why_missing(KEY) == "no plan yet"
    cache.store(cached())
    assert cache.find(KEY) == cached()


def test_a_plan_renamed_by_hand_is_not_taken(cache: EnginePlanCache) -> None:
    other = replace(KEY, gpu="NVIDIA H100")
    cache.store(cached(other))
    for suffix in ("plan", "json"):
        (cache.directory / f"{other.file_stem}.{suffix}").rename(
            cache.directory / f"{KEY.file_stem}.{suffix}"
        )
    assert cache.find(KEY) is None


@pytest.mark.parametrize("failing_write", [0, 1])
def test_a_full_disk_leaves_no_plan_and_no_rest(
    cache: EnginePlanCache, monkeypatch: pytest.MonkeyPatch, failing_write: int
) -> None:
    num_writes = 0

    def fsync(descriptor: int) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes > failing_write:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CapacityError, match=rf"{cache.directory} has no space for middle-.*, \d+ bytes"):
        cache.store(cached())
    monkeypatch.undo()
    assert cache.find(KEY) is None
    assert not list(cache.directory.glob(".*"))


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="cannot be made"),
        EnginePlanCache(tmp_path / "file" / "plans").lock(print),
    ):
        pass


HOLD_LOCK = """
import sys, time
from pathlib import Path
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
directory = Path(sys.argv[1])
with EnginePlanCache(directory).lock(print):
    (directory / ".middle.plan.x.partial").write_bytes(b"half")
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_killed_builder_frees_the_lock_and_its_half_plan_is_cleared(cache: EnginePlanCache) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(cache.directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        left = cache.directory / ".middle.plan.x.partial"
        assert left.is_file()
        waits: list[str] = []

        def kill(line: str) -> None:
            waits.append(line)
            other.send_signal(signal.SIGKILL)

        start = time.monotonic()
        with cache.lock(kill):
            assert not left.exists()
        assert time.monotonic() - start < 30
    assert len(waits) == 1 and "another process builds" in waits[0]
