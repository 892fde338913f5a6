"""`MatmulChoice` by times that the test gives and a library that multiplies with torch, instead of a GPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from services.common.errors import DeviceError
from services.dense_worker.kernels.linear import matmul_choice
from services.dense_worker.kernels.linear.matmul_choice import MatmulChoice

CPU = torch.device("cpu")
NUM_TIMED = matmul_choice._NUM_TIMED
FLUSH_US, OWN_US = 20.0, 100.0


@dataclass
class FakeLibrary:
    """Its candidates are numbers. They take `times_us`."""

    times_us: list[float]
    multiplied: list[int] = field(default_factory=list)

    def candidates(self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, most: int) -> list[int]:
        return list(range(len(self.times_us)))[:most]

    def multiply(self, candidate: int, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
        self.multiplied.append(candidate)
        torch.mm(x, matrix.t(), out=out)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeLibrary]:
    def use(*times_us: float) -> FakeLibrary:
        """Whatever is multiplied takes a time by how it is multiplied, after a flush."""
        library = FakeLibrary(list(times_us))

        def time_of_us(run: Callable[[], object]) -> float:
            num_products, num_others = len(library.multiplied), len(own)
            run()
            if len(library.multiplied) > num_products:
                return NUM_TIMED * (FLUSH_US + library.times_us[library.multiplied[-1]])
            return NUM_TIMED * (FLUSH_US + (OWN_US if len(own) > num_others else 0.0))

        own: list[torch.Tensor] = []
        multiply = torch.mm

        def mm(x: torch.Tensor, matrix: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            own.append(x)
            return multiply(x, matrix, out=out)

        monkeypatch.setattr(matmul_choice, "CublasLt", lambda device: library)
        monkeypatch.setattr(matmul_choice, "time_of_us", time_of_us)
        monkeypatch.setattr(matmul_choice.torch, "mm", mm)
        return library

    return use


def aligned(values: torch.Tensor) -> torch.Tensor:
    """A copy that begins as a GPU's tensors do."""
    room = torch.zeros(values.numel() + 256, dtype=values.dtype)
    first = -room.data_ptr() % 256 // room.element_size()
    return room[first : first + values.numel()].view(values.shape).copy_(values)


def operands(num_rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        aligned(torch.randn(num_rows, 64).to(dtype)),
        aligned(torch.randn(48, 64).to(dtype)),
        aligned(torch.zeros(num_rows, 48, dtype=dtype)),
    )


@pytest.mark.parametrize(
    ("times_us", "chosen"),
    [((100.0, 80.0, 90.0), 1), ((100.0, 98.0), None), ((70.0, 69.0), 1), ((), None), ((150.0, 96.0), 1)],
)
def test_the_fastest_is_chosen_where_it_is_clearly_faster_than_torchs(
    times_us: tuple[float, ...], chosen: int | None, use: Callable[..., FakeLibrary]
) -> None:
    library, choice = use(*times_us), MatmulChoice(CPU)
    x, matrix, out = operands(100)
    with choice.choosing():
        choice.multiply(x, matrix, out)
    library.multiplied.clear()
    out.zero_()
    assert choice.multiply(x, matrix, out) == (chosen is not None)
    assert library.multiplied == ([] if chosen is None else [chosen])
    if chosen is not None:
        torch.testing.assert_close(out, x @ matrix.t())


def test_a_product_is_measured_once_and_only_while_choosing(use: Callable[..., FakeLibrary]) -> None:
    library, choice = use(50.0), MatmulChoice(CPU)
    assert not choice.multiply(*operands(100))
    with choice.choosing():
        assert choice.multiply(*operands(100))
        num_products = len(library.multiplied)
        assert choice.multiply(*operands(100))
        assert len(library.multiplied) == num_products + 1
    assert not choice.multiply(*operands(101)), "no step waits for a measurement"
    assert len(library.multiplied) == num_products + 1


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(64, torch.bfloat16), (513, torch.bfloat16), (100, torch.float32)], ids=str
)
def test_other_products_are_torchs(num_rows: int, dtype: torch.dtype, use: Callable[..., FakeLibrary]) -> None:
    library, choice = use(1.0), MatmulChoice(CPU)
    with choice.choosing():
        assert not choice.multiply(*operands(num_rows, dtype))
    assert not library.multiplied


def test_rows_that_lie_otherwise_are_measured_by_themselves(use: Callable[..., FakeLibrary]) -> None:
    """A candidate is for certain strides."""
    library, choice = use(50.0), MatmulChoice(CPU)
    x, matrix, out = operands(100)
    with choice.choosing():
        choice.multiply(x, matrix, out)
    wide = aligned(torch.zeros(100, 96, dtype=out.dtype))[:, :48]
    num_products = len(library.multiplied)
    assert not choice.multiply(x, matrix, wide)
    assert len(library.multiplied) == num_products
    with choice.choosing():
        assert choice.multiply(x, matrix, wide)
    assert len(library.multiplied) > num_products + 1, "measured again"


def test_columns_of_a_wider_matrix_are_torchs(use: Callable[..., FakeLibrary]) -> None:
    library, choice = use(50.0), MatmulChoice(CPU)
    x, matrix, out = operands(100)
    with choice.choosing():
        assert not choice.multiply(x, aligned(torch.cat((matrix, matrix), 1))[:, :64], out)
    assert not library.multiplied


def test_a_candidate_that_fails_leaves_the_fastest_before_it(use: Callable[..., FakeLibrary]) -> None:
    library, choice = use(50.0, 10.0), MatmulChoice(CPU)
    multiply = library.multiply

    def fail(candidate: int, *operands: torch.Tensor) -> None:
        if candidate == 1:
            raise DeviceError("cublasLtMatmul failed with status 15")
        multiply(candidate, *operands)

    library.multiply = fail
    x, matrix, out = operands(100)
    with choice.choosing():
        assert choice.multiply(x, matrix, out)
    assert set(library.multiplied) == {0}
    torch.testing.assert_close(out, x @ matrix.t())


def test_operands_that_begin_elsewhere_are_torchs(use: Callable[..., FakeLibrary]) -> None:
    """The library could refuse them, or read wrongly."""
    library, choice = use(50.0), MatmulChoice(CPU)
    x, matrix, out = operands(100)
    with choice.choosing():
        choice.multiply(x, matrix, out)
    num_products = len(library.multiplied)
    wide = aligned(torch.zeros(101, 64, dtype=x.dtype))
    assert not choice.multiply(wide.view(-1)[8 : 8 + x.numel()].view(x.shape), matrix, out)
    assert choice.multiply(x, matrix, out) and len(library.multiplied) == num_products + 1
