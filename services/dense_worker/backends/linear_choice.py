"""Which kernel runs a linear layer: its format's reference (cuBLAS) or streaming kernels, by measurement at start.

A layer's kernel shows its worth only between its neighbours: how much of a kernel's start hides behind the end
of the one before depends on both. So whole steps are timed, with one layer's kernel exchanged at a time.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Hashable, Sequence

import structlog
import torch

from services.dense_worker.model.linear import Linear

log = structlog.get_logger()

_Key = tuple[Hashable, int, int, int | None]

ROW_BUCKETS = (1, 16, 32, 64)  # tokens up to which the streaming kernels have a variant
_MIN_GAIN = 0.002  # of a step's time; less is noise
_NUM_REPLAYS = 5


class LinearKernel(enum.Enum):
    """The two implementations of a linear layer."""

    CUBLAS = "cublas"  # the reference of the weight's format, which fuses nothing
    STREAMED = "streamed"  # such as `streamed_plain`: fuses all that comes after, and the norm before one row


def row_bucket(num_rows: int) -> int | None:
    """The bucket that `num_rows` tokens belong to; None: too many for the streaming kernels."""
    return next((bucket for bucket in ROW_BUCKETS if num_rows <= bucket), None)


class LinearChoice:
    """The faster kernel for each (format, out_features, in_features, bucket); cuBLAS where nothing was measured."""

    def __init__(self) -> None:
        self._kernels: dict[_Key, LinearKernel] = {}

    def kernel(self, linear: Linear, num_rows: int) -> LinearKernel:
        """The choice for `num_rows` tokens."""
        return self._kernels.get(_key(linear, num_rows), LinearKernel.CUBLAS)

    def set_all(self, linears: Sequence[Linear], kernel: LinearKernel) -> None:
        """Choose `kernel` for layers like these in every bucket."""
        for linear in linears:
            for bucket in ROW_BUCKETS:
                self._kernels[_key(linear, bucket)] = kernel

    def measure(self, linears: Sequence[Linear], num_rows: int, run_step: Callable[[], object]) -> None:
        """Exchange the streaming kernel for cuBLAS wherever that makes `run_step` faster.

        `linears` holds one of each kind of layer; `run_step` enqueues a step of `num_rows` tokens that uses
        this choice. Waits for the device; for the start of the worker only.
        """
        keys = [_key(linear, num_rows) for linear in linears]
        self._kernels |= dict.fromkeys(keys, LinearKernel.STREAMED)
        streamed_us = fastest_us = time_in_graph_us(run_step)
        for key in keys:
            self._kernels[key] = LinearKernel.CUBLAS
            step_us = time_in_graph_us(run_step)
            if step_us < fastest_us * (1 - _MIN_GAIN):
                fastest_us = step_us
            else:
                self._kernels[key] = LinearKernel.STREAMED
        log.info(
            "linear kernels chosen",
            max_rows=row_bucket(num_rows),
            cublas=[f"{key[1]}x{key[2]}" for key in keys if self._kernels[key] is LinearKernel.CUBLAS],
            step_us=round(fastest_us, 1),
            all_streamed_us=round(streamed_us, 1),
        )


def time_in_graph_us(run: Callable[[], object], num_replays: int = _NUM_REPLAYS) -> float:
    """Median microseconds of what `run` enqueues, captured in a CUDA graph. Waits for the device."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    times_us = []
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        for _ in range(num_replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_us.append(start.elapsed_time(end) * 1000)
    return statistics.median(times_us)


def _key(linear: Linear, num_rows: int) -> _Key:
    return linear.weight.kind, linear.out_features, linear.in_features, row_bucket(num_rows)
