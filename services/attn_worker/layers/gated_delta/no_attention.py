"""`NoAttention`: stands for the layers with attention in a model that has none, such as Mamba 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.kv_cache.scales import KVScales


class NoAttention:
    """An AttentionBackend without layers. Blocks hold nothing: they only count the tokens of sequences."""

    layers_to_compile: Sequence[int] = ()

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        """spec: without layers"""
        self.storage = BlockStorage(spec, spec.token_major_block, device)

    def use_scales(self, scales: KVScales) -> None:
        """There is nothing to scale."""

    def begin_step(self, step: StepMetadata, padded_num_rows: int | None = None) -> None:
        """There is nothing to prepare."""

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> NoReturn:
        """Is never called."""
        raise AssertionError("the model has no layer with attention")
