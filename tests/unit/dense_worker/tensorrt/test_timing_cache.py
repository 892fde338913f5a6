"""The timing cache: TensorRT gets the bytes that it wrote, or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.errors import CapacityError
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.files import timing_cache
from services.dense_worker.tensorrt.files.timing_cache import TimingOrigin, read_timings, write_timings
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.support.model_configs import small_config
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt

ORIGIN = TimingOrigin("TensorRT 8.6.0", "NVIDIA H200", 132, "CUDA 13.0, driver 580.65")
H200 = Gpu("NVIDIA H200", (9, 0), 132, "CUDA 13.0, driver 580.65")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "timing.cache"
    write_timings(path, ORIGIN, b"timings\n\x00\xff")
    return path


def read(file: Path, origin: TimingOrigin = ORIGIN) -> tuple[bytes, list[str]]:
    lines: list[str] = []
    return read_timings(file, origin, lines.append), lines


def test_timings_come_back_as_they_were_written(file: Path) -> None:
    assert read(file) == (b"timings\n\x00\xff", [])


def test_no_file_is_no_line(tmp_path: Path) -> None:
    assert read(tmp_path / "missing") == (b"", [])


def test_any_changed_or_missing_byte_is_found(file: Path) -> None:
    content = file.read_bytes()
    for i in range(len(content)):
        for changed in (content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :], content[:i]):
            file.write_bytes(changed)
            data, lines = read(file)
            assert data == b"" and len(lines) == 1 and str(file) in lines[0], (i, lines)


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"[1]\nabc", b"null", b"raw bytes of TensorRT", b"\xff" * 99])
def test_what_has_no_header_is_not_used(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    data, [line] = read(file)
    assert data == b"" and "has no header" in line


@pytest.mark.parametrize(
    ("field", "value"),
    [("tensorrt", "TensorRT 10.3.0"), ("gpu", "NVIDIA H100"), ("num_sms", 66), ("driver", "CUDA 12.4")],
)
def test_timings_of_another_origin_are_not_used_and_the_difference_is_named(
    file: Path, field: str, value: object
) -> None:
    data, [line] = read(file, replace(ORIGIN, **{field: value}))
    assert data == b"" and line.endswith(f"it is of {field} {getattr(ORIGIN, field)} instead of {value}")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    data, [line] = read(tmp_path)
    assert data == b"" and "cannot be read" in line


def build_all(trt: FakeTensorRT, directory: Path, gpu: Gpu = H200, *, again: bool = True) -> list[str]:
    """Builds all plans; returns the builder's lines."""
    if again:
        for path in directory.glob("*.plan"):
            path.unlink()
    lines: list[str] = []
    builder = EnginePlanBuilder(TensorRT(trt), gpu, parse_profiles("1-8"), EnginePlanCache(directory))
    builder.find_or_build(export_networks(small_config("llama"), torch.float16), torch.float16, None, lines.append)
    return lines


def test_damaged_timings_never_reach_the_library_and_are_replaced(tmp_path: Path) -> None:
    """The stand-in would end the process, as 8.6.0 does."""
    build_all(make_tensorrt("8.6.0"), tmp_path)
    [file] = tmp_path.glob("timing-*.cache")
    file.write_bytes(file.read_bytes()[:-3] + b"\x00\x00\x00")
    trt = make_tensorrt("8.6.0")
    lines = [line for line in build_all(trt, tmp_path) if "is not used" in line]
    assert len(lines) == 1 and "damaged" in lines[0]
    given = [data for _, data in trt.named("create_timing_cache")]
    assert given[0] == b"" and given[1].startswith(trt.timings_header)


def test_timings_of_another_driver_are_replaced(tmp_path: Path) -> None:
    build_all(make_tensorrt("8.6.0"), tmp_path)
    updated, trt = replace(H200, driver="CUDA 13.1, driver 590.10"), make_tensorrt("8.6.0")
    lines = [line for line in build_all(trt, tmp_path, updated) if "is not used" in line]
    assert len(lines) == 1 and "driver CUDA 13.0, driver 580.65 instead of CUDA 13.1, driver 590.10" in lines[0]
    assert trt.named("create_timing_cache")[0] == ("create_timing_cache", b"")
    assert not any("is not used" in line for line in build_all(make_tensorrt("8.6.0"), tmp_path, updated))


def test_a_disk_too_full_for_the_timings_does_not_cost_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise CapacityError(f"{path.parent} has no space for {path.name}, {len(data)} bytes")

    monkeypatch.setattr(timing_cache, "write_atomically", full)
    lines = build_all(make_tensorrt("8.6.0"), tmp_path)
    assert sum("has no space for timing-" in line for line in lines) == 3
    assert len(list(tmp_path.glob("*.plan"))) == 3
