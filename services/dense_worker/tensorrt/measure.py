"""Measures on the GPU whether TensorRT or torch runs a segment faster, for several numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.backends import DenseBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.segments import segment_names
from services.dense_worker.model.weights import random_weights
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.backend import Measurements
from services.dense_worker.tensorrt.engine_plan_cache import CachedEnginePlan, EnginePlanCache, EnginePlans
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.gpu import current_stream, synchronize
from services.dense_worker.tensorrt.profiles import Limits, profile_index

SIZES = tuple(2**power for power in range(20))
MAX_ROWS = 1024  # of logits, which take much memory
NUM_CALLS, NUM_REPLAYS = 10, 5
Call = Callable[[], object]
MakeCall = Callable[[DenseBackend], Call]
Timer = Callable[[Call], float]  # microseconds of one call
MakeTorch = Callable[[ModelWeights, ModelConfig, int], DenseBackend]  # the last is the maximum number of tokens


def measure_plans(
    api: TensorRT,
    plans: EnginePlans,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    limits: Limits,
    make_torch: MakeTorch,
) -> Measurements:
    """Times plans and torch on two layers of random weights; neither their number nor their values affect the speed.

    Waits for the device.
    """
    config = replace(config, num_layers=min(config.num_layers, 2))
    weights = random_weights(config, dtype, device, seed=0)
    backends = {
        "tensorrt": TensorRTSegments(api, plans, weights, config, limits, current_stream),
        "torch": make_torch(weights, config, limits.num_tokens),
    }
    synchronize()
    return measure_segments(backends, config, dtype, device, limits, time_on_gpu)


def measure_segments(
    backends: Mapping[str, DenseBackend],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    limits: Limits,
    time_us: Timer,
) -> Measurements:
    """Microseconds of each segment by each of `backends`, for the powers of two below the limit and for the limit.

    The inputs are random, because a GPU computes faster on zeros.
    """
    measured: dict[str, dict[int, dict[str, float]]] = {}
    for segment, max_size in _max_sizes(segment_names(config), limits).items():
        measured[segment] = {}
        for size in _sizes(max_size):
            make_call = _CALLS[segment](config, dtype, device, size)
            measured[segment][size] = {
                name: round(time_us(make_call(backend)), 2) for name, backend in backends.items()
            }
    return measured


def known_measurements(plans: EnginePlans, limits: Limits) -> Measurements | None:
    """Earlier measurements of these plans, each in the record of the plan that ran it.

    None if those of a plan are missing, of another version of torch, or end below the limits: then all are to be
    measured again. A plan without a size within the limits needs none.
    """
    measured: dict[str, dict[int, dict[str, float]]] = {}
    for segment, max_size in _max_sizes(plans, limits).items():
        measured[segment] = {}
        for cached, needed in _sizes_of_plans(plans[segment], _sizes(max_size)):
            if not needed:
                continue
            times = {int(size): us for size, us in (cached.record.measured_us or {}).items()}
            if cached.record.measured_with != torch.__version__ or max(times, default=0) < max(needed):
                return None
            measured[segment] |= times
    return measured


def store_measurements(cache: EnginePlanCache, plans: EnginePlans, measured: Measurements) -> None:
    """Stores the measurement of each size in the record of the plan that ran it."""
    for segment, times in measured.items():
        for cached, sizes in _sizes_of_plans(plans[segment], times):
            by_size = {str(size): dict(times[size]) for size in sizes}
            if by_size:
                cache.update(replace(cached.record, measured_us=by_size, measured_with=torch.__version__))


def time_on_gpu(call: Call) -> float:
    """Microseconds of one `call` within a CUDA graph, because a step runs it within one."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        call()
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(NUM_CALLS):
                call()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(NUM_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) * 1000 / (NUM_CALLS * NUM_REPLAYS)


def _sizes(max_size: int) -> list[int]:
    return [*(size for size in SIZES if size < max_size), max_size]


def _sizes_of_plans(
    of_segment: Sequence[CachedEnginePlan], sizes: Iterable[int]
) -> list[tuple[CachedEnginePlan, list[int]]]:
    """Which of these sizes each plan runs."""
    profiles = [cached.profile for cached in of_segment]
    found = list[list[int]](map(lambda _: [], profiles))
    for size in sizes:
        found[profile_index(profiles, size)].append(size)
    return list(zip(of_segment, found, strict=True))


def _max_sizes(segments: Iterable[str], limits: Limits) -> dict[str, int]:
    return {name: min(limits.of(name), MAX_ROWS) if name == "last" else limits.of(name) for name in segments}


def _first(config: ModelConfig, dtype: torch.dtype, device: torch.device, size: int) -> MakeCall:
    token_ids = torch.randint(config.vocab_size, (size,), device=device)
    qkv_out = torch.empty(size, config.qkv_size, dtype=dtype, device=device)
    return lambda backend: lambda: backend.first(token_ids, qkv_out)


def _middle(config: ModelConfig, dtype: torch.dtype, device: torch.device, size: int) -> MakeCall:
    attn_out, residual = _activations(config, dtype, device, size)
    qkv_out = torch.empty(size, config.qkv_size, dtype=dtype, device=device)
    return lambda backend: lambda: backend.middle(0, attn_out, residual, qkv_out)


def _last(config: ModelConfig, dtype: torch.dtype, device: torch.device, size: int) -> MakeCall:
    attn_out, residual = _activations(config, dtype, device, size)
    rows = torch.arange(size, device=device)
    return lambda backend: lambda: backend.last(attn_out, residual, rows)


def _activations(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    attn_out = torch.randn(size, config.attn_size, dtype=dtype, device=device)
    return attn_out, torch.randn(size, config.hidden_size, dtype=dtype, device=device)


_CALLS = {"first": _first, "middle": _middle, "last": _last}
