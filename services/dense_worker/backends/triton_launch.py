"""How the dense stroke's Triton kernels are launched: overlapped with the kernel before, or only compiled.

Kernels of a step depend on one another, and an idle gap at each of 129 borders costs a decode step of a 7B
model about a tenth of its time. With programmatic dependent launch (Hopper and later) a kernel starts while
the one before it ends: it may read weights at once, and anything that a kernel writes after `gdc_wait` only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

_PDL_CAPABILITY = (9, 0)


class KernelLauncher:
    """Launches on the current stream of `device`. Every kernel it launches takes the constexpr PDL.

    A kernel with PDL calls `gdc_launch_dependents` at its start and `gdc_wait` in every program, before it
    touches what an earlier kernel writes or reads; then completion is transitive, as without.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_sms = 8  # of the interpreter: some, so that work is divided
        self.shared_memory_bytes = 0  # that a program may use
        self._options: dict[str, Any] = {"PDL": False}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_sms = properties.multi_processor_count
            self.shared_memory_bytes = properties.shared_memory_per_block_optin
            if torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY:
                self._options = {"PDL": True, "launch_pdl": True}
        self._is_compiling = False

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch `kernel`, or see that it is compiled (inside `compiling`)."""
        if self._is_compiling:
            kernel.warmup(*args, grid=grid, **constants, **self._options)
        else:
            kernel[grid](*args, **constants, **self._options)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Launches within only compile, several at a time; all are compiled at the end."""
        self._is_compiling = True
        try:
            with ThreadPoolExecutor(os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
                yield
        finally:
            self._is_compiling = False
