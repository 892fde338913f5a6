"""`open_gpu_ahead`: makes the context of a worker's GPU while the worker imports its modules, which takes longer.

The driver needs no torch for it. As a client of MPS the first process also waits until MPS has started its server.
"""

from __future__ import annotations

import ctypes
import os
import threading


def open_gpu_ahead(device: str) -> None:
    """Begins, on a thread of its own. What fails here fails again, with a message, when torch needs the GPU.

    device: a key of the config.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, if it comes first
    index = int(device.partition(":")[2] or 0)
    threading.Thread(target=_open, args=(index,), name="open-gpu", daemon=True).start()


def _open(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # torch uses the same one
