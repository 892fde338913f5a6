"""The kernel that masks tokens against its reference: every logit is equal, in the rows that it is given."""

from __future__ import annotations

import itertools

import pytest
import torch

from services.dense_worker.features.grammar.grammar_mask import FLOOR, apply_masks

pytest.importorskip("triton", reason="needs triton")

from services.common.compile_kernels import compiling_together
from services.dense_worker.features.grammar import triton_token_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 32, 4_095, 4_096, 32_000, 128_256])
def test_logits_equal_those_of_the_reference(kernel_device: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits, floor = torch.randn(7, vocab_size, generator=generator).to(dtype), max(FLOOR, torch.finfo(dtype).min)
    logits[2, ::5] = -torch.inf
    logits[3, ::7] = torch.finfo(dtype).min
    rows = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    num_words = -(-vocab_size // 32) + 2
    masks = torch.randint(-(2**31), 2**31, (len(rows), num_words), generator=generator).to(torch.int32)
    if kernel_device.type == "cuda":
        rows, masks = rows.pin_memory(), masks.pin_memory()  # as the runner gives them
    found, expected = logits.to(kernel_device), logits.clone()
    triton_token_mask.apply_masks(found, rows, masks, floor)
    apply_masks(expected, rows, masks, floor)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_first_form_launches_the_kernel_that_was_loaded_ahead(kernel_device: torch.device) -> None:
    dtypes = torch.float32, torch.bfloat16
    with compiling_together():
        triton_token_mask.compile_kernels(32_000, kernel_device, dtypes)
    device = torch.cuda.current_device()
    loaded = dict(triton_token_mask._mask_kernel.device_caches[device][0])
    for num_rows, num_words, dtype in itertools.product((1, 2, 33), (1_000, 1_003), dtypes):
        packed = torch.zeros(num_rows * (num_words + 1), dtype=torch.int32, pin_memory=True)
        masks, rows = packed[:-num_rows].view(num_rows, num_words), packed[-num_rows:]
        triton_token_mask.apply_masks(torch.zeros(40, 32_000, dtype=dtype, device=kernel_device), rows, masks, FLOOR)
    assert dict(triton_token_mask._mask_kernel.device_caches[device][0]) == loaded
