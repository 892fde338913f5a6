"""Rows that are copied to the regions of several attention workers, and back, by a table of addresses."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("width", [5, 2500])
def test_each_row_goes_to_its_owner_and_comes_back(width: int, kernel_device: torch.device) -> None:
    from services.dense_worker.attention_workers.triton_rows import copy_rows  # needs Triton

    own = torch.randn(6, width, device=kernel_device)
    regions = {1: torch.zeros(8, width, device=kernel_device), 3: torch.zeros(8, width, device=kernel_device)}
    table = torch.zeros(4, 6, dtype=torch.int64, device=kernel_device)
    for slot, region in regions.items():
        table[slot, 2] = region.data_ptr()
    owners = torch.tensor([1, 3, 1, -1, 3, 1], dtype=torch.int32, device=kernel_device)
    places = torch.tensor([0, 0, 1, 0, 1, 2], dtype=torch.int32, device=kernel_device)
    copy_rows(own, table, owners, places, 2, gives=True)
    assert torch.equal(regions[1][:3], own[[0, 2, 5]]) and torch.equal(regions[3][:2], own[[1, 4]])
    assert not regions[1][3:].any() and not regions[3][2:].any()
    back = torch.zeros_like(own)
    copy_rows(back, table, owners, places, 2, gives=False)
    assert torch.equal(back, torch.where((owners >= 0)[:, None], own, 0.0))
