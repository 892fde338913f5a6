"""Captures a step's CUDA graphs, alike in both workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog
import torch

log = structlog.get_logger()

Size = TypeVar("Size")


def capture_graphs(
    stream: torch.cuda.Stream, sizes: Iterable[Size], warm_up: Callable[[Size], None], run: Callable[[Size], None]
) -> dict[Size, torch.cuda.CUDAGraph]:
    """One graph of `run(size)` for each size, all in one memory pool; start with the largest.

    `warm_up(size)` runs uncaptured before, to compile kernels. Waits for the device; logs time and memory.
    """
    graphs = {}
    start, free_before = time.monotonic(), torch.cuda.mem_get_info()[0]
    pool = torch.cuda.graph_pool_handle()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for size in sizes:
            warm_up(size)
            graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[size], pool=pool, stream=stream, capture_error_mode="thread_local"):
                run(size)
    stream.synchronize()
    log.info(
        "captured graphs",
        num_graphs=len(graphs),
        seconds=round(time.monotonic() - start, 1),
        bytes=free_before - torch.cuda.mem_get_info()[0],
    )
    return graphs
