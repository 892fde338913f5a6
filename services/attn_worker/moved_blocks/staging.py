"""`BlockStaging`: room in memory for a few blocks on their way, and the copier between it and the KV cache."""

from __future__ import annotations

import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.tiers.block_copier import CpuBlockCopier, max_blocks

STAGING_BYTES = 4 * 2**20  # or those of one block


class BlockStaging:
    """For one thread, which makes it when the first sequence moves, since most workers never move any."""

    def __init__(self, storage: BlockStorage, staging_bytes: int = STAGING_BYTES) -> None:
        self.num_blocks = max_blocks(storage, staging_bytes)
        self.block_bytes = 8 * storage.block_words
        rows = torch.zeros(self.num_blocks, storage.block_words, dtype=torch.int64)
        self.bytes = memoryview(rows.numpy()).cast("B")  # of the blocks, one after the other
        self.copier = CpuBlockCopier(storage, rows, staging_bytes)
