"""`StepGraphs`: the captured CUDA graphs of one kind of step, alike in both workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import structlog
import torch

from services.common.gpu import naming_what_needs_memory

log = structlog.get_logger()

Size = TypeVar("Size")


class StepGraphs(Generic[Size]):
    """One graph of `run(size)` for each size, all in one memory pool. For one thread.

    `warm_up(size)` runs uncaptured before, to compile kernels; neither may wait for the peer.
    """

    def __init__(
        self, stream: torch.cuda.Stream, warm_up: Callable[[Size], None], run: Callable[[Size], None]
    ) -> None:
        self._stream = stream
        self._warm_up = warm_up
        self._run = run
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}

    def capture_all(self, sizes: Iterable[Size]) -> None:
        """Waits for the device. Start with the largest: the others then find memory in the pool."""
        start = time.monotonic()
        with torch.cuda.stream(self._stream):
            free_before = torch.cuda.mem_get_info()[0]
            for size in sizes:
                self._capture(size)
            self._stream.synchronize()
            num_bytes = free_before - torch.cuda.mem_get_info()[0]
        seconds = round(time.monotonic() - start, 1)
        log.info("captured graphs", num_graphs=len(self._graphs), seconds=seconds, bytes=num_bytes)

    def find(self, size: Size) -> torch.cuda.CUDAGraph:
        """Captures it first, which waits for the device, if no step of this size has come before."""
        graph = self._graphs.get(size)
        if graph is None:
            start, free_before = time.monotonic(), torch.cuda.mem_get_info()[0]
            graph = self._capture(size)
            seconds, num_bytes = round(time.monotonic() - start, 3), free_before - torch.cuda.mem_get_info()[0]
            log.info("captured a graph", size=str(size), seconds=seconds, bytes=num_bytes)
        return graph

    def _capture(self, size: Size) -> torch.cuda.CUDAGraph:
        """Raises `CapacityError` where the GPU has no room for it."""
        graph = torch.cuda.CUDAGraph()
        with (
            naming_what_needs_memory("the CUDA graphs of steps"),
            torch.inference_mode(),
            torch.cuda.stream(self._stream),
        ):
            self._warm_up(size)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._run(size)
        self._graphs[size] = graph
        return graph
