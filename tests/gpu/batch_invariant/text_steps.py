"""Texts whose attention is computed in any steps, and compared to the last bit with that of each text alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import build_step_metadata
from services.attn_worker.layers import BackendSetup
from services.common.attention.learned import Learned
from services.common.model_config import ModelConfig
from tests.gpu.attention_pair import MAX_MODEL_LEN, NUM_BLOCKS, Kernels

BLOCK_SIZE = 16


@dataclass
class _Running:
    qkv: torch.Tensor
    blocks: list[int]
    length: int = 0


class TextSteps:
    """A backend, and sequences that compute given rows of qkv, each in blocks at random places."""

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, seed: int) -> None:
        self.config, self.kernels, self.dtype = config, kernels, dtype
        spec = KVCacheSpec.of_model(config, dtype, NUM_BLOCKS, BLOCK_SIZE)
        self.backend = kernels.make(BackendSetup(config, spec, dtype, kernels.device, MAX_MODEL_LEN, 300, 4096))
        if config.attention.has_sinks:
            sinks = torch.linspace(-1, 2, config.num_layers * config.num_heads)
            self.backend.use_learned(Learned(sinks=sinks.view(-1, config.num_heads).tolist()))
        self._free = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
        self._running: dict[str, _Running] = {}

    def open(self, name: str, qkv: torch.Tensor, prefix_of: str | None = None, num_cached: int = 0) -> None:
        """Begins a text, [num_tokens, qkv_size]; its first whole blocks may be those of another one."""
        shared = [] if prefix_of is None else self._running[prefix_of].blocks[: num_cached // BLOCK_SIZE]
        num_own = -(-len(qkv) // BLOCK_SIZE) - len(shared)
        self._running[name] = _Running(qkv, [*shared, *(self._free.pop() for _ in range(num_own))], num_cached)

    def has_room(self, num_tokens: int) -> bool:
        """Whether there are blocks for a text of this length."""
        return len(self._free) * BLOCK_SIZE >= num_tokens

    def close(self, name: str) -> None:
        """Ends a text that shares no blocks."""
        self._free += self._running.pop(name).blocks

    def length(self, name: str) -> int:
        return self._running[name].length

    @torch.inference_mode()
    def step(self, counts: dict[str, int], num_padding: int = 0, num_dropped: int = 0) -> dict[str, torch.Tensor]:
        """The last layer's output of each text's next rows; `num_dropped` blocks of each table are missing."""
        running = [self._running[name] for name in counts]
        num_tokens = np.array(list(counts.values()), np.int64)
        starts = np.array([each.length for each in running], np.int64)
        width = max(len(each.blocks) for each in running)
        tables = np.full((len(running), width), NUM_BLOCKS, np.int32)
        for row, each in zip(tables, running, strict=True):
            row[: len(each.blocks) - num_dropped] = each.blocks[num_dropped:]
        dropped = np.full(len(running), num_dropped * BLOCK_SIZE, np.int64)
        step = build_step_metadata(num_tokens, starts, starts * 0, tables, BLOCK_SIZE, dropped)
        rows = [each.qkv[each.length : each.length + count] for each, count in zip(running, num_tokens, strict=True)]
        padding = torch.zeros(num_padding, self.config.qkv_size, dtype=self.dtype, device=self.kernels.device)
        qkv = torch.cat([*rows, padding])
        out = torch.full((len(qkv), self.config.attn_size), float("nan"), dtype=self.dtype, device=qkv.device)
        self.backend.begin_step(step, len(qkv) if num_padding else None)
        outputs = []
        for layer in range(self.config.num_layers):
            self.backend.forward(layer, qkv, out)
            outputs.append(out[: int(num_tokens.sum())].clone())
        joined = torch.cat(outputs, dim=1)
        for each, count in zip(running, num_tokens, strict=True):
            each.length += int(count)
        return dict(zip(counts, joined.split(num_tokens.tolist()), strict=True))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of 16 bits are equal, NaN included."""
    return torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))
