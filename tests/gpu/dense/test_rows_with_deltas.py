"""The products of 2 to 64 rows in CUDA C++ with the deltas of their adapters, against their formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, PlainWeight, Projection
from services.dense_worker.kernels.norm.norm import SplitNorm, num_squares
from services.dense_worker.parameters import Parameter
from services.lora.checkpoint import LoraTensors

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.linear.rows_product import RowsProduct
from services.dense_worker.kernels.lora.cuda_lora import CudaLora

pytestmark = pytest.mark.gpu

# Of the greatest value. Weights, x A^T and results are in bfloat16, sums in float32.
TOLERANCE = 2e-2
HIDDEN, INNER, MAX_RANK, NUM_SLOTS, EPS = 2992, 6408, 40, 3, 1e-5
SWIGLU = MlpActivation(Activation.SILU, is_gated=True)
# Projections whose borders lie within a program's features; in_features that are no whole tiles.
SIZES = {"qkv": (HIDDEN, (4104, 1048, 1032)), "gate_up": (HIDDEN, (INNER, INNER)), "down": (INNER, (HIDDEN,))}
# Ranks of each projection, by slot: several in one layer, no multiples of 16, and layers without a delta.
RANKS = (
    {"qkv0": 4, "qkv1": 16, "qkv2": 17, "down0": 40, "gate_up1": 5},
    {"qkv1": 8, "gate_up0": 16},
    {"down0": 33, "qkv2": 1, "gate_up0": 30, "gate_up1": 40},
)


class Products:
    """The layers, their adapters, and what both compute in float64."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linears = {name: self._make(name, *sizes) for name, sizes in SIZES.items()}
        rng, self._adapters = np.random.default_rng(0), list[dict[str, LoraTensors]]()
        for ranks in RANKS:
            self._adapters.append({name: self._adapter(name, rank, rng) for name, rank in ranks.items()})
        self.lora = self.make_lora()

    def make_lora(self) -> CudaLora:
        device = torch.device("cuda")
        lora = CudaLora(self.linears.values(), NUM_SLOTS, MAX_RANK, 64, torch.bfloat16, device, is_deterministic=False)
        for slot, tensors in enumerate(self._adapters):
            lora.store(slot, tensors)
        return lora

    def _make(self, name: str, in_features: int, sizes: tuple[int, ...]) -> Linear:
        merged = tuple(Projection(f"{name}{index}", size) for index, size in enumerate(sizes))
        weight = torch.randn(sum(sizes), in_features, device="cuda").div_(in_features**0.5).bfloat16()
        return Linear(name, in_features, sum(sizes), merged, Cut.OUT, PlainWeight(Parameter(name, weight)), None)

    def _adapter(self, name: str, rank: int, rng: np.random.Generator) -> LoraTensors:
        in_features, sizes = SIZES[name[:-1]]
        a = rng.standard_normal((rank, in_features), dtype=np.float32) / in_features**0.5
        return LoraTensors(a, rng.standard_normal((sizes[int(name[-1])], rank), dtype=np.float32), 0.5)

    def exact(self, name: str, x: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        product = x.double() @ self.linears[name].weight.matrix.data.double().T
        for row, slot in enumerate(slots.tolist()):
            first = 0
            for index, size in enumerate(SIZES[name][1]):
                tensors = self._adapters[slot].get(f"{name}{index}") if slot >= 0 else None
                if tensors is not None:
                    a, b = (torch.from_numpy(each).cuda().bfloat16() for each in (tensors.a, tensors.b * tensors.scale))
                    product[row, first : first + size] += b.double() @ (a.double() @ x[row].double())
                first += size
        return product


@pytest.fixture(scope="module")
def products() -> Products:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel needs compute capability 9")
    return Products()


def check(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert (found.double() - exact).abs().max() / exact.abs().max() < TOLERANCE


@pytest.mark.parametrize("num_rows", [2, 16, 30, 33, 64])
@pytest.mark.parametrize("kind", ["mixed", "one", "none"])
def test_each_product_has_the_deltas_of_its_rows(
    products: Products, monkeypatch: pytest.MonkeyPatch, kind: str, num_rows: int
) -> None:
    """One after the other in a graph, with the norm between two of them. Each replay gives the same bits."""
    calls, multiply = list[object](), RowsProduct.multiply

    def count(self: RowsProduct, *arguments: Any) -> None:
        calls.append(arguments[-1])
        multiply(self, *arguments)

    monkeypatch.setattr(RowsProduct, "multiply", count)
    slots = {
        "mixed": np.random.default_rng(num_rows).integers(-1, NUM_SLOTS, num_rows),
        "one": np.where(np.arange(num_rows) == num_rows // 2, 2, -1),
        "none": np.full(num_rows, -1),
    }[kind]
    lora, linears = products.lora, products.linears
    start = torch.randn(64, HIDDEN, device="cuda").bfloat16()[:num_rows]
    x = torch.randn(64, INNER, device="cuda").bfloat16()[:num_rows]
    gain = (torch.rand(HIDDEN, device="cuda") + 0.5).bfloat16()
    hidden, weighted = torch.empty_like(start), torch.empty(64, HIDDEN, device="cuda", dtype=torch.bfloat16)[:num_rows]
    qkv = torch.empty(64, sum(SIZES["qkv"][1]), device="cuda", dtype=torch.bfloat16)[:num_rows]
    act = torch.empty(64, INNER, device="cuda", dtype=torch.bfloat16)[:num_rows]
    norm = SplitNorm(gain, EPS, weighted, torch.full((64, num_squares(HIDDEN)), 7.0, device="cuda"))

    def run() -> None:
        lora.start(num_rows)
        hidden.copy_(start)
        lora.multiply(linears["down"], x, hidden, None, hidden, norm_after=norm)
        lora.multiply(linears["qkv"], weighted, qkv, None, None, norm=norm)
        lora.multiply(linears["gate_up"], weighted, act, SWIGLU, None, norm=norm)

    lora.begin_step(slots.astype(np.int64))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        first = [each.clone() for each in (hidden, qkv, act)]
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        for _ in range(20):
            graph.replay()
            assert all(torch.equal(*each) for each in zip((hidden, qkv, act), first, strict=True))
        stream.synchronize()
    assert len(calls) == 6 and all(deltas is not None for deltas in calls)
    check(hidden, products.exact("down", x, slots) + start.double())
    root = torch.rsqrt(hidden.double().square().mean(1, keepdim=True) + EPS)
    check(qkv, products.exact("qkv", weighted, slots) * root)
    gate, up = (products.exact("gate_up", weighted, slots) * root).chunk(2, 1)
    check(act, torch.nn.functional.silu(gate) * up)


def test_products_of_several_streams_all_end(products: Products) -> None:
    """Programs wait for x A^T of others of their kernel: no other may take the places of those that have not begun."""
    slots, x = np.arange(64, dtype=np.int64) % NUM_SLOTS, torch.randn(64, INNER, device="cuda").bfloat16()
    start, found = torch.randn(64, HIDDEN, device="cuda").bfloat16(), list[torch.Tensor]()
    streams = [(torch.cuda.Stream(), products.make_lora()) for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, lora in streams:
            with torch.cuda.stream(stream):
                lora.begin_step(slots)
                lora.start(64)
                found.append(torch.empty_like(start))
                lora.multiply(products.linears["down"], x, found[-1], None, start)
    torch.cuda.synchronize()
    check(found[0], products.exact("down", x, slots) + start.double())
    assert all(torch.equal(each, found[0]) for each in found)
