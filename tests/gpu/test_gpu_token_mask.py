"""The kernel that masks tokens against its reference: every logit is equal, in the rows that it is given."""

from __future__ import annotations

import pytest
import torch

from services.dense_worker.features.grammar.grammar_mask import FLOOR, apply_masks

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.features.grammar import triton_token_mask


@pytest.mark.parametrize("vocab_size", [1, 32, 4_095, 4_096, 32_000, 128_256])
def test_logits_equal_those_of_the_reference(kernel_device: torch.device, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, generator=generator)
    logits[2, ::5] = -torch.inf
    logits[3, ::7] = -1e30
    rows = torch.tensor([0, 2, 3, 6])
    num_words = -(-vocab_size // 32) + 2
    masks = torch.randint(-(2**31), 2**31, (len(rows), num_words), generator=generator).to(torch.int32)
    found, expected = logits.to(kernel_device), logits.clone()
    triton_token_mask.apply_masks(found, rows.to(kernel_device), masks.to(kernel_device), FLOOR)
    apply_masks(expected, rows, masks, FLOOR)
    assert torch.equal(found.cpu(), expected)
