"""Values that are a part of their keys, in TorchAttention: as by attention whose values are copies of the keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from tests.support.attention.harness import BLOCK_SIZE, CPU, HEAD_DIM, MAX_MODEL_LEN, NUM_BLOCKS, Harness

ROTARY_DIM = 4
VALUE_DIM = HEAD_DIM - ROTARY_DIM


class LatentHarness(Harness):
    """One kv head, of which the first dimensions are rotated; the others are the values, if `is_latent`."""

    def __init__(self, path: Path, is_latent: bool, window: int | None, **options: Any) -> None:
        super().__init__(path, heads=(4, 1), windows=(window, window), **options)
        attention = replace(self.config.attention, scale=0.3, value_dim=VALUE_DIM if is_latent else None)
        rope = replace(self.config.rope, rotary_dim=ROTARY_DIM)
        self.config = replace(self.config, attention=attention, rope=rope, sliding_windows=(window, window))
        self.spec = KVCacheSpec.of_model(self.config, torch.float32, NUM_BLOCKS, BLOCK_SIZE)
        self.backend = TorchAttention(BackendSetup(self.config, self.spec, torch.float32, CPU, MAX_MODEL_LEN))


@pytest.mark.parametrize(("window", "num_sink_tokens"), [(None, 0), (7, 0), (9, 3)])
def test_values_in_keys(tmp_path: Path, window: int | None, num_sink_tokens: int) -> None:
    """Prompts in chunks, single tokens; the whole text, a window, and StreamingLLM beyond its window."""
    latent, plain = (LatentHarness(tmp_path, each, window, num_sink_tokens=num_sink_tokens) for each in (True, False))
    assert latent.spec.token_bytes * 2 == plain.spec.token_bytes
    for harness in (latent, plain):
        torch.manual_seed(0)
        harness.open(1, 30)
        harness.open(2, 5)
    for seq_id in (1, 2):
        keys = latent.inputs[seq_id][..., -HEAD_DIM:]
        plain.inputs[seq_id] = torch.cat([latent.inputs[seq_id], keys], dim=-1)
    for advances in (((1, 13),), ((1, 17), (2, 5)), ((2, 1), (1, 1)), ((1, 2), (2, 1)), ((1, 1),)):
        for found, expected in zip(latent.step(*advances), plain.step(*advances), strict=True):
            heads = expected.unflatten(1, (4, HEAD_DIM))[..., -VALUE_DIM:]
            torch.testing.assert_close(found, heads.flatten(1), rtol=1e-6, atol=1e-6)
    latent.cache.check_integrity()
