"""The products of 2 to 64 rows in CUDA C++ against their formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.dense_worker.kernels.norm.norm import SplitNorm, num_squares
from services.dense_worker.model.segments import segments_of
from services.dense_worker.model.weights import random_weights
from tests.gpu.dense.operands import EPS, SWIGLU, Case, error, exact_stroke, rms_norm
from tests.support.model_configs import small_config

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.backends.cuda_backend import CudaBackend
from services.dense_worker.kernels.linear.linear_choice import LinearChoice
from services.dense_worker.kernels.linear.quantized.operands import CodeScales
from services.dense_worker.kernels.linear.rows_product import RowsProduct, RowsShape
from services.dense_worker.kernels.triton_launch import KernelLauncher

NUM_ROWS = [2, 9, 24, 31, 33, 59, 64]
# As many groups of 8 features in each program, more in some; several tiles of the tensor cores; in_features that are no
# whole tiles, fewer of them than stages and than programs of a cluster.
PLAIN = [(6336, 4096), (12288, 272), (6144, 24), (32008, 640)]
GATED = [(11008, 4096), (6008, 272), (14336, 8)]
ADDED = [(4096, 11008), (3016, 272), (3208, 24), (5120, 1024)]


@pytest.fixture
def rows_product() -> RowsProduct:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    launcher = KernelLauncher(torch.device("cuda"))
    if not launcher.is_hopper:
        pytest.skip("the kernel needs compute capability 9")
    return RowsProduct(launcher, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", PLAIN)
def test_plain_product(rows_product: RowsProduct, shape: tuple[int, int], num_rows: int) -> None:
    """With and without the second half of a norm; into part of wider rows."""
    case = make_case(num_rows, shape)
    wide = case.nan(num_rows + 1, shape[0] + 8)
    out = wide[:num_rows, : shape[0]]
    multiply(rows_product, case.x, case.weight, out)
    exact = case.x.double() @ case.weight.double().T
    case.check(out, exact)
    assert wide[num_rows:].isnan().all() and wide[:, shape[0] :].isnan().all()
    norm = make_norm(case, shape[1])
    norm.squares[:, :3] = torch.rand(64, 3, device="cuda") * shape[1]
    multiply(rows_product, case.x, case.weight, out, norm=norm)
    means = norm.squares.double().sum(1, keepdim=True)[:num_rows] / shape[1]
    case.check(out, exact * torch.rsqrt(means + norm.eps))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", GATED)
def test_gated_product(rows_product: RowsProduct, shape: tuple[int, int], num_rows: int) -> None:
    case = make_case(num_rows, shape)
    out = case.nan(num_rows, shape[0])
    multiply(rows_product, case.x, case.gate_up, out, activation=SWIGLU)
    gate, up = (case.x.double() @ case.gate_up.double().T).chunk(2, 1)
    case.check(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", ADDED)
def test_product_is_added_and_begins_the_norm(rows_product: RowsProduct, shape: tuple[int, int], num_rows: int) -> None:
    """Squares of an earlier step with more tiles are not added."""
    case = make_case(num_rows, shape)
    norm, residual = make_norm(case, shape[0]), case.residual.clone()
    norm.squares.fill_(100.0)
    multiply(rows_product, case.x, case.weight, residual, residual=residual, norm_after=norm)
    exact = case.x.double() @ case.weight.double().T + case.residual.double()
    case.check(residual, exact)
    case.check(norm.rows, exact * norm.weight.double())
    assert torch.allclose(norm.squares[:num_rows].double().sum(1), exact.square().sum(1), rtol=1e-2)
    expected = residual.clone()
    residual.copy_(case.residual)
    multiply(rows_product, case.x, case.weight, residual, residual=residual)
    assert torch.equal(residual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 16, 33, 64])
def test_products_one_after_another_wait_for_each_other(rows_product: RowsProduct, num_rows: int) -> None:
    """In a graph, where each is launched before the one before has ended. A row's bits do not depend on other rows."""
    hidden, inner = 3072, 8192
    case = make_case(num_rows, (hidden, inner))
    gate_up = case.randn(2 * inner, hidden) * hidden**-0.5
    norm, start = make_norm(case, hidden), case.residual
    residual, act = start.clone(), case.nan(num_rows, inner)

    def run(count: int) -> None:
        rows = SplitNorm(norm.weight, norm.eps, norm.rows[:count], norm.squares)
        for _ in range(4):
            multiply(
                rows_product, act[:count], case.weight, residual[:count], residual=residual[:count], norm_after=rows
            )
            multiply(rows_product, rows.rows, gate_up, act[:count], activation=SWIGLU, norm=rows)

    def begin() -> None:
        act.copy_(case.x)
        residual.copy_(start)

    begin()
    run(num_rows)
    expected = residual.clone(), act.clone()
    exact, x = start.double(), case.x.double()
    for _ in range(4):
        exact = exact + x @ case.weight.double().T
        gate, up = (rms_norm(exact, norm.weight) @ gate_up.double().T).chunk(2, 1)
        x = torch.nn.functional.silu(gate) * up
    case.check(residual, exact, least=2e-2)
    case.check(act, x, least=4e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(num_rows)
    for _ in range(20):
        begin()
        graph.replay()
        assert torch.equal(residual, expected[0]) and torch.equal(act, expected[1])
    for count in {2, 8, 17, 32, 33} & set(range(num_rows)):
        begin()
        run(count)
        assert torch.equal(residual[:count], expected[0][:count]) and torch.equal(act[:count], expected[1][:count])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 12, 64])
def test_backend_multiplies_all_layers_so(
    rows_product: RowsProduct, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_heads": 24, "num_kv_heads": 24, "head_dim": 128}
    config = replace(small_config("llama"), **sizes, num_layers=2, norm_eps=EPS, sliding_windows=(None,) * 2)
    weights = random_weights(config, torch.bfloat16, torch.device("cuda"), seed=0)
    for name, tensor in weights.named_tensors():
        if name.endswith("norm"):
            tensor.normal_(mean=1.0, std=0.2)
    monkeypatch.setattr(LinearChoice, "measure", lambda *arguments: None)
    backend = CudaBackend(weights, config, max_num_tokens=64)
    found = []
    run = RowsProduct.multiply

    def count(self: RowsProduct, shape: RowsShape, *arguments: Any) -> None:
        found.append(shape)
        run(self, shape, *arguments)

    monkeypatch.setattr(RowsProduct, "multiply", count)
    case = make_case(num_rows, (config.hidden_size, config.attn_size))
    qkv = case.nan(num_rows, config.qkv_size)
    residual = backend.middle(0, case.x, case.residual.clone(), qkv)
    exact_qkv, exact_residual = exact_stroke(segments_of(weights).middle[0], case.x, case.residual)
    assert error(qkv, exact_qkv) < 1e-2 and error(residual, exact_residual) < 1e-2
    assert len(found) == 4 and len(set(found)) == 3, "o and down have one shape"


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("plain", (6336, 4096)),
        ("gated", (6008, 272)),
        ("gated", (11008, 4096)),
        ("added", (3016, 272)),
        ("added", (4096, 11008)),
    ],
)
def test_products_of_codes_have_the_scales_of_rows_and_weights(
    rows_product: RowsProduct, kind: str, shape: tuple[int, int], num_rows: int
) -> None:
    case = make_case(num_rows, shape)
    is_gated, is_added = kind == "gated", kind == "added"
    values = case.gate_up if is_gated else case.weight
    x, weight = case.x.to(torch.float8_e4m3fn), (values * shape[1] ** 0.5).to(torch.float8_e4m3fn)
    row_scales = 0.5 + torch.rand(num_rows, device="cuda")
    weight_scales = (0.5 + torch.rand(len(weight), device="cuda")) * shape[1] ** -0.5
    out = case.residual.clone() if is_added else case.nan(num_rows, shape[0])
    exact = (x.double() * row_scales[:, None]) @ (weight.double() * weight_scales[:, None]).T
    if is_gated:
        gate, up = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
    elif is_added:
        exact = exact + out.double()
    scales = CodeScales(row_scales, weight_scales, torch.bfloat16)
    fused = {"activation": SWIGLU if is_gated else None, "residual": out if is_added else None}
    multiply(rows_product, x, weight, out, scales=scales, **fused)
    case.check(out, exact)


def make_case(num_rows: int, shape: tuple[int, int]) -> Case:
    return Case(torch.device("cuda"), torch.bfloat16, num_rows, shape)


def make_norm(case: Case, size: int) -> SplitNorm:
    num_rows = len(case.x)
    squares = torch.zeros(64, num_squares(size), device="cuda")
    return SplitNorm(1 + 0.2 * case.randn(size), 1e-5, case.nan(num_rows, size), squares)


def multiply(rows_product: RowsProduct, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, **fused: Any) -> None:
    operands = {"activation": None, "residual": None, "norm": None, "norm_after": None} | fused
    shape = rows_product.shape_of(x, weight, None, out, **operands)
    assert shape is not None, "there is a kernel"
    del operands["activation"]
    rows_product.multiply(shape, x, weight, out, **operands)
