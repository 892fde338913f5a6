"""Launches the dense stroke's Triton kernels, overlapped with the previous kernel, or only compiles them.

Each kernel of a step depends on the one before. An idle gap between them, 129 times, costs a decode step of a 7B model
about a tenth of its time. With programmatic dependent launch (Hopper and later) a kernel starts while the previous one
ends: it may read weights at once, but the results of other kernels only after `gdc_wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.common.compile_kernels import compiling_together

_PDL_CAPABILITY = (9, 0)
_HOPPER = 9  # the major compute capability whose tensor cores multiply out of shared memory by `wgmma`


class KernelLauncher:
    """Launches on the current stream of `device`. Every kernel takes the constexpr PDL.

    A kernel with PDL calls `gdc_launch_dependents` at its start, and `gdc_wait` in every program before it accesses
    memory that an earlier kernel writes or reads; `begin` is both. Then a kernel's end implies the end of all earlier
    ones, as without PDL.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_sms = 8  # for Triton's interpreter: several, so that work is divided
        self.shared_memory_bytes = 0  # that one program may use
        self.is_hopper = False
        self._options: dict[str, Any] = {"PDL": False}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_sms = properties.multi_processor_count
            self.shared_memory_bytes = properties.shared_memory_per_block_optin
            capability = torch.cuda.get_device_capability(device)
            self.is_hopper = capability[0] == _HOPPER
            if capability >= _PDL_CAPABILITY:
                self._options = {"PDL": True, "launch_pdl": True}
        self._compilers: ThreadPoolExecutor | None = None  # None: launches launch

    @property
    def is_compiling(self) -> bool:
        """Whether launches only compile."""
        return self._compilers is not None

    def submit(self, compile_kernel: Callable[[], object]) -> None:
        """Compiles a kernel that is not Triton's inside `compiling`. An error must come again where it is loaded."""
        assert self._compilers is not None, "inside `compiling`"
        self._compilers.submit(compile_kernel)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launches `kernel`, or only compiles it inside `compiling`."""
        if self.is_compiling:
            kernel.warmup(*args, grid=grid, **constants, **self._options)
        else:
            kernel[grid](*args, **constants, **self._options)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context in which launches only compile, several at a time. At its end all are compiled."""
        try:
            with ThreadPoolExecutor() as threads, compiling_together():
                self._compilers = threads
                yield
        finally:
            self._compilers = None


@triton.jit
def begin(PDL: tl.constexpr):
    """The start of a kernel that reads nothing before the previous one has ended."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
