"""The Triton kernels that find the most likely token agree with the definition, also where logits are equal."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.sampling.triton_greedy import find_greatest


@pytest.mark.parametrize("vocab_size", [1, 7, 4_096, 4_097, 32_000, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_first_of_the_greatest_logits_is_found(
    kernel_device: torch.device, vocab_size: int, dtype: torch.dtype
) -> None:
    """Few different numbers, so that many are equal."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 4, (9, vocab_size), generator=generator).to(dtype)
    logits[1] = torch.randn(vocab_size, generator=generator).to(dtype)
    logits[2] = -torch.inf
    logits[3, : vocab_size // 2] = -torch.inf
    expected = [row.index(max(row)) for row in logits.tolist()]
    found = find_greatest(logits.to(kernel_device))
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_rows_of_nan_give_a_token(kernel_device: torch.device) -> None:
    found = find_greatest(torch.full((2, 5_000), torch.nan, device=kernel_device))
    assert all(0 <= token < 5_000 for token in found.tolist())
