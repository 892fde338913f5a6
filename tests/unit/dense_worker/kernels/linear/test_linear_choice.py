"""`LinearChoice` by times that the test gives, instead of a GPU's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from services.dense_worker.kernels.linear import linear_choice
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.linear_choice import TILED_BUCKETS, LinearChoice, LinearKernel, row_bucket
from tests.support.quantized.random_weights import RandomWeights, linear_of

CUBLAS, STREAMED, TILED = LinearKernel.CUBLAS, LinearKernel.STREAMED, LinearKernel.TILED


def make_linear(num_rows: int) -> Linear:
    weights = RandomWeights(torch.device("cpu"), torch.bfloat16)
    return linear_of(weights.grouped(4, 32, False, False, (num_rows,), 64), (num_rows,), 64, None)


@pytest.fixture
def linears() -> list[Linear]:
    return [make_linear(64), make_linear(128)]


@pytest.fixture(autouse=True)
def _time_is_what_the_step_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_in_graph_us(run_step: Callable[[], float]) -> float:
        return run_step()

    monkeypatch.setattr(linear_choice, "time_in_graph_us", time_in_graph_us)


@pytest.mark.parametrize(
    ("num_rows", "bucket"), [(1, 1), (2, 16), (64, 64), (65, 128), (128, 128), (129, 256), (1024, 1024), (1025, None)]
)
def test_the_bucket_is_the_smallest_that_holds_the_rows(num_rows: int, bucket: int | None) -> None:
    assert row_bucket(num_rows) == bucket


def test_unmeasured_layers_have_cublas(linears: list[Linear]) -> None:
    choice = LinearChoice()
    choice.set_all(linears[:1], TILED)
    assert choice.kernel(linears[1], 128) is CUBLAS
    assert [choice.kernel(linears[0], num_rows) for num_rows in (64, 65, 1024, 1025)] == [CUBLAS, TILED, TILED, CUBLAS]


def test_each_kernel_is_set_where_it_can_run(linears: list[Linear]) -> None:
    choice = LinearChoice()
    choice.set_all(linears, STREAMED)
    assert [choice.kernel(linears[0], num_rows) for num_rows in (1, 64, 65)] == [STREAMED, STREAMED, CUBLAS]
    choice.set_all(linears, TILED)
    assert [choice.kernel(linears[0], num_rows) for num_rows in (1, 64, 65)] == [STREAMED, STREAMED, TILED]
    choice.set_all(linears, CUBLAS)
    assert [choice.kernel(linears[0], num_rows) for num_rows in (1, 64, 65)] == [CUBLAS] * 3


@pytest.mark.parametrize(("num_rows", "own"), [(16, STREAMED), (128, TILED), (512, TILED)])
def test_measurement_keeps_what_makes_the_step_faster(linears: list[Linear], num_rows: int, own: LinearKernel) -> None:
    """cuBLAS is 20 us faster for the first layer, and slower by 5 us for the second."""
    choice = LinearChoice()
    gains_us = {CUBLAS: (20.0, -5.0), own: (0.0, 0.0)}

    def step_us() -> float:
        return 100.0 - sum(gains_us[choice.kernel(each, num_rows)][i] for i, each in enumerate(linears))

    choice.measure(linears, num_rows, step_us)
    assert [choice.kernel(each, num_rows) for each in linears] == [CUBLAS, own]
    other = 256 if num_rows != 256 else 1024
    assert choice.kernel(linears[1], other) is CUBLAS, "other buckets are measured on their own"


def test_a_gain_within_the_noise_does_not_change_the_kernel(linears: list[Linear]) -> None:
    choice = LinearChoice()
    choice.measure(linears, 128, lambda: 100.0 if choice.kernel(linears[0], 128) is TILED else 99.9)
    assert choice.kernel(linears[0], 128) is TILED


def test_a_step_with_fewer_rows_stands_for_its_bucket(linears: list[Linear]) -> None:
    """As where max_num_batched_tokens lies between two buckets."""
    choice = LinearChoice()
    choice.measure(linears, 200, lambda: 100.0)
    assert choice.kernel(linears[0], 129) is choice.kernel(linears[0], TILED_BUCKETS[1]) is TILED
