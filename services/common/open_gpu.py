"""`open_gpu_ahead`: what a worker's GPU needs and Python's lock does not, while the worker imports its modules.

The driver makes the context without torch; as a client of MPS the first process also waits until MPS has started its
server. Triton reads all of its own files for the names of its cached kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable

_SWITCH_INTERVAL_S = 0.0002


def open_gpu_ahead(device: str) -> None:
    """Begins, on threads of its own. What fails here fails again, with a message, when torch needs the GPU.

    device: a key of the config.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, if it comes first
    index = int(device.partition(":")[2] or 0)
    threading.Thread(target=_open, args=(index,), name="open-gpu", daemon=True).start()
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key  # which keeps its result

        threading.Thread(target=_keep_triton_key, args=(triton_key,), name="triton-key", daemon=True).start()


def _keep_triton_key(triton_key: Callable[[], str]) -> None:
    """It wants Python's lock 800 times, for each of which imports on another thread would let it wait 5 ms."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        triton_key()
    finally:
        sys.setswitchinterval(interval_s)


def _open(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # torch uses the same one
