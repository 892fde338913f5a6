"""The dense stroke on a GPU: each linear layer by cuBLAS and by the own kernels, and whole steps without attention.

Every figure is the median of replays of a CUDA graph, on random data, over more weights than the L2 cache holds.
The ceilings, a copy's and a matrix product's rate, are measured in the same run.
`python bench/dense.py --model llama-2-7b --json FILE --plot FILE` prints the tables, saves and draws them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.device_rates import describe_environment, measure_copy_rate, measure_matrix_rate
from services.common.model_config import ModelConfig, RopeConfig
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.cuda_backend import CudaBackend
from services.dense_worker.backends.linear_choice import ROW_BUCKETS, time_in_graph_us
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.backends.triton_gemv import gemv
from services.dense_worker.backends.triton_launch import KernelLauncher
from services.dense_worker.backends.triton_skinny import SplitWorkspace, skinny_linear
from services.dense_worker.weights import ModelWeights, random_weights

BATCHES = (1, 8, 16, 32, 64, 128, 256, 512)
MIN_LAYER_BYTES = 1 << 30  # of distinct weights per measurement of a layer
EPS = 1e-5

_LLAMA_2_7B = ModelConfig(
    family="llama",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rms_norm_eps=EPS,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None,),
    max_position_embeddings=4096,
    rope=RopeConfig("default", 10000.0, 128, 4096),
    eos_token_ids=(),
    checkpoint_dtype="bfloat16",
)
_LLAMA_2_13B = replace(
    _LLAMA_2_7B, hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40, num_kv_heads=40
)
_LLAMA_3_8B = replace(_LLAMA_2_7B, vocab_size=128256, intermediate_size=14336, num_kv_heads=8)
_QWEN_2_7B = replace(
    _LLAMA_2_7B,
    family="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    qkv_bias=True,
)
MODELS = {
    "llama-2-7b": _LLAMA_2_7B,
    "llama-2-13b": _LLAMA_2_13B,
    "llama-3-8b": _LLAMA_3_8B,
    "qwen-2-7b": _QWEN_2_7B,
}


class LinearLayers:
    """Times each kind of linear layer of a model, by cuBLAS alone and by the own kernel with what it fuses."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        hidden, attn_size, intermediate = config.hidden_size, config.attn_size, config.intermediate_size
        self.kinds = {  # name -> rows of weights, in_features, what the own kernel fuses
            "qkv": (config.qkv_size, hidden, "norm"),
            "o": (hidden, attn_size, "add"),
            "gate_up": (2 * intermediate, hidden, "norm, SwiGLU"),
            "down": (hidden, intermediate, "add"),
            "lm_head": (config.vocab_size, hidden, "norm"),
        }
        self._dtype = dtype
        self._launcher = KernelLauncher(torch.device("cuda"))
        self._splits = SplitWorkspace(torch.device("cuda"), self._launcher.num_sms)

    def measure(self, kind: str, num_rows: int, ceilings: dict[str, float]) -> dict[str, Any]:
        """One row of the table; `own_us` is None where there is no own kernel."""
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
        is_gated = "SwiGLU" in fused
        if is_gated:
            out = out[:, : out.shape[1] // 2]
        residual = out if fused == "add" else None
        if len(x) > 1:
            return lambda w: skinny_linear(
                self._launcher, x, w, None, out, self._splits, is_gated=is_gated, residual=residual
            )
        norm_weight = self._randn(x.shape[1]) if "norm" in fused else None
        return lambda w: gemv(
            self._launcher, x, w, None, out, norm_weight=norm_weight, eps=EPS, is_gated=is_gated, residual=residual
        )

    def _time(self, weights: list[torch.Tensor], run: Callable[[torch.Tensor], object]) -> float:
        return time_in_graph_us(lambda: [run(weight) for weight in weights]) / len(weights)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device="cuda") * 0.02


def time_step_us(backend: DenseBackend, config: ModelConfig, dtype: torch.dtype, batch: int) -> float:
    """A decode step of `batch` sequences as one graph; attention's output stays what it is."""
    token_ids = torch.randint(config.vocab_size, (batch,), device="cuda")
    qkv = torch.empty(batch, config.qkv_size, dtype=dtype, device="cuda")
    attn_out = torch.randn(batch, config.attn_size, dtype=dtype, device="cuda")
    rows = torch.arange(batch, device="cuda")

    def step() -> None:
        backend.first(token_ids, qkv)
        for layer in range(config.num_layers - 1):
            backend.middle(layer, attn_out, qkv)
        backend.last(attn_out, rows)

    with torch.inference_mode():
        return time_in_graph_us(step)


def measure_steps(
    weights: ModelWeights, config: ModelConfig, dtype: torch.dtype, batches: list[int], ceilings: dict[str, float]
) -> tuple[list[dict[str, float]], float]:
    """Rows of the table, and the seconds until CudaBackend was ready."""
    start = time.perf_counter()
    own = CudaBackend(weights, config, max(batches))
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - start
    reference = TorchBackend(weights, config)
    matrices = [tensor for _, tensor in weights.named_tensors() if tensor.dim() == 2 and tensor is not weights.embed]
    num_weights = sum(matrix.numel() for matrix in matrices)
    steps = []
    for batch in batches:
        own_us = time_step_us(own, config, dtype, batch)
        flops = 2 * batch * num_weights
        floor_us = max(num_weights * dtype.itemsize / ceilings["copy_tb_s"], flops / ceilings["matrix_tflop_s"]) / 1e6
        steps.append(
            {
                "batch": batch,
                "own_ms": own_us / 1000,
                "torch_ms": time_step_us(reference, config, dtype, batch) / 1000,
                "floor_ms": floor_us / 1000,
                "tb_s": num_weights * dtype.itemsize / own_us / 1e6,
                "tflop_s": flops / own_us / 1e6,
            }
        )
    return steps, ready_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-2-7b", help="shape, with random weights (llama-2-7b)")
    parser.add_argument("--num-layers", type=int, help="cut the model (all layers)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of weights (bfloat16)")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES), help=f"tokens {BATCHES}")
    parser.add_argument("--no-linear", action="store_true", help="leave out the table of linear layers")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="PNG or SVG of the steps' times; needs matplotlib")
    arguments = parser.parse_args()
    config, dtype = MODELS[arguments.model], getattr(torch, arguments.dtype)
    config = replace(config, num_layers=arguments.num_layers or config.num_layers)

    with torch.inference_mode():
        device = torch.device("cuda")
        ceilings = {"copy_tb_s": measure_copy_rate(device), "matrix_tflop_s": measure_matrix_rate(device, dtype)}
        print(f"copy {ceilings['copy_tb_s']:.2f} TB/s, matrix product {ceilings['matrix_tflop_s']:.0f} TFLOP/s")
        layers = LinearLayers(config, dtype)
        kinds = [] if arguments.no_linear else list(layers.kinds)
        linear = [layers.measure(kind, batch, ceilings) for kind in kinds for batch in arguments.batch]
        start = time.perf_counter()
        weights = random_weights(config, dtype, device, seed=0)
        torch.cuda.synchronize()
        weights_s = time.perf_counter() - start
    steps, ready_s = measure_steps(weights, config, dtype, arguments.batch, ceilings)

    _print_linear(linear)
    print(f"\n{'batch':>5}{'step, ms':>10}{'torch, ms':>11}{'floor, ms':>11}{'TB/s':>7}{'TFLOP/s':>9}")
    for step in steps:
        times = f"{step['own_ms']:10.3f}{step['torch_ms']:11.3f}{step['floor_ms']:11.3f}"
        print(f"{step['batch']:5}{times}{step['tb_s']:7.2f}{step['tflop_s']:9.0f}")
    print(f"\nrandom weights in {weights_s:.2f} s, backend ready in {ready_s:.1f} s")
    if arguments.json:
        figures = {
            "environment": describe_environment(device),
            "model": arguments.model,
            "dtype": arguments.dtype,
            "num_layers": config.num_layers,
            **ceilings,
            "linear": linear,
            "steps": steps,
            "random_weights_s": weights_s,
            "backend_ready_s": ready_s,
        }
        arguments.json.write_text(json.dumps(figures, indent=1))
    if arguments.plot:
        save_plot(steps, f"{arguments.model}, {arguments.dtype}", arguments.plot)


def save_plot(steps: list[dict[str, float]], title: str, file: Path) -> None:
    """Writes the times of the steps over the batch, by either backend and at the ceilings."""
    from matplotlib.figure import Figure  # needed here only

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    labels = {"torch_ms": "segments in torch", "own_ms": "CudaBackend", "floor_ms": "at the measured ceilings"}
    for key, label in labels.items():
        axes.plot([step["batch"] for step in steps], [step[key] for step in steps], marker="o", label=label)
    axes.set(xlabel="batch", ylabel="decode step without attention (ms)", ylim=(0, None), title=title)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def _print_linear(rows: list[dict[str, Any]]) -> None:
    """TB/s and TFLOP/s are the faster kernel's; own kernels include what they fuse, cuBLAS does not."""
    names = f"{'layer':10}{'out x in':>15}{'batch':>7}"
    print(f"{names}{'cuBLAS, us':>12}{'own, us':>9}{'floor, us':>11}{'TB/s':>7}{'TFLOP/s':>9}")
    for row in rows:
        shape = f"{row['out_features']} x {row['in_features']}"
        own = "" if row["own_us"] is None else f"{row['own_us']:.1f}"
        times = f"{row['cublas_us']:12.1f}{own:>9}{row['floor_us']:11.1f}"
        print(f"{row['layer']:10}{shape:>15}{row['batch']:7}{times}{row['tb_s']:7.2f}{row['tflop_s']:9.0f}")


if __name__ == "__main__":
    main()
