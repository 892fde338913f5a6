"""The kernels of adapters against plain torch, with ranks that differ, rows in any order, and rows without adapters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, PlainWeight, Projection
from services.dense_worker.kernels.lora.torch_lora import TorchLora
from services.dense_worker.kernels.norm.norm import SplitNorm, num_squares
from services.dense_worker.parameters import Parameter
from services.lora.checkpoint import LoraTensors

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.lora.cuda_lora import CudaLora

# The greatest difference to the greatest value: the sums, h = x A^T and the result are each rounded once.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MAX_RANK, MAX_NUM_TOKENS, NUM_SLOTS = 40, 300, 3
# Ranks of each projection, by slot: several in one layer, no multiples of 16, and layers without a delta.
RANKS = (
    {"qkv0": 4, "qkv1": 16, "qkv2": 17, "down0": 40, "gate_up1": 5},
    {"qkv1": 8, "gate_up0": 16},
    {"down0": 33, "qkv2": 1, "gate_up0": 30, "gate_up1": 40},
)


def make_linear(name: str, in_features: int, sizes: tuple[int, ...]) -> Linear:
    merged = tuple(Projection(f"{name}{index}", size) for index, size in enumerate(sizes))
    weight = PlainWeight(Parameter(name, torch.randn(sum(sizes), in_features) / in_features**0.5))
    return Linear(name, in_features, sum(sizes), merged, Cut.OUT, weight, None)


LINEARS = (
    make_linear("qkv", 200, (96, 32, 32)),
    make_linear("down", 136, (200,)),
    make_linear("gate_up", 200, (100, 100)),
)


def make_adapter(ranks: dict[str, int], rng: np.random.Generator) -> dict[str, LoraTensors]:
    return {
        projection.name: LoraTensors(
            rng.standard_normal((ranks[projection.name], linear.in_features), dtype=np.float32),
            rng.standard_normal((projection.out_features, ranks[projection.name]), dtype=np.float32),
            0.5,
        )
        for linear in LINEARS
        for projection in linear.merged_from
        if projection.name in ranks
    }


def make_stores(dtype: torch.dtype, device: torch.device) -> tuple[CudaLora, TorchLora]:
    found = CudaLora(LINEARS, NUM_SLOTS, MAX_RANK, MAX_NUM_TOKENS, dtype, device)
    reference = TorchLora(LINEARS, NUM_SLOTS, dtype, torch.device("cpu"))
    rng = np.random.default_rng(0)
    for slot, ranks in enumerate(RANKS):
        adapter = make_adapter(ranks, rng)
        found.store(slot, adapter)
        reference.store(slot, adapter)
    return found, reference


def move_linear(linear: Linear, dtype: torch.dtype, device: torch.device) -> Linear:
    weight = linear.weight.matrix.data.to(device, dtype)
    return replace(linear, weight=PlainWeight(Parameter(linear.name, weight)))


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found.cpu().float() - expected).abs().max() / expected.abs().max() < TOLERANCES[dtype]


def check_rows(found: CudaLora, reference: TorchLora, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    for linear in LINEARS:
        x = torch.randn(num_rows, linear.in_features).to(dtype)
        before = torch.randn(num_rows, linear.out_features).to(dtype)
        out, expected = before.to(device, copy=True), before.clone()
        found.add(linear, x.to(device), out)
        reference.add(linear, x, expected)
        error = (out.cpu().float() - expected.float()).abs().max() / expected.float().abs().max()
        assert error < TOLERANCES[dtype]
        is_changed = (expected != before).any(1)
        assert torch.equal(out.cpu()[~is_changed], before[~is_changed]), "rows without a delta keep every bit"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 64, MAX_NUM_TOKENS])
def test_deltas_are_those_of_torch(kernel_device: torch.device, dtype: torch.dtype, num_rows: int) -> None:
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    torch.manual_seed(num_rows)
    rng = np.random.default_rng(num_rows)
    found, reference = make_stores(dtype, kernel_device)
    mixed = rng.integers(-1, NUM_SLOTS, num_rows)
    single = np.full(num_rows, -1)
    single[num_rows // 2] = 2
    for slots in (mixed, single, np.zeros(num_rows, np.int64)):
        for store in (found, reference):
            store.begin_step(slots.astype(np.int64))
        found.start(num_rows)
        check_rows(found, reference, num_rows, dtype, kernel_device)
        rows = torch.from_numpy(rng.integers(0, num_rows, 7))
        found.select(rows.to(kernel_device))
        reference.select(rows)
        check_rows(found, reference, 7, dtype, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 33, 64])
def test_a_product_with_deltas_is_that_of_torch(kernel_device: torch.device, dtype: torch.dtype, num_rows: int) -> None:
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    torch.manual_seed(num_rows)
    found, reference = make_stores(dtype, kernel_device)
    mixed = np.random.default_rng(num_rows).integers(-1, NUM_SLOTS, num_rows)
    for slots in (mixed, np.full(num_rows, 1), np.full(num_rows, -1)):
        for store in (found, reference):
            store.begin_step(slots.astype(np.int64))
        found.start(num_rows)
        for linear in LINEARS:
            x, residual = torch.randn(num_rows, linear.in_features).to(dtype), None
            weight = linear.weight.matrix.data.to(dtype)
            product = F.linear(x, weight)
            reference.add(linear, x, product)
            expected = product.float()
            activation = MlpActivation(Activation.SILU, is_gated=True) if linear.name == "gate_up" else None
            if activation is not None:
                expected = activation.apply(expected)
            if linear.name == "down":
                residual = torch.randn_like(expected).to(kernel_device, dtype)
                expected += residual.cpu().float()
            on_device = replace(linear, weight=PlainWeight(Parameter(linear.name, weight.to(kernel_device))))
            out = torch.empty(expected.shape, dtype=dtype, device=kernel_device)
            found.multiply(on_device, x.to(kernel_device), out, activation, residual)
            error = (out.cpu().float() - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCES[dtype], linear.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [2, 33])
def test_two_products_with_deltas_compute_the_norm_between_them(
    kernel_device: torch.device, dtype: torch.dtype, num_rows: int
) -> None:
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    torch.manual_seed(num_rows)
    found, reference = make_stores(dtype, kernel_device)
    slots = np.random.default_rng(num_rows).integers(-1, NUM_SLOTS, num_rows)
    for store in (found, reference):
        store.begin_step(slots.astype(np.int64))
    found.start(num_rows)
    qkv, down = (move_linear(LINEARS[index], dtype, kernel_device) for index in (0, 1))
    x, residual = (torch.randn(num_rows, size).to(dtype) for size in (down.in_features, down.out_features))
    weight, eps = torch.rand(down.out_features) + 0.5, 1e-5
    on_device = {"dtype": dtype, "device": kernel_device}
    squares = torch.zeros(64, num_squares(down.out_features), device=kernel_device)
    half = SplitNorm(weight.to(**on_device), eps, torch.empty(residual.shape, **on_device), squares)
    hidden, out = residual.to(kernel_device, copy=True), torch.empty(num_rows, qkv.out_features, **on_device)
    found.multiply(down, x.to(kernel_device), hidden, None, hidden, norm_after=half)
    found.multiply(qkv, half.rows, out, None, None, norm=half)

    product = F.linear(x, down.weight.matrix.data.cpu())
    reference.add(LINEARS[1], x, product)
    check(hidden, residual.float() + product.float(), dtype)
    normed = F.rms_norm(hidden.cpu().float(), (down.out_features,), weight.to(dtype).float(), eps).to(dtype)
    product = F.linear(normed, qkv.weight.matrix.data.cpu())
    reference.add(LINEARS[0], normed, product)
    check(out, product.float(), dtype)


def test_products_of_further_rows_follow_those_of_the_step(kernel_device: torch.device) -> None:
    """As those of prompt_logprobs do: the last layers multiply once more, and again for each part of the rows."""
    dtype = torch.float16
    found, reference = make_stores(dtype, kernel_device)
    slots = np.array([1, -1, 0, 2])
    for store in (found, reference):
        store.begin_step(slots)
    found.start(len(slots))
    down = move_linear(LINEARS[1], dtype, kernel_device)
    for index in range(2 * len(LINEARS) + 1):
        rows = torch.tensor([3, 0, index % 4])
        found.select(rows.to(kernel_device))
        reference.select(rows)
        x = torch.randn(len(rows), down.in_features).to(dtype)
        out = torch.empty(len(rows), down.out_features, dtype=dtype, device=kernel_device)
        found.multiply(down, x.to(kernel_device), out, None, None)
        product = F.linear(x, down.weight.matrix.data.cpu())
        reference.add(LINEARS[1], x, product)
        check(out, product.float(), dtype)


def test_an_adapter_that_replaces_another_leaves_nothing_of_it(kernel_device: torch.device) -> None:
    found, reference = make_stores(torch.float32, kernel_device)
    adapter = make_adapter({"qkv0": 3}, np.random.default_rng(5))
    for store in (found, reference):
        store.store(0, adapter)
        store.begin_step(np.zeros(4, np.int64))
    found.start(4)
    check_rows(found, reference, 4, torch.float32, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("is_fused", [False, True])
def test_one_graph_serves_any_slots(is_fused: bool) -> None:
    """A captured step reads the slots of each replay."""
    device, dtype = torch.device("cuda"), torch.bfloat16 if is_fused else torch.float32
    found, reference = make_stores(dtype, device)
    weight = PlainWeight(Parameter("qkv", torch.zeros(160, 200, dtype=dtype, device=device)))
    num_rows, linear = 33, replace(LINEARS[0], weight=weight)
    x = torch.randn(num_rows, linear.in_features).to(dtype)
    x_on_device, out = x.to(device), torch.zeros(num_rows, linear.out_features, device=device, dtype=dtype)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def run() -> None:
        found.start(num_rows)
        out.zero_()
        if is_fused:
            found.multiply(linear, x_on_device, out, None, None)
        else:
            found.add(linear, x_on_device, out)

    with torch.cuda.stream(stream):
        with found.activated():
            run()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                run()
        for seed in range(4):
            slots = np.random.default_rng(seed).integers(-1, NUM_SLOTS, num_rows).astype(np.int64)
            found.begin_step(slots)
            reference.begin_step(slots)
            graph.replay()
            stream.synchronize()
            expected = torch.zeros(num_rows, linear.out_features, dtype=dtype)
            reference.add(linear, x, expected)
            error = (out.cpu().float() - expected.float()).abs().max() / expected.float().abs().max()
            assert error < TOLERANCES[dtype]
