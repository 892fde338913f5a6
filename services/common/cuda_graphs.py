"""`StepGraphs`: the captured CUDA graphs of one kind of step, for both workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Generic, TypeVar

import structlog
import torch

from services.common.errors import CapacityError
from services.common.gpu import naming_what_needs_memory
from services.common.terminal import progress_bar

log = structlog.get_logger()

Size = TypeVar("Size")


class StepGraphs(Generic[Size]):
    """One graph of `run(size)` for each size, all in one memory pool. For one thread.

    Before each capture, `warm_up(size)` runs uncaptured to compile kernels. Neither function may wait for the peer.
    `what`: the graphs, in errors. `undisturbed`: contexts from the first captured call to the end of a capture.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        warm_up: Callable[[Size], None],
        run: Callable[[Size], None],
        *,
        what: str = "the CUDA graphs of steps",
        undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._what, self._undisturbed = what, undisturbed
        self._stream = stream
        self._warm_up = warm_up
        self._run = run
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._later = deque[Size]()

    def capture_later(self, sizes: Iterable[Size]) -> None:
        """Leaves these sizes to `capture_next`. Pass the largest one first: the others reuse its memory."""
        self._later.extend(sizes)

    def capture_next(self) -> bool:
        """Captures one of the sizes that were left for later, and waits for the device; False if none is missing.

        Where memory has no room for another one, the rest is left to the steps that need them.
        """
        while self._later:
            size = self._later.popleft()
            if size in self._graphs:
                continue
            try:
                self.capture(size)
            except CapacityError as error:
                log.warning("no more graphs are captured ahead", num_graphs=len(self._graphs), reason=str(error))
                self._later.clear()
                return False
            if not self._later:
                log.info("captured graphs", num_graphs=len(self._graphs))
            return True
        return False

    def capture_all(self, sizes: Iterable[Size]) -> None:
        """Captures all sizes and waits for the device; a terminal shows the progress.

        Pass the largest size first: the others reuse its memory.
        """
        start = time.monotonic()
        with torch.cuda.stream(self._stream):
            free_before = torch.cuda.mem_get_info()[0]
            ordered = list(sizes)
            with progress_bar("capturing graphs", len(ordered), " graphs") as advance:
                for size in ordered:
                    self.capture(size)
                    advance(1)
            self._stream.synchronize()
            num_bytes = free_before - torch.cuda.mem_get_info()[0]
        seconds = round(time.monotonic() - start, 1)
        log.info("captured graphs", num_graphs=len(self._graphs), seconds=seconds, bytes=num_bytes)

    def find(self, size: Size) -> torch.cuda.CUDAGraph:
        """The graph of this size. Captures it, which waits for the device, if it does not exist yet."""
        graph = self._graphs.get(size)
        if graph is None:
            start, free_before = time.monotonic(), torch.cuda.mem_get_info()[0]
            graph = self.capture(size)
            seconds, num_bytes = round(time.monotonic() - start, 3), free_before - torch.cuda.mem_get_info()[0]
            log.info("captured a graph", size=str(size), seconds=seconds, bytes=num_bytes)
        return graph

    def capture(self, size: Size) -> torch.cuda.CUDAGraph:
        """Captures the graph of this size and waits for the device. Raises `CapacityError` if the GPU has no room."""
        graph = torch.cuda.CUDAGraph()
        with (
            naming_what_needs_memory(self._what),
            torch.inference_mode(),
            torch.cuda.stream(self._stream),
        ):
            self._warm_up(size)
            try:
                with (
                    ExitStack() as until_end,
                    torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    until_end.enter_context(self._undisturbed())  # not before: a capture begins when the device is idle
                    self._run(size)
            except BaseException:
                graph.reset()  # an error keeps this frame, and with it what the graph uses, such as NCCL's connections
                raise
        self._graphs[size] = graph
        return graph
