"""The gated product of many rows in CUDA C++ against its formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.dense_worker.model.segments import segments_of
from services.dense_worker.model.weights import random_weights
from tests.gpu.dense.operands import EPS, SWIGLU, Case, error, exact_activation, exact_stroke, linear
from tests.support.model_configs import small_config

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.backends.cuda_backend import CudaBackend
from services.dense_worker.kernels.linear.gated_tiles import WIDTHS, GatedTiles
from services.dense_worker.kernels.linear.linear_choice import LinearChoice
from services.dense_worker.kernels.triton_launch import KernelLauncher

pytestmark = pytest.mark.gpu
# Rows, out_features, in_features: tiles that end beyond each of them, fewer stages than the ring has, fewer tiles than
# programs and several for each, and groups of tiles of rows, the last of which is not full.
SIZES = [(1, 136, 64), (65, 1000, 272), (200, 136, 1040), (640, 5504, 1024), (300, 2048, 16), (4500, 1496, 528)]


@pytest.fixture
def tiles() -> GatedTiles:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda")
    launcher = KernelLauncher(device)
    if not launcher.is_hopper:
        pytest.skip("the kernel needs compute capability 9")
    torch.zeros(1, device=device)  # as kernels are loaded into its context
    tiles = GatedTiles(launcher, device)
    assert tiles.can_load()
    return tiles


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("num_rows", "out_features", "in_features"), SIZES)
def test_product_has_the_activation(
    tiles: GatedTiles, num_rows: int, out_features: int, in_features: int, width: int
) -> None:
    """Into part of wider rows, as in the backend."""
    case = Case(torch.device("cuda"), torch.bfloat16, num_rows, (out_features, in_features))
    wide = case.nan(num_rows + 1, 2 * out_features)
    out = wide[:num_rows, :out_features]
    tiles.multiply(case.x, case.gate_up, out, width)
    case.check(out, exact_activation(linear(case.x, case.gate_up), SWIGLU))
    assert wide[num_rows:].isnan().all() and wide[:, out_features:].isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_products_one_after_another_wait_for_each_other(tiles: GatedTiles, width: int) -> None:
    """In a graph, where each is launched before the one before has ended. A row's bits do not depend on other rows."""
    size, num_rows = 1024, 700
    case = Case(torch.device("cuda"), torch.bfloat16, num_rows, (size, size))
    inputs = [case.x, case.residual, case.x.flip(0), case.residual.flip(0)]
    between, outputs = case.nan(num_rows, size), case.nan(len(inputs), num_rows, size)

    def run(count: int) -> None:
        for x, out in zip(inputs, outputs, strict=True):
            tiles.multiply(x[:count], case.gate_up, between[:count], width)
            tiles.multiply(between[:count], case.gate_up, out[:count], width)

    run(num_rows)
    expected = outputs.clone()
    for x, found in zip(inputs, expected, strict=True):
        exact = exact_activation(linear(x, case.gate_up), SWIGLU)
        case.check(found, exact_activation(linear(exact, case.gate_up), SWIGLU), least=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(num_rows)
    for _ in range(20):
        outputs.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outputs, expected)
    for count in (3, 129, 512):
        run(count)
        assert torch.equal(outputs[:, :count], expected[:, :count])


def test_backend_multiplies_gate_and_up_so(tiles: GatedTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_heads": 24, "num_kv_heads": 24, "head_dim": 128}
    config = replace(small_config("llama"), **sizes, num_layers=2, norm_eps=EPS, sliding_windows=(None,) * 2)
    weights = random_weights(config, torch.bfloat16, torch.device("cuda"), seed=0)
    monkeypatch.setattr(LinearChoice, "measure", lambda *arguments: None)
    backend = CudaBackend(weights, config, max_num_tokens=512)
    found = []
    run = GatedTiles.multiply

    def count(self: GatedTiles, x: torch.Tensor, *operands: torch.Tensor) -> None:
        found.append(len(x))
        run(self, x, *operands)

    monkeypatch.setattr(GatedTiles, "multiply", count)
    for num_rows in (512, 400):
        case = Case(torch.device("cuda"), torch.bfloat16, num_rows, (config.hidden_size, config.attn_size))
        qkv = case.nan(num_rows, config.qkv_size)
        residual = backend.middle(0, case.x, case.residual.clone(), qkv)
        exact_qkv, exact_residual = exact_stroke(segments_of(weights).middle[0], case.x, case.residual)
        assert error(qkv, exact_qkv) < 1e-2 and error(residual, exact_residual) < 1e-2
    assert found == [512]
