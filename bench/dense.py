"""The dense stroke on a GPU: each linear layer by cuBLAS and by our kernels, and whole steps without attention.

Every figure is the median of replays of a CUDA graph, on random data, over more weights than the L2 cache holds.
The same run measures the ceilings: the rates of a copy and of a matrix product.
`python bench/dense.py --model llama-2-7b --json FILE --plot FILE` prints the tables, saves and draws them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.gpu.device_rates import describe_environment, measure_copy_rate, measure_matrix_rate, require_gpu
from services.common.families.shape import Activation, ExpertOptions, LayerParts, NormKind
from services.common.model_config import ModelConfig, RopeConfig

BATCHES = (1, 8, 16, 32, 64, 128, 256, 512)

_LLAMA_2_7B = ModelConfig(
    family="llama",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    norm_eps=1e-5,
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
_GEMMA_3_4B = replace(
    _LLAMA_2_7B,
    family="gemma3_text",
    vocab_size=262208,
    hidden_size=2560,
    intermediate_size=10240,
    num_layers=34,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    norm_eps=1e-6,
    tie_word_embeddings=True,
    qk_norm=True,
    parts=LayerParts(norm=NormKind.RMS_PLUS_ONE, activation=Activation.GELU_TANH, has_norms_after=True),
)
_QWEN3_30B_A3B = replace(
    _LLAMA_2_7B,
    family="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_kv_heads=4,
    norm_eps=1e-6,
    qk_norm=True,
    parts=LayerParts(experts=ExpertOptions(128, 8, 768, renormalizes=True, layers=tuple(range(48)))),
)
MODELS = {
    "llama-2-7b": _LLAMA_2_7B,
    "llama-2-13b": _LLAMA_2_13B,
    "llama-3-8b": _LLAMA_3_8B,
    "qwen-2-7b": _QWEN_2_7B,
    "gemma-3-4b": _GEMMA_3_4B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-2-7b", help="shape, with random weights (llama-2-7b)")
    parser.add_argument("--num-layers", type=int, help="number of layers (all layers of the model)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="element type of the weights (bfloat16)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES), help=f"tokens {BATCHES}")
    parser.add_argument("--no-linear", action="store_true", help="leave out the table of linear layers")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each step")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="PNG or SVG of the steps' times; needs matplotlib")
    arguments = parser.parse_args()
    require_gpu("triton")
    from bench.gpu.dense_kernels import LinearLayers, measure_steps  # they need triton
    from services.dense_worker.model.weights import random_weights

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
    steps, ready_s = measure_steps(weights, config, dtype, arguments.batch, ceilings, lists_kernels=arguments.kernels)

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
    """Draws the times of steps over the batch, for both backends and at the ceilings."""
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
    """Prints the table. TB/s and TFLOP/s are those of the faster kernel; only our kernels include fused operations."""
    names = f"{'layer':10}{'out x in':>15}{'batch':>7}"
    print(f"{names}{'cuBLAS, us':>12}{'own, us':>9}{'floor, us':>11}{'TB/s':>7}{'TFLOP/s':>9}")
    for row in rows:
        shape = f"{row['out_features']} x {row['in_features']}"
        own = "" if row["own_us"] is None else f"{row['own_us']:.1f}"
        times = f"{row['cublas_us']:12.1f}{own:>9}{row['floor_us']:11.1f}"
        print(f"{row['layer']:10}{shape:>15}{row['batch']:7}{times}{row['tb_s']:7.2f}{row['tflop_s']:9.0f}")


if __name__ == "__main__":
    main()
