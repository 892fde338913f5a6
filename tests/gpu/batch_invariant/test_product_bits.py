"""A row of a product has the same bits with any other rows, in all dtypes, with everything that is fused."""

from __future__ import annotations

import random

import pytest
import torch

from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import MlpActivation

triton_products = pytest.importorskip("services.dense_worker.batch_invariant.triton_products", reason="needs triton")

from services.dense_worker.kernels.linear.triton_tiles import SPLIT_AREA, SplitWorkspace  # noqa: E402
from services.dense_worker.kernels.triton_launch import KernelLauncher  # noqa: E402

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
MOST_ROWS = 700
SWIGLU = MlpActivation(Activation.SILU, is_gated=True)
# out_features, in_features, activation: parts that are split and that are not, a last part that is not whole
ON_GPU = [
    (4096, 4096, None),
    (4096, 11008, None),
    (12288, 4096, None),
    (11008, 4096, SWIGLU),
    (1024, 2080, None),
    (500, 4096, None),
]
IN_INTERPRETER = [(128, 576, None), (72, 96, SWIGLU)]
# Relative to the norm of the result. Sums of FP8 are rounded to about 14 bits on the way.
TOLERANCES = {"bfloat16": 6e-3, "float16": 1e-3, "float8_e4m3fn": 8e-3}


class Product:
    """A layer with random weights, and `MOST_ROWS` rows of input."""

    def __init__(
        self, device: torch.device, out_features: int, in_features: int, activation: MlpActivation | None, kind: str
    ) -> None:
        generator = torch.Generator(device).manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.launcher, self.activation, self.out_features = KernelLauncher(device), activation, out_features
        self.is_codes = kind == "float8_e4m3fn"
        self.dtype = torch.bfloat16 if self.is_codes else getattr(torch, kind)
        num_rows = out_features * (1 if activation is None else 2)
        self.x = draw(MOST_ROWS, in_features).to(getattr(torch, kind))
        self.weight = (draw(num_rows, in_features) * in_features**-0.5).to(self.dtype)
        self.x_scale = self.w_scale = None
        if self.is_codes:
            self.weight = (self.weight.float() * 100).to(torch.float8_e4m3fn)
            self.x_scale, self.w_scale = draw(MOST_ROWS).abs() + 0.5, (draw(num_rows).abs() + 0.5) / 100
        self.bias = draw(num_rows).to(self.dtype)
        self.residual = draw(MOST_ROWS, out_features).to(self.dtype)
        self.workspace = SplitWorkspace(device, self.launcher.num_sms * triton_products.MOST_SPLIT_SUMS // SPLIT_AREA)

    def run(self, rows: list[int]) -> torch.Tensor:
        out = torch.empty(len(rows), self.out_features, dtype=self.dtype, device=self.x.device)
        triton_products.multiply_rows(
            self.launcher,
            self.x.view(torch.uint8)[rows].view(self.x.dtype) if self.is_codes else self.x[rows],
            None if self.x_scale is None else self.x_scale[rows],
            self.weight,
            self.w_scale,
            self.bias,
            out,
            self.dtype,
            self.workspace,
            activation=self.activation,
            residual=self.residual[rows],
        )
        return out

    def expected(self) -> torch.Tensor:
        """In float64, of all rows."""
        product = self.x.double() @ self.weight.double().T
        if self.is_codes:
            product *= self.x_scale[:, None].double() * self.w_scale.double()
        product += self.bias
        return (product if self.activation is None else self.activation.apply(product)) + self.residual



def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("shape", ON_GPU, ids=str)
def test_rows_have_the_same_bits_in_200_random_batches(
    kind: str, shape: tuple[int, int, MlpActivation | None]
) -> None:
    """Not in Triton's interpreter, where numpy multiplies, whose order of additions depends on the tile."""
    product, draw = Product(torch.device("cuda"), *shape, kind), random.Random(1)
    alone = torch.cat([product.run([row]) for row in range(MOST_ROWS)])
    for _ in range(200):
        most = draw.choice((1, 16, 17, 64, 65, 128, 129, 256, MOST_ROWS))
        rows = draw.sample(range(MOST_ROWS), draw.randint(1, most))
        assert same_bits(product.run(rows), alone[rows]), len(rows)


def test_products_are_those_of_float64(kernel_device: torch.device) -> None:
    is_gpu = kernel_device.type == "cuda"
    for kind in TOLERANCES if is_gpu else ["float16"]:  # the interpreter multiplies bfloat16 as integers, and no FP8
        for shape in ON_GPU if is_gpu else IN_INTERPRETER:
            product = Product(kernel_device, *shape, kind)
            expected = product.expected()
            for num_rows in (1, 30, 200):
                result = product.run(list(range(num_rows))).double()
                error = (result - expected[:num_rows]).norm() / expected[:num_rows].norm()
                assert error < TOLERANCES[kind], (kind, shape, num_rows)
