"""What is begun of a worker's GPU before torch is there, with a driver that only notes its calls."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from services.common.open_gpu import open_gpu_ahead


def open_with(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any], device: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setitem(os.environ, "CUDA_MODULE_LOADING", "EAGER")
    before = set(threading.enumerate())
    open_gpu_ahead(device)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER", "what a user has set stays"


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_context_of_the_configured_device_is_made(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    opened: list[int] = []

    def get_device(place: Any, number: int) -> int:
        place._obj.value = 70 + number
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: flags,
        cuDeviceGet=get_device,
        cuDevicePrimaryCtxRetain=lambda context, found: opened.append(found.value),
    )
    open_with(monkeypatch, {"libcuda.so.1": driver}.__getitem__, device)
    assert opened == [70 + index]


def test_a_driver_that_is_missing_or_fails_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    open_with(monkeypatch, missing, "auto")
    without_device = SimpleNamespace(cuInit=lambda flags: 100)  # and nothing else is asked
    open_with(monkeypatch, lambda name: without_device, "auto")


def test_threads_take_turns_as_before_once_the_names_of_kernels_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals: list[float] = []
    cache: Any = ModuleType("triton.runtime.cache")
    cache.triton_key = lambda: intervals.append(sys.getswitchinterval())
    for module in (ModuleType("triton"), ModuleType("triton.runtime"), cache):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)  # gateways in this process may have set another
    usual_s = sys.getswitchinterval()
    try:
        open_with(monkeypatch, lambda name: SimpleNamespace(cuInit=lambda flags: 100), "auto")
        assert len(intervals) == 1 and intervals[0] < usual_s / 10
        assert sys.getswitchinterval() == usual_s
    finally:
        sys.setswitchinterval(before_s)
