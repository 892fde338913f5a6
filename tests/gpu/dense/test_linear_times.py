"""Times of dense kernels in CUDA graphs, taken while other threads use the GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from services.dense_worker.kernels.linear.linear_choice import time_in_graph_us

pytestmark = pytest.mark.gpu


def test_a_thread_that_allocates_does_not_end_a_capture() -> None:
    """As threads that load kernels do while the start of a worker measures."""
    allocate, allocated = threading.Event(), threading.Event()

    def run_beside() -> None:
        assert allocate.wait(10)
        torch.empty(2**28, dtype=torch.uint8, device="cuda")  # larger than any cached block: calls cudaMalloc
        allocated.set()

    thread = threading.Thread(target=run_beside)
    thread.start()
    data = torch.ones(1024, device="cuda")

    def double() -> None:
        if torch.cuda.is_current_stream_capturing():
            allocate.set()
            assert allocated.wait(10)
        data.mul_(2)

    try:
        assert time_in_graph_us(double) > 0
    finally:
        allocate.set()
        thread.join(10)
    assert data[0].item() > 2
