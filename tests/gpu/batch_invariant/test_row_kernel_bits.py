"""What has a program or a reduction for each row: norms, activations, the sampler and log-probabilities.

The bits of a row are the same in 200 random batches. In Triton's interpreter there are fewer, of shorter rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.norm.norm import LayerNorm, Norm, RmsNorm
from services.dense_worker.parameters import Parameter
from services.dense_worker.sampling.logprobs import rank_tokens

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.linear.triton_activation import activate
from services.dense_worker.kernels.norm.triton_norm import add_norm
from services.dense_worker.kernels.triton_launch import KernelLauncher
from services.dense_worker.sampling import triton_gumbel

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
MOST_ROWS, NUM_BATCHES, DTYPES = 300, 200, (torch.bfloat16, torch.float16)
Kernel = Callable[[list[int]], torch.Tensor]  # the results of these rows


def check_bits(kernel: Kernel, device: torch.device) -> None:
    """Each row alone, then in random batches, more than once in some of them."""
    is_gpu = device.type == "cuda"
    most, num_batches = (MOST_ROWS, NUM_BATCHES) if is_gpu else (20, 10)
    draw = random.Random(2)
    alone = torch.cat([kernel([row]) for row in range(most)])
    assert torch.isfinite(alone.float()).all() and len(alone.unique()) > 1
    for _ in range(num_batches):
        rows = draw.choices(range(most), k=draw.randint(1, most))
        assert torch.equal(kernel(rows), alone[rows]), len(rows)


def sizes(device: torch.device) -> Iterator[int]:
    """Of a row: a power of two, and one that is none."""
    yield from (4096, 11008) if device.type == "cuda" else (64, 88)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if kernel_device.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    return request.param


def draw_rows(device: torch.device, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(MOST_ROWS, width, generator=generator) * 2).to(dtype).to(device)


def norms(width: int, dtype: torch.dtype, device: torch.device) -> list[Norm]:
    weight, bias = (Parameter(name, draw_rows(device, width, dtype, 3)[0]) for name in ("weight", "bias"))
    return [RmsNorm(weight, 1e-5), LayerNorm(weight, bias, 1e-5)]


def add_and_normalize(
    launcher: KernelLauncher, x: torch.Tensor, delta: torch.Tensor, norm: Norm, rows: list[int]
) -> torch.Tensor:
    residual, out = x[rows], torch.empty_like(x[rows])
    add_norm(launcher, residual, delta[rows], norm, out)
    return torch.cat((residual, out), 1)


def test_norms_with_what_they_add(kernel_device: torch.device, dtype: torch.dtype) -> None:
    launcher = KernelLauncher(kernel_device)
    for width in sizes(kernel_device):
        x, delta = (draw_rows(kernel_device, width, dtype, seed) for seed in (0, 1))
        for norm in norms(width, dtype, kernel_device):
            check_bits(partial(add_and_normalize, launcher, x, delta, norm), kernel_device)


def test_activations(kernel_device: torch.device, dtype: torch.dtype) -> None:
    launcher, swiglu = KernelLauncher(kernel_device), MlpActivation(Activation.SILU, is_gated=True)
    for width in sizes(kernel_device):
        x = draw_rows(kernel_device, 2 * width, dtype)

        def run(rows: list[int], x: torch.Tensor = x, width: int = width) -> torch.Tensor:
            out = torch.empty(len(rows), width, dtype=dtype, device=x.device)
            activate(launcher, x[rows], out, swiglu)
            return out

        check_bits(run, kernel_device)


def test_the_sampler_draws_a_row_alike(kernel_device: torch.device, dtype: torch.dtype) -> None:
    is_gpu = kernel_device.type == "cuda"
    vocab_size = 32_000 if is_gpu else 300
    logits = draw_rows(kernel_device, vocab_size, dtype)
    rng = np.random.default_rng(0)
    temperatures = rng.choice([0.3, 1.0, 2.0], MOST_ROWS).astype(np.float32)
    seeds, positions = (rng.integers(0, 2**31, MOST_ROWS, dtype=np.uint64) for _ in range(2))

    def run(rows: list[int]) -> torch.Tensor:
        keys = temperatures[rows], seeds[rows], positions[rows]
        return triton_gumbel.draw(logits[rows], *keys)

    check_bits(run, kernel_device)


@pytest.mark.parametrize("vocab_size", [32_000, 50_257])
def test_log_probabilities(kernel_device: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    logits = draw_rows(kernel_device, vocab_size, dtype)
    token_ids = torch.arange(MOST_ROWS, device=kernel_device)

    def run(rows: list[int]) -> torch.Tensor:
        ranked = rank_tokens(logits[rows], token_ids[rows], num_top=5)
        return torch.cat((ranked.logprobs[:, None], ranked.top_logprobs), 1)

    check_bits(run, kernel_device)
