"""Which products of gate and up compute the activation of many rows, on a Hopper with 132 multiprocessors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.errors import DeviceError
from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.gated_tiles import GatedTiles, choose_width
from services.dense_worker.kernels.linear.linear import Cut, Linear, PlainWeight
from services.dense_worker.parameters import Parameter
from tests.support.dense.fake_triton_kernels import fake_triton_kernels

SWIGLU = MlpActivation(Activation.SILU, is_gated=True)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    launcher = SimpleNamespace(is_hopper=True, num_sms=132, shared_memory_bytes=227 << 10, is_compiling=False)
    with fake_triton_kernels():
        module = importlib.import_module("services.dense_worker.kernels.linear.gated_product")
        yield module.GatedProduct(launcher, torch.device("cuda"))


def gate_up(
    out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16, *, has_bias: bool = False
) -> Linear:
    matrix = torch.empty(2 * out_features, in_features, dtype=dtype, device="meta")
    bias = Parameter("bias", torch.empty(2 * out_features, dtype=dtype, device="meta")) if has_bias else None
    weight = PlainWeight(Parameter("weight", matrix))
    return Linear("gate_up", in_features, 2 * out_features, (), Cut.OUT, weight, bias)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as loaded."""
    monkeypatch.setattr(GatedTiles, "_compiled", lambda tiles, width: b"")
    module = SimpleNamespace(CudaKernel=lambda *arguments: None)
    monkeypatch.setitem(sys.modules, "services.dense_worker.kernels.cuda_source", module)


@pytest.mark.parametrize(
    ("num_rows", "out_features", "width"),
    [
        (512, 11008, 112),  # 198 pairs of tiles are three for each of 66 clusters
        (640, 11008, None),  # with either width, one of six tiles of rows is empty
        (768, 11008, 128),  # 258 pairs; of the other width 297
        (1024, 11008, 112),
        (1152, 11008, None),
        (8192, 11008, 112),
        (512, 14336, 112),
        (512, 2048, None),  # fewer tiles than programs
        (8192, 2048, 128),
    ],
)
def test_programs_have_as_many_full_tiles(
    product: Any, kernels: None, num_rows: int, out_features: int, width: int | None
) -> None:
    assert choose_width(num_rows, out_features, num_sms=132) == width
    assert product.can_multiply(gate_up(out_features, 4096), num_rows, SWIGLU) == (width is not None)


def test_other_layers_have_no_tiles(product: Any, kernels: None) -> None:
    gelu = MlpActivation(Activation.GELU, is_gated=True)
    assert product.can_multiply(gate_up(11008, 4096), 1024, SWIGLU)
    assert not product.can_multiply(gate_up(11008, 4096), 511, SWIGLU)
    assert not product.can_multiply(gate_up(11008, 4096, torch.float16), 1024, SWIGLU)
    assert not product.can_multiply(gate_up(11008, 4096, has_bias=True), 1024, SWIGLU)
    assert not product.can_multiply(gate_up(11008, 4100), 1024, SWIGLU)
    assert not product.can_multiply(gate_up(11008, 4096), 1024, gelu)
    assert not product.can_multiply(gate_up(11008, 4096), 1024, MlpActivation(Activation.SILU, is_gated=False))


def test_kernels_that_cannot_be_had_are_tried_once(
    product: Any, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(tiles: GatedTiles, width: int) -> bytes:
        tried.append(width)
        raise DeviceError("no NVRTC")

    monkeypatch.setattr(GatedTiles, "_compiled", fail)
    for _ in range(2):
        assert not product.can_multiply(gate_up(11008, 4096), 1024, SWIGLU)
    assert len(tried) == 1
