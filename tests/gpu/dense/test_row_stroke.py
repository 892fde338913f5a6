"""The kernel of a whole stroke of one row against its formula in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.common.model_config import ModelConfig
from services.common.quantization.schemes import on_the_fly_fp8
from services.dense_worker.model.segments import Middle, segments_of
from services.dense_worker.model.weights import random_weights
from tests.gpu.dense.operands import EPS, error, exact_stroke
from tests.support.model_configs import small_config

pytest.importorskip("triton", reason="needs triton")
pytest.importorskip("cuda.bindings", reason="needs the CUDA driver")

from services.dense_worker.backends import cuda_backend
from services.dense_worker.kernels.stroke.row_stroke import RowStroke, StrokeShape, shape_of
from services.dense_worker.kernels.triton_launch import KernelLauncher

# ‖out − exact‖ / ‖exact‖: each of six operators in a row rounds to 2^-9, FP8 rounds inputs to 2^-4.
TOLERANCES = {"plain": 1e-2, "fp8": 6e-2}
# Fewer and more rows than programs, a remainder of rows in stages and programs, sizes that warps do not share evenly.
SHAPES = {
    "small": (256, 256, 512, 2, 64),
    "uneven": (768, 1024, 2816, 8, 128),
    "narrow attention": (1024, 256, 4096, 2, 64),
    "7b": (4096, 4096, 11008, 32, 128),
}
LLAMA = replace(
    small_config("llama"),
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=EPS,
    sliding_windows=(None,) * 2,
)


@pytest.fixture
def launcher() -> KernelLauncher:
    launcher = KernelLauncher(torch.device("cuda"))
    if not launcher.is_hopper:
        pytest.skip("the kernel needs compute capability 9")
    return launcher


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", TOLERANCES)
def test_stroke_computes_the_segment_again_and_again(launcher: KernelLauncher, weights: str, shape: str) -> None:
    """Also in a graph, where each launch begins before the one before has ended."""
    hidden, attn, inner, num_kv_heads, head_dim = SHAPES[shape]
    config = replace(
        LLAMA,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=attn // head_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        quantization=on_the_fly_fp8() if weights == "fp8" else None,
    )
    segment = make_segment(config)
    found_shape = shape_of(segment, launcher, torch.bfloat16)
    assert isinstance(found_shape, StrokeShape), found_shape
    stroke = RowStroke(launcher, found_shape, torch.device("cuda"))
    inputs = [randn(attn) for _ in range(4)]
    residuals = [randn(hidden) for _ in inputs]
    outputs = [torch.full((1, config.qkv_size), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in inputs]
    exact = [exact_stroke(segment, x, residual) for x, residual in zip(inputs, residuals, strict=True)]
    befores = [residual.clone() for residual in residuals]

    def run() -> None:
        for x, residual, out in zip(inputs, residuals, outputs, strict=True):
            stroke(segment, x, residual, out)

    run()
    first = [out.clone() for out in (*outputs, *residuals)]
    for out, residual, (exact_qkv, exact_residual) in zip(outputs, residuals, exact, strict=True):
        assert error(out, exact_qkv) < TOLERANCES[weights]
        assert error(residual, exact_residual) < TOLERANCES[weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        for residual, before in zip(residuals, befores, strict=True):
            residual.copy_(before)
        for out in outputs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, expected) for out, expected in zip((*outputs, *residuals), first, strict=True))


@pytest.mark.gpu
def test_strokes_of_several_streams_all_end(launcher: KernelLauncher) -> None:
    """Programs of one stroke wait for each other: no other may take the places of those that have not begun."""
    segment = make_segment(replace(LLAMA, hidden_size=1024, intermediate_size=4096))
    shape = shape_of(segment, launcher, torch.bfloat16)
    assert isinstance(shape, StrokeShape), shape
    x, before = randn(shape.attn), randn(shape.hidden)
    found = []
    streams = [torch.cuda.Stream() for _ in range(3)]
    strokes = [RowStroke(launcher, shape, torch.device("cuda")) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, stroke in zip(streams, strokes, strict=True):
            with torch.cuda.stream(stream):
                residual = before.clone()
                out = torch.empty(1, shape.qkv, dtype=torch.bfloat16, device="cuda")
                stroke(segment, x, residual, out)
                found.append(out)
    torch.cuda.synchronize()
    exact_qkv, _ = exact_stroke(segment, x, before)
    assert error(found[0], exact_qkv) < TOLERANCES["plain"]
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.gpu
def test_backend_has_strokes_for_one_row_where_they_are_faster(
    launcher: KernelLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(LLAMA, num_layers=3, sliding_windows=(None,) * 3)
    weights = random_weights(config, torch.bfloat16, torch.device("cuda"), seed=0)
    step_us = iter([2.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(cuda_backend, "time_in_graph_us", lambda run: next(step_us))
    with_strokes, without = (cuda_backend.CudaBackend(weights, config, max_num_tokens=8) for _ in range(2))
    num_strokes = 0
    run_stroke = RowStroke.__call__

    def count(self: RowStroke, *arguments: Any) -> None:
        nonlocal num_strokes
        num_strokes += 1
        run_stroke(self, *arguments)

    monkeypatch.setattr(RowStroke, "__call__", count)
    for num_tokens in (1, 2):
        x, residual = randn(config.attn_size).repeat(num_tokens, 1), randn(config.hidden_size).repeat(num_tokens, 1)
        results = []
        for backend in (with_strokes, without):
            qkv = torch.full((num_tokens, config.qkv_size), torch.nan, dtype=torch.bfloat16, device="cuda")
            results.append((backend.middle(1, x, residual.clone(), qkv), qkv))
        for found, expected in zip(*results, strict=True):
            assert error(found, expected.double()) < TOLERANCES["plain"]
        assert num_strokes == 1


def make_segment(config: ModelConfig) -> Middle:
    weights = random_weights(config, torch.bfloat16, torch.device("cuda"), seed=0)
    for name, tensor in weights.named_tensors():
        if name.endswith("norm"):
            tensor.normal_(mean=1.0, std=0.2)
    return segments_of(weights).middle[0]


def randn(size: int) -> torch.Tensor:
    return torch.randn(1, size, device="cuda").to(torch.bfloat16)
