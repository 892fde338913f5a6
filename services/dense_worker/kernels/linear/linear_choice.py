"""Chooses the kernel of each linear layer by measurement: the format's reference (cuBLAS) or one of ours.

Ours streams the weights for few rows; for more it multiplies tiles, of quantized weights only.

The speed of a layer's kernel depends on its neighbours: how much of a kernel's start overlaps with the end of the
previous kernel depends on both. So whole steps are timed, and one layer's kernel is exchanged at a time.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Hashable, Sequence

import structlog
import torch

from services.dense_worker.kernels.linear.linear import Linear

log = structlog.get_logger()

_Key = tuple[Hashable, int, int, int | None]

ROW_BUCKETS = (1, 16, 32, 64)  # each variant of the streaming kernels serves up to this many tokens
TILED_BUCKETS = (128, 256, 512, 1024)  # the same of the kernels of tiles, for more tokens than those
_MIN_GAIN = 0.002  # fraction of a step's time; smaller gains are noise
_NUM_REPLAYS = 5


class LinearKernel(enum.Enum):
    """The implementations of a linear layer."""

    CUBLAS = "cublas"  # of quantized layers: product of codes, or of dequantized weights; fuses nothing after it
    STREAMED = "streamed"  # such as `plain_gemv`: fuses the following operations and, for one row, the norm before
    TILED = "tiled"  # `TiledMatmul`, of some quantized layers: fuses what CUBLAS does


def row_bucket(num_rows: int) -> int | None:
    """The bucket of `num_rows` tokens; None if they are too many for our kernels."""
    return next((bucket for bucket in (*ROW_BUCKETS, *TILED_BUCKETS) if num_rows <= bucket), None)


class LinearChoice:
    """The faster kernel for each (format, out_features, in_features, bucket); cuBLAS if it was not measured."""

    def __init__(self) -> None:
        self._kernels: dict[_Key, LinearKernel] = {}

    def kernel(self, linear: Linear, num_rows: int) -> LinearKernel:
        """The chosen kernel for `num_rows` tokens."""
        return self._kernels.get(_key(linear, num_rows), LinearKernel.CUBLAS)

    def set_all(self, linears: Sequence[Linear], kernel: LinearKernel) -> None:
        """Chooses `kernel` for layers like these in every bucket that it has."""
        for linear in linears:
            for bucket in (*ROW_BUCKETS, *TILED_BUCKETS):
                if kernel in (LinearKernel.CUBLAS, _own_kernel(bucket)):
                    self._kernels[_key(linear, bucket)] = kernel

    def measure(self, linears: Sequence[Linear], num_rows: int, run_step: Callable[[], object]) -> None:
        """Replaces our kernel for so many rows by cuBLAS wherever that makes `run_step` faster.

        `linears` has one of each kind of layer with such a kernel; `run_step` enqueues a step of `num_rows` tokens with
        the current choice. Waits for the device. After an error our kernel runs what was not measured.
        """
        own = _own_kernel(num_rows)
        keys = [_key(linear, num_rows) for linear in linears]
        self._kernels |= dict.fromkeys(keys, own)
        own_us = fastest_us = time_in_graph_us(run_step)
        for key in keys:
            self._kernels[key], step_us = LinearKernel.CUBLAS, math.inf
            try:
                step_us = time_in_graph_us(run_step)
            finally:
                if step_us < fastest_us * (1 - _MIN_GAIN):
                    fastest_us = step_us
                else:
                    self._kernels[key] = own
        log.info(
            "linear kernels chosen",
            max_rows=row_bucket(num_rows),
            cublas=[f"{key[1]}x{key[2]}" for key in keys if self._kernels[key] is LinearKernel.CUBLAS],
            step_us=round(fastest_us, 1),
            own=own.value,
            all_own_us=round(own_us, 1),
        )


def time_in_graph_us(run: Callable[[], object]) -> float:
    """Median microseconds of the work that `run` enqueues, captured in a CUDA graph. Waits for the device.

    Other threads may call CUDA meanwhile, as those that load kernels do.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    times_us = []
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
        graph.replay()
        for _ in range(_NUM_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_us.append(start.elapsed_time(end) * 1000)
    return statistics.median(times_us)


def _own_kernel(num_rows: int) -> LinearKernel:
    return LinearKernel.STREAMED if num_rows <= ROW_BUCKETS[-1] else LinearKernel.TILED


def _key(linear: Linear, num_rows: int) -> _Key:
    return linear.weight.kind, linear.out_features, linear.in_features, row_bucket(num_rows)
