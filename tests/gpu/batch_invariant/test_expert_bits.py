"""A row of a mixture of experts has the same bits with any other rows, whatever experts these choose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from services.common.families.shape import Activation, ExpertOptions, GroupedRouting
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear, RoutedExperts
from services.dense_worker.kernels.experts.router import GroupedRouter, Router, SoftmaxRouter
from services.dense_worker.kernels.linear.linear import PlainWeight
from services.dense_worker.parameters import Parameter
from tests.support.model_configs import small_config

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.experts.cuda_experts import CudaExperts
from services.dense_worker.kernels.triton_launch import KernelLauncher

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
# Experts, experts of a token, hidden and intermediate size: Qwen3-30B-A3B, Mixtral cut, and sizes that divide nothing.
ON_GPU = {"128x8": (128, 8, 2048, 768), "8x2": (8, 2, 4096, 3584), "12x3 odd": (12, 3, 712, 200)}
IN_INTERPRETER = {"8x2": (8, 2, 64, 32), "12x3 odd": (12, 3, 88, 40)}
SIGMOID = GroupedRouting(num_groups=4, num_groups_per_token=2, multiplier=2.5, is_sigmoid=True)


class Mixture:
    """A random layer on the device, and rows of input for it."""

    def __init__(
        self, device: torch.device, sizes: tuple[int, int, int, int], dtype: torch.dtype, grouped: GroupedRouting | None
    ) -> None:
        num_experts, num_per_token, hidden, intermediate = sizes
        self.most_rows = 700 if device.type == "cuda" else 20
        generator = torch.Generator().manual_seed(3)

        def parameter(name: str, *shape: int, std: float = 1.0, dtype: torch.dtype = dtype) -> Parameter:
            return Parameter(name, (torch.randn(shape, generator=generator) * std).to(dtype).to(device))

        def linear(name: str, in_features: int, out_features: int) -> ExpertLinear:
            weight = PlainWeight(parameter(name, num_experts * out_features, in_features, std=in_features**-0.5))
            return ExpertLinear(name, num_experts, in_features, out_features, weight, None)

        matrix = parameter("router", num_experts, hidden, std=2 * hidden**-0.5)
        router: Router = SoftmaxRouter(matrix, num_per_token, True, None)
        if grouped is not None:
            bias = parameter("bias", num_experts, dtype=torch.float32)
            router = GroupedRouter(matrix, bias, num_per_token, True, grouped)
        up, down = linear("up", hidden, 2 * intermediate), linear("down", intermediate, hidden)
        self.experts = RoutedExperts(router, up, down, Activation.SILU)
        options = ExpertOptions(num_experts, num_per_token, intermediate, grouped is None, (0,), grouped=grouped)
        config = replace(small_config("llama"), hidden_size=hidden)
        launcher = KernelLauncher(device)
        self.kernels = CudaExperts(launcher, config, options, self.most_rows, dtype, device, is_deterministic=True)
        self.kernels.skips_padding = False
        self.x = parameter("x", self.most_rows, hidden).data
        self.shared = parameter("shared", self.most_rows, hidden, dtype=torch.float32).data

    def run(self, rows: list[int]) -> torch.Tensor:
        return self.kernels.mix(self.x[rows], self.experts, self.shared[rows])


@pytest.mark.parametrize("grouped", [None, SIGMOID], ids=["softmax", "groups"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_have_the_same_bits_in_200_random_batches(
    kernel_device: torch.device, dtype: torch.dtype, grouped: GroupedRouting | None
) -> None:
    is_gpu, draw = kernel_device.type == "cuda", random.Random(1)
    if not is_gpu and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    for sizes in (ON_GPU if is_gpu else IN_INTERPRETER).values():
        mixture = Mixture(kernel_device, sizes, dtype, grouped)
        alone = torch.cat([mixture.run([row]) for row in range(mixture.most_rows)])
        for _ in range(200 if is_gpu else 8):
            most = draw.choice((1, 2, 16, 17, 65, 256, mixture.most_rows)) if is_gpu else mixture.most_rows
            rows = draw.choices(range(mixture.most_rows), k=draw.randint(1, most))
            assert torch.equal(mixture.run(rows), alone[rows]), (sizes, len(rows))


def test_results_are_those_of_the_reference(kernel_device: torch.device) -> None:
    for sizes in (ON_GPU if kernel_device.type == "cuda" else IN_INTERPRETER).values():
        mixture = Mixture(kernel_device, sizes, torch.float16, None)
        found = mixture.run(list(range(20))).float()
        expected = mixture.experts.mix(mixture.x[:20]) + mixture.shared[:20]
        assert (found - expected).norm() < 2e-3 * expected.norm()
