"""The Triton kernels between two steps: tokens are kept for the next step and for the host, and rows are fed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from services.common.compile_kernels import compiling_together
from services.dense_worker.sampling import triton_tokens
from services.dense_worker.sampling.triton_tokens import feed_tokens, keep_tokens


@pytest.mark.parametrize("num_rows", [1, 16, 128, 300])
def test_each_rows_token_is_kept_in_its_slot_and_on_the_host(kernel_device: torch.device, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    slots = torch.randperm(500, generator=generator)[:num_rows]
    token_ids = torch.randint(1 << 40, (num_rows,), generator=generator)
    last_token = torch.arange(501)
    expected = last_token.clone()
    for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
        expected[slot] = token_id
    on_device = last_token.to(kernel_device)
    on_host = torch.full((num_rows + 1,), -7, pin_memory=kernel_device.type == "cuda")
    keep_tokens(token_ids.to(kernel_device), slots.to(kernel_device), on_device, on_host[:num_rows])
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    assert on_device.tolist() == expected.tolist()
    assert on_host.tolist() == [*token_ids.tolist(), -7]


@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_rows_with_a_slot_are_fed_with_its_token_and_others_keep_theirs(
    kernel_device: torch.device, num_rows: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    last_token = torch.randint(1, 32_000, (501,), generator=generator)
    fed_slots = torch.randint(-1, 500, (num_rows,), generator=generator)
    fed_slots[::3] = -1
    token_ids = torch.where(fed_slots < 0, torch.randint(32_000, (num_rows,), generator=generator), 5)
    rows = zip(token_ids.tolist(), fed_slots.tolist(), strict=True)
    expected = [token_id if slot < 0 else last_token[slot].item() for token_id, slot in rows]
    found = feed_tokens(*(each.to(kernel_device) for each in (token_ids, fed_slots, last_token)))
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_launch_the_kernels_that_were_loaded_ahead(kernel_device: torch.device) -> None:
    kernels = triton_tokens._keep_kernel, triton_tokens._feed_kernel
    with compiling_together():
        triton_tokens.compile_kernels(kernel_device)
    device = torch.cuda.current_device()
    loaded = [dict(kernel.device_caches[device][0]) for kernel in kernels]
    last_token, on_host = torch.zeros(65, dtype=torch.int64, device=kernel_device), torch.zeros(64, dtype=torch.int64)
    for num_rows in (1, 2, 33):
        token_ids, fed_slots = torch.zeros(2, num_rows, dtype=torch.int64, device=kernel_device)  # at any 8 bytes
        keep_tokens(token_ids, token_ids, last_token, on_host.pin_memory()[:num_rows])
        feed_tokens(token_ids, fed_slots, last_token)
    assert [dict(kernel.device_caches[device][0]) for kernel in kernels] == loaded
