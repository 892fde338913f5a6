"""`BlockStaging`: room in host memory for a few blocks on their way, and the copier between it and the KV cache."""

from __future__ import annotations

import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.tiers.block_copier import BlockCopier, CpuBlockCopier, max_blocks

STAGING_BYTES = 4 * 2**20  # or those of one block


class BlockStaging:
    """For one thread, which makes it when the first sequence moves, since most workers never move any."""

    def __init__(self, storage: BlockStorage, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        if device.type != "cpu":
            torch.cuda.set_device(device)  # for its thread, which would otherwise use the first GPU
        self.num_blocks = max_blocks(storage, staging_bytes)
        self.block_bytes = 8 * storage.block_words
        is_on_gpu = device.type != "cpu"
        rows = torch.zeros(self.num_blocks, storage.block_words, dtype=torch.int64, pin_memory=is_on_gpu)
        self.bytes = memoryview(rows.numpy()).cast("B")  # of the blocks, one after the other
        self.copier = _make_copier(storage, rows, device, staging_bytes)


def _make_copier(
    storage: BlockStorage, rows: torch.Tensor, device: torch.device, staging_bytes: int
) -> BlockCopier:
    if device.type == "cpu":
        return CpuBlockCopier(storage, rows, staging_bytes)
    from services.attn_worker.cache.tiers.cuda_block_copier import CudaBlockCopier

    return CudaBlockCopier(storage, rows, device, are_pinned=True, staging_bytes=staging_bytes)
