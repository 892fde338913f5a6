"""GPUs as NVIDIA's program lists them, and which of them torch calls by a number."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launch.gpus import Gpu, find_gpu, list_gpus

LISTED = "GPU-aa, NVIDIA H100 80GB HBM3, 80994\nGPU-bb, NVIDIA H100 80GB HBM3, 1024\n"
ALIKE = [Gpu("GPU-aa", "H100", 1), Gpu("GPU-bb", "H100", 2)]
MIXED = [Gpu("GPU-aa", "T4", 1), Gpu("GPU-bb", "H100", 2)]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"printf '{LISTED}'", [80994 << 20, 1 << 30]),
        ("echo 'GPU-aa, GB10, [N/A]'", []),
        ("echo 'no devices were found'; exit 6", []),
    ],
)
def test_free_memory_is_read(script: str, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [gpu.free_bytes for gpu in list_gpus()] == expected


def test_without_the_program_no_gpu_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []


@pytest.mark.parametrize(
    ("device", "gpus", "visible", "expected"),
    [
        ("auto", ALIKE, None, "GPU-aa"),
        ("cuda:1", ALIKE, None, "GPU-bb"),
        ("cuda:2", ALIKE, None, None),
        ("cuda", ALIKE, "1,0", "GPU-bb"),
        ("cuda:1", ALIKE, "1", None),
        ("cuda", MIXED, None, None),  # CUDA lists the fastest first
        ("cuda", MIXED, "GPU-b", "GPU-bb"),
        ("cuda", ALIKE, "MIG-aa", None),
        ("cuda", [], None, None),
    ],
)
def test_the_gpu_that_torch_means(device: str, gpus: list[Gpu], visible: str | None, expected: str | None) -> None:
    found = find_gpu(device, gpus, visible)
    assert (found and found.uuid) == expected
