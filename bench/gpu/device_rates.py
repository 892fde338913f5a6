"""The highest rates of a card, and the time of work on it. Needs a CUDA device, but can be imported without one."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from bench.load.options import describe_commit

NUM_REPLAYS = 7


def require_gpu(*packages: str) -> None:
    """Ends the process with one line if there is no CUDA device, or if one of these packages is missing."""
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no CUDA device, or torch cannot use it")
    for package in packages:
        if not _is_installed(package):
            raise SystemExit(f"the package {package} is not installed")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def time_graph(run_layer: Callable[[int], object], num_layers: int) -> float:
    """Median microseconds of one layer."""
    repeats = max(1, 8 // num_layers)
    for layer in range(num_layers):
        run_layer(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for layer in range(num_layers):
                run_layer(layer)
    graph.replay()
    return time_events(graph.replay) / (num_layers * repeats)


def time_events(run: Callable[[], object]) -> float:
    """Median microseconds of `run` on the device."""
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure_copy_rate(device: torch.device) -> float:
    """TB/s, bytes read plus bytes written. Not in a graph, where a copy becomes a slower kind of node."""
    source = torch.randint(0, 2**31 - 1, (1 << 30,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / time_events(lambda: target.copy_(source)) / 1e6


def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a product of square matrices."""
    size = 8192
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    result = torch.empty_like(left)
    return 2 * size**3 / time_graph(lambda layer: torch.mm(left, right, out=result), 1) / 1e6


def describe_environment(device: torch.device) -> dict[str, str]:
    import triton  # needed here only

    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": describe_commit() or "unknown",
        "gpu": torch.cuda.get_device_name(device),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
