"""A row with an adapter has the same bits whatever adapters the others have, and a row without one keeps its bits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from services.dense_worker.kernels.linear.linear import Cut, Linear, PlainWeight, Projection
from services.dense_worker.kernels.lora.torch_lora import TorchLora
from services.dense_worker.parameters import Parameter
from services.lora.checkpoint import LoraTensors

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.lora.cuda_lora import CudaLora

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
NUM_SLOTS, MAX_RANK = 3, 64
RANKS = (64, 16, 5)  # by slot


def make_linear(name: str, in_features: int, sizes: tuple[int, ...]) -> Linear:
    merged = tuple(Projection(f"{name}{index}", size) for index, size in enumerate(sizes))
    return Linear(name, in_features, sum(sizes), merged, Cut.OUT, PlainWeight(Parameter(name, torch.empty(0))), None)


class Adapted:
    """Random adapters in all slots, rows of input, and rows to which deltas are added."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        is_gpu = device.type == "cuda"
        self.most_rows = 700 if is_gpu else 40
        wide, middle, narrow = (4096, 1024, 11008) if is_gpu else (96, 32, 200)
        self.linears = make_linear("qkv", wide, (wide, middle, middle)), make_linear("down", narrow, (wide,))
        self.lora = CudaLora(self.linears, NUM_SLOTS, MAX_RANK, self.most_rows, dtype, device, is_deterministic=True)
        self.reference = TorchLora(self.linears, NUM_SLOTS, dtype, torch.device("cpu"))
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        for slot, rank in enumerate(RANKS):
            adapter = {
                projection.name: LoraTensors(
                    rng.standard_normal((rank, linear.in_features), dtype=np.float32) * linear.in_features**-0.5,
                    rng.standard_normal((projection.out_features, rank), dtype=np.float32),
                    0.5,
                )
                for linear in self.linears
                for projection in linear.merged_from
            }
            self.lora.store(slot, adapter)
            self.reference.store(slot, adapter)

        def draw(width: int) -> torch.Tensor:
            return torch.randn(self.most_rows, width, generator=generator).to(dtype).to(device)

        self.x = [draw(linear.in_features) for linear in self.linears]
        self.before = [draw(linear.out_features) for linear in self.linears]
        self.slots = rng.integers(-1, NUM_SLOTS, self.most_rows)

    def run(self, rows: list[int]) -> torch.Tensor:
        self.lora.begin_step(self.slots[rows])
        self.lora.start(len(rows))
        outs = [before[rows] for before in self.before]
        for linear, x, out in zip(self.linears, self.x, outs, strict=True):
            assert not self.lora.fuses(linear, len(rows))
            self.lora.add(linear, x[rows], out)
        return torch.cat(outs, 1)

    def expected(self) -> torch.Tensor:
        self.reference.begin_step(self.slots)
        outs = [before.cpu().clone() for before in self.before]
        for linear, x, out in zip(self.linears, self.x, outs, strict=True):
            self.reference.add(linear, x.cpu(), out)
        return torch.cat(outs, 1).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_have_the_same_bits_in_200_random_batches(kernel_device: torch.device, dtype: torch.dtype) -> None:
    is_gpu, draw = kernel_device.type == "cuda", random.Random(1)
    if not is_gpu and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    adapted = Adapted(kernel_device, dtype)
    everything = list(range(adapted.most_rows))
    alone = torch.cat([adapted.run([row]) for row in everything])
    untouched = torch.cat(adapted.before, 1)[adapted.slots == -1]
    assert torch.equal(alone[adapted.slots == -1], untouched) and len(untouched)
    for _ in range(200 if is_gpu else 6):
        most = draw.choice((1, 16, 17, 64, 65, 256, 257, adapted.most_rows)) if is_gpu else adapted.most_rows
        rows = draw.choices(everything, k=draw.randint(1, most))
        assert torch.equal(adapted.run(rows), alone[rows]), len(rows)


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
def test_deltas_are_those_of_torch(kernel_device: torch.device, dtype: torch.dtype) -> None:
    adapted = Adapted(kernel_device, dtype)
    found, expected = adapted.run(list(range(adapted.most_rows))).cpu().float(), adapted.expected()
    assert (found - expected).norm() < 3e-3 * expected.norm()
