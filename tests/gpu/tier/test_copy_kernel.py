"""The kernel that copies blocks and sums them up against plain indexing and sums of Python's integers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from services.attn_worker.cache.tiers.triton_copies import copy_blocks

NUM_LAYERS, NUM_BLOCKS, IDS = 3, 6, [4, 0, 5, 2]


@pytest.mark.parametrize("num_words", [1, 96, 5000])
@pytest.mark.parametrize("to_rows", [True, False])
def test_blocks_are_copied_and_summed_up(num_words: int, to_rows: bool, kernel_device: torch.device) -> None:
    blocks = torch.randint(-(2**63), 2**63 - 1, (NUM_LAYERS, NUM_BLOCKS, num_words))
    weights = torch.randint(-(2**63), 2**63 - 1, (NUM_LAYERS * num_words,)) | 1
    room = torch.randint(-(2**63), 2**63 - 1, (len(IDS), NUM_LAYERS * num_words + 7))  # with words of another tensor
    before, on_device = room.clone(), room.to(kernel_device)
    expected = blocks.clone()
    if to_rows:
        room[:, 3:-4] = blocks[:, IDS].transpose(0, 1).flatten(1)
    else:
        expected[:, IDS] = room[:, 3:-4].unflatten(1, (NUM_LAYERS, num_words)).transpose(0, 1)
    found, checksums = blocks.to(kernel_device), torch.arange(len(IDS), device=kernel_device)
    rows = on_device[:, 3:-4].unflatten(1, (NUM_LAYERS, num_words))
    ids = torch.tensor(IDS, device=kernel_device)
    copy_blocks(found, ids, rows, weights.to(kernel_device), checksums, to_rows=to_rows)
    assert torch.equal(found.cpu(), expected) and torch.equal(on_device.cpu(), room)
    assert torch.equal(before, room) is not to_rows
    for row, (words, checksum) in enumerate(zip(room[:, 3:-4].tolist(), checksums.tolist(), strict=True)):
        total = row + sum(word * weight for word, weight in zip(words, weights.tolist(), strict=True))
        assert (total - checksum) % 2**64 == 0
