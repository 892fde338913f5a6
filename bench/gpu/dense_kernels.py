"""Times linear layers and whole steps of the dense stroke, for `bench/dense.py`. Needs triton and a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.kernel_trace import record_kernels
from bench.gpu.step_timeline import MAX_NAME_LENGTH
from services.common.families.shape import Activation
from services.common.model_config import ModelConfig
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.cuda_backend import CudaBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear_choice import ROW_BUCKETS, time_in_graph_us
from services.dense_worker.kernels.linear.triton_gemv import gemv
from services.dense_worker.kernels.linear.triton_skinny import skinny_linear
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.parameters import Parameter

_SWIGLU = MlpActivation(Activation.SILU, is_gated=True)
_PROFILED_STEPS = 3
MIN_LAYER_BYTES = 1 << 30  # of distinct weights in one measurement of a layer


class LinearLayers:
    """Times each kind of linear layer of a model, by cuBLAS alone and by our kernel with its fused operations."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        hidden, attn_size, intermediate = config.hidden_size, config.attn_size, config.intermediate_size
        self.kinds = {  # name -> rows of weights, in_features, operations that our kernel fuses
            "qkv": (config.qkv_size, hidden, "norm"),
            "o": (hidden, attn_size, "add"),
            "gate_up": (2 * intermediate, hidden, "norm, SwiGLU"),
            "down": (hidden, intermediate, "add"),
            "lm_head": (config.vocab_size, hidden, "norm"),
        }
        self._dtype = dtype
        self._eps = config.norm_eps
        self._launcher = KernelLauncher(torch.device("cuda"))
        self._splits = SplitWorkspace(torch.device("cuda"), self._launcher.num_sms)

    def measure(self, kind: str, num_rows: int, ceilings: dict[str, float]) -> dict[str, Any]:
        """One row of the table; `own_us` is None if we have no kernel for it."""
        weight_rows, in_features, fused = self.kinds[kind]
        weight_bytes = weight_rows * in_features * self._dtype.itemsize
        weights = [self._randn(weight_rows, in_features) for _ in range(-(-MIN_LAYER_BYTES // weight_bytes))]
        x, out = self._randn(num_rows, in_features), self._randn(num_rows, weight_rows)
        cublas_us = self._time(weights, lambda w: torch.mm(x, w.t(), out=out))
        own_us = self._time(weights, self._own(x, out, fused)) if num_rows <= ROW_BUCKETS[-1] else None
        best_us = min(cublas_us, own_us or cublas_us)
        num_bytes = weight_bytes + (x.numel() + out.numel()) * x.itemsize
        tflop = 2 * num_rows * weight_rows * in_features / 1e12
        floor_us = max(num_bytes / ceilings["copy_tb_s"], tflop * 1e12 / ceilings["matrix_tflop_s"]) / 1e6
        return {
            "layer": kind,
            "out_features": weight_rows,
            "in_features": in_features,
            "batch": num_rows,
            "cublas_us": cublas_us,
            "own_us": own_us,
            "tb_s": num_bytes / best_us / 1e6,
            "tflop_s": tflop / best_us * 1e6,
            "floor_us": floor_us,
        }

    def _own(self, x: torch.Tensor, out: torch.Tensor, fused: str) -> Callable[[torch.Tensor], None]:
        activation = _SWIGLU if "SwiGLU" in fused else None
        if activation is not None:
            out = out[:, : out.shape[1] // 2]
        residual = out if fused == "add" else None
        if len(x) > 1:
            return lambda w: skinny_linear(
                self._launcher, x, w, None, out, self._splits, activation=activation, residual=residual
            )
        norm = RmsNorm(Parameter("norm", self._randn(x.shape[1])), self._eps) if "norm" in fused else None
        return lambda w: gemv(self._launcher, x, w, None, out, norm=norm, activation=activation, residual=residual)

    def _time(self, weights: list[torch.Tensor], run: Callable[[torch.Tensor], object]) -> float:
        return time_in_graph_us(lambda: [run(weight) for weight in weights]) / len(weights)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device="cuda") * 0.02


def make_step(
    backend: DenseBackend, config: ModelConfig, dtype: torch.dtype, batch: int
) -> Callable[[], object]:
    """A decode step of `batch` sequences; attention's output does not change."""
    token_ids = torch.randint(config.vocab_size, (batch,), device="cuda")
    qkv = torch.empty(batch, config.qkv_size, dtype=dtype, device="cuda")
    attn_out = torch.randn(batch, config.attn_size, dtype=dtype, device="cuda")
    rows = torch.arange(batch, device="cuda")

    def step() -> None:
        residual = backend.first(token_ids, qkv)
        for layer in range(config.num_layers - 1):
            residual = backend.middle(layer, attn_out, residual, qkv)
        backend.last(attn_out, residual, rows)

    return step


def print_kernels(run_step: Callable[[], object]) -> None:
    """The kernels of a step as a CUDA graph, by name. Their times overlap."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run_step()
        graph.replay()
        stream.synchronize()

        def replay() -> None:
            for _ in range(_PROFILED_STEPS):
                graph.replay()
            stream.synchronize()

        kernels = record_kernels(replay, _PROFILED_STEPS)[-1]
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name[:MAX_NAME_LENGTH], []).append(kernel.duration_us)
    print(f"{'kernel':{MAX_NAME_LENGTH}}{'times':>7}{'mean, us':>10}{'sum, us':>10}")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        print(f"{name:{MAX_NAME_LENGTH}}{len(times):7}{sum(times) / len(times):10.2f}{sum(times):10.1f}")
    print(f"{'from the first to the last':{MAX_NAME_LENGTH}}{len(kernels):7}{'':10}", end="")
    print(f"{kernels[-1].end_us - kernels[0].start_us:10.1f}")


@torch.inference_mode()
def measure_steps(
    weights: ModelWeights,
    config: ModelConfig,
    dtype: torch.dtype,
    batches: list[int],
    ceilings: dict[str, float],
    *,
    lists_kernels: bool,
) -> tuple[list[dict[str, float]], float]:
    """Rows of the table, and the seconds until CudaBackend was ready."""
    start = time.perf_counter()
    own = CudaBackend(weights, config, max(batches))
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - start
    reference = TorchBackend(weights)
    is_read = {"embed": config.tie_word_embeddings}  # as the lm_head; otherwise only some of its rows
    matrices = [tensor for name, tensor in weights.named_tensors() if tensor.dim() == 2 and is_read.get(name, True)]
    num_weights = sum(matrix.numel() for matrix in matrices)
    steps = []
    for batch in batches:
        own_step = make_step(own, config, dtype, batch)
        own_us = time_in_graph_us(own_step)
        if lists_kernels:
            print(f"\nbatch {batch}")
            print_kernels(own_step)
        flops = 2 * batch * num_weights
        floor_us = max(num_weights * dtype.itemsize / ceilings["copy_tb_s"], flops / ceilings["matrix_tflop_s"]) / 1e6
        steps.append(
            {
                "batch": batch,
                "own_ms": own_us / 1000,
                "torch_ms": time_in_graph_us(make_step(reference, config, dtype, batch)) / 1000,
                "floor_ms": floor_us / 1000,
                "tb_s": num_weights * dtype.itemsize / own_us / 1e6,
                "tflop_s": flops / own_us / 1e6,
            }
        )
    return steps, ready_s
