"""Times the linear layers of a decode step with adapters, against the same without them. Needs a CUDA device.

    python bench/gpu/adapter_products.py --streams 64 --adapters 8 --rank 16

A few transformer layers of Llama-2-7B's shape, each norm, qkv, o, norm, gate_up and down, with random weights, as one
CUDA graph; no attention. Deltas of the one kernel are compared with those of the grouped kernels.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, PlainWeight, Projection
from services.dense_worker.kernels.linear.linear_choice import time_in_graph_us
from services.dense_worker.kernels.linear.triton_activation import activate
from services.dense_worker.kernels.linear.triton_skinny import skinny_linear
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace
from services.dense_worker.kernels.lora.cuda_lora import CudaLora
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.kernels.norm.triton_norm import add_norm
from services.dense_worker.kernels.triton_launch import KernelLauncher
from services.dense_worker.parameters import Parameter
from services.lora.checkpoint import LoraTensors

HIDDEN, INTERMEDIATE, NUM_LAYERS = 4096, 11008, 4
SHAPES = {"qkv": (HIDDEN, (HIDDEN,) * 3), "o": (HIDDEN, (HIDDEN,)), "gate_up": (HIDDEN, (INTERMEDIATE,) * 2)}
SHAPES["down"] = (INTERMEDIATE, (HIDDEN,))
SILU = MlpActivation(Activation.SILU, is_gated=True)
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE) * 0.02


def make_linear(layer: int, name: str) -> Linear:
    in_features, sizes = SHAPES[name]
    merged = tuple(Projection(f"{layer}.{name}{index}", size) for index, size in enumerate(sizes))
    weight = PlainWeight(Parameter(name, randn(sum(sizes), in_features)))
    return Linear(name, in_features, sum(sizes), merged, Cut.OUT, weight, None)


class Layers:
    """Transformer layers without attention; `run` enqueues all of them."""

    def __init__(self, num_rows: int) -> None:
        self.linears = [[make_linear(layer, name) for name in SHAPES] for layer in range(NUM_LAYERS)]
        self.launcher = KernelLauncher(DEVICE)
        self._splits = SplitWorkspace(DEVICE, self.launcher.num_sms)
        self._norm_before = RmsNorm(Parameter("norm", torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE)), 1e-5)
        self._attn_out, self._start = randn(num_rows, HIDDEN), randn(num_rows, HIDDEN)
        self._normed = randn(num_rows, HIDDEN)
        self._qkv, self._both = randn(num_rows, 3 * HIDDEN), randn(num_rows, 2 * INTERMEDIATE)
        self.hidden = torch.empty_like(self._start)

    def run(self, lora: CudaLora | None, is_fused: bool) -> None:
        """With lora None there are no adapters; otherwise by one kernel if is_fused, else by the grouped kernels."""
        hidden, activated = self.hidden, self._both[:, :INTERMEDIATE]
        if lora is not None:
            lora.start(len(hidden))
        hidden.copy_(self._start)
        for qkv, o, gate_up, down in self.linears:
            self._norm()
            self._multiply(lora, is_fused, qkv, self._normed, self._qkv)
            self._multiply(lora, is_fused, o, self._attn_out, hidden, residual=hidden)
            self._norm()
            if lora is None or is_fused:
                self._multiply(lora, is_fused, gate_up, self._normed, activated, SILU)
            else:
                self._multiply(lora, is_fused, gate_up, self._normed, self._both)
                activate(self.launcher, self._both, activated, SILU)
            self._multiply(lora, is_fused, down, activated, hidden, residual=hidden)

    def _norm(self) -> None:
        add_norm(self.launcher, self.hidden, None, self._norm_before, self._normed)

    def _multiply(
        self,
        lora: CudaLora | None,
        is_fused: bool,
        linear: Linear,
        x: torch.Tensor,
        out: torch.Tensor,
        activation: MlpActivation | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        if lora is not None and is_fused:
            lora.multiply(linear, x, out, activation, residual)
            return
        matrix = linear.weight.matrix.data
        skinny_linear(self.launcher, x, matrix, None, out, self._splits, activation=activation, residual=residual)
        if lora is not None:
            lora.add(linear, x, out)


def make_lora(layers: Layers, args: argparse.Namespace) -> CudaLora:
    linears = [linear for each in layers.linears for linear in each]
    lora = CudaLora(linears, args.adapters, args.max_rank or args.rank, args.streams, DTYPE, DEVICE)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(args.rank * INTERMEDIATE, dtype=np.float32) * 0.05
    adapter = {
        projection.name: LoraTensors(
            values[: args.rank * linear.in_features].reshape(args.rank, -1),
            values[: args.rank * projection.out_features].reshape(-1, args.rank),
            1.0,
        )
        for linear in linears
        for projection in linear.merged_from
    }
    for slot in range(args.adapters):
        lora.store(slot, adapter)
    lora.begin_step(np.arange(args.streams, dtype=np.int64) % args.adapters)
    return lora


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-rank", type=int, help="of the slots, if above --rank")
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = Layers(args.streams)
    print(f"{args}\n| variant | us a layer | more than plain | error |\n|---|---|---|---|")
    with torch.inference_mode():
        plain_us = time_in_graph_us(partial(layers.run, None, False)) / NUM_LAYERS
        print(f"| plain | {plain_us:.1f} | | |", flush=True)
        grouped: Any = make_lora(layers, args)
        grouped.fuses = lambda linear, num_rows: False
        us = time_in_graph_us(partial(layers.run, grouped, False)) / NUM_LAYERS
        expected = layers.hidden.float()
        print(f"| grouped | {us:.1f} | {us - plain_us:.1f} | |", flush=True)
        fused = make_lora(layers, args)
        with fused.compiling():
            layers.run(fused, True)
        us = time_in_graph_us(partial(layers.run, fused, True)) / NUM_LAYERS
        error = (layers.hidden.float() - expected).abs().max() / expected.abs().max()
        print(f"| one kernel | {us:.1f} | {us - plain_us:.1f} | {error:.1e} |")


if __name__ == "__main__":
    main()
