"""Chooses the fastest of cuBLASLt's candidates for plain products of some tens to hundreds of rows, by measurement.

torch takes the candidate that the library's heuristics put first. For steps with prompts, whose tiles fill the GPU only
a few times, it is often not the fastest: 240 rows took longer than 256.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import torch

from services.common.errors import DeviceError
from services.dense_worker.kernels.linear.cublaslt import Candidate, CublasLt
from services.dense_worker.kernels.linear.linear import DTYPES_OF_16_BITS
from services.dense_worker.kernels.linear.linear_choice import ROW_BUCKETS

log = structlog.get_logger()

_MAX_CHOSEN_ROWS = 512  # beyond, the first candidate is at most 3 % slower than the fastest
_NUM_CANDIDATES = 5  # later ones were not faster
_MIN_GAIN = 0.03  # fraction of a product's time; less is noise
_NUM_TIMED, _NUM_TIMES = 3, 2  # products in a measurement, and measurements
_FLUSHED_BYTES = 64 << 20  # more than the second-level cache: a step reads each weight from memory
_ALIGNMENT = 256  # bytes, which the heuristics take for granted

_Key = tuple[torch.dtype, torch.Size, torch.Size, int, int]


class MatmulChoice:
    """Use it on one stream. Nothing is chosen before `choosing`, which waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library: CublasLt | None = None
        self._flushed: torch.Tensor | None = None  # None: not choosing
        self._chosen: dict[_Key, Candidate | None] = {}  # None: torch's

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """A context in which each product of a new kind is measured before it is computed."""
        self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=self._device)
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self._flushed = None
        log.debug(
            "matrix products chosen",
            num_kinds=len(self._chosen),
            num_not_torchs=sum(candidate is not None for candidate in self._chosen.values()),
            seconds=round(time.monotonic() - begin_s, 3),
        )

    def multiply(self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> bool:
        """out = x matrix.T by the chosen candidate; False, and nothing, where that is torch's.

        x: [n, in_features], matrix: [out_features, in_features], out: [n, out_features]
        """
        if not _has_choice(x, matrix, out):
            return False
        if self._library is None:
            if self._flushed is None:
                return False
            self._library = CublasLt(self._device)
        key = x.dtype, x.shape, matrix.shape, x.stride(0), out.stride(0)
        if self._flushed is not None and key not in self._chosen:
            self._chosen[key] = self._fastest(self._library, x, matrix, out)
        candidate = self._chosen.get(key)
        if candidate is None:
            return False
        self._library.multiply(candidate, x, matrix, out)
        return True

    def _fastest(
        self, library: CublasLt, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor
    ) -> Candidate | None:
        """None: torch's product is as fast."""

        def time_us(multiply: Callable[[], object]) -> float:
            def run() -> None:
                for _ in range(_NUM_TIMED):
                    self._flushed.zero_()
                    multiply()

            return time_of_us(run)

        flush_us = time_us(lambda: None)
        own_us = time_us(lambda: torch.mm(x, matrix.t(), out=out))
        limit_us = own_us - _MIN_GAIN * (own_us - flush_us)
        fastest: Candidate | None = None
        try:
            for candidate in library.candidates(x, matrix, out, _NUM_CANDIDATES):
                found_us = time_us(lambda candidate=candidate: library.multiply(candidate, x, matrix, out))
                if found_us < limit_us:
                    fastest, limit_us = candidate, found_us
        except DeviceError as error:  # torch's own product is always there
            shapes = {"x": tuple(x.shape), "matrix": tuple(matrix.shape)}
            log.warning("no further candidates of a product", **shapes, reason=str(error))
        return fastest


def time_of_us(run: Callable[[], object]) -> float:
    """The shortest time of the work that `run` enqueues. Waits for the device."""
    times_us = []
    for _ in range(1 + _NUM_TIMES):  # the first one may load kernels
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times_us.append(start.elapsed_time(end) * 1000)
    return min(times_us[1:])


def has_choice(num_rows: int) -> bool:
    """Whether products of so many rows may be chosen."""
    return ROW_BUCKETS[-1] < num_rows <= _MAX_CHOSEN_ROWS


def _has_choice(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> bool:
    return (
        has_choice(len(x))
        and x.dtype in DTYPES_OF_16_BITS
        and x.dtype == matrix.dtype == out.dtype
        and x.stride(1) == out.stride(1) == 1
        and matrix.is_contiguous()
        and not any(each.data_ptr() % _ALIGNMENT for each in (x, matrix, out))
    )
