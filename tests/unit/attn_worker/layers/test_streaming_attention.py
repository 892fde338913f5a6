"""TorchAttention with sinks equals StreamingLLM as the paper describes it, far beyond the trained length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.common.attention.rope import UnboundedRotaryEmbedding
from tests.support.attention.harness import BLOCK_SIZE, Harness
from tests.support.attention.streaming import streaming_attention


class StreamingHarness(Harness):
    """All layers with the same sinks and window."""

    def __init__(self, path: Path, num_sink_tokens: int, window: int, **options: Any) -> None:
        super().__init__(path, windows=(window, window), num_sink_tokens=num_sink_tokens, **options)
        self.num_sink_tokens, self.window = num_sink_tokens, window
        self.expected: dict[tuple[int, int], torch.Tensor] = {}  # by sequence and layer: a past does not change

    def reference(self, seq_id: int, layer: int, *, is_exact: bool = False) -> torch.Tensor:
        config, length = self.config, self.lengths[seq_id]
        heads = self.inputs[seq_id][layer, :length].float().view(length, -1, config.head_dim).transpose(0, 1)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        rotary = LlamaRotaryEmbedding(self.hf_config)
        known = self.expected.get((seq_id, layer), torch.empty(0, config.attn_size))
        new = streaming_attention(q, k, v, rotary, self.num_sink_tokens, self.window, first=len(known))
        self.expected[seq_id, layer] = torch.cat((known, new.float()))
        return self.expected[seq_id, layer]


@pytest.mark.parametrize(("num_sink_tokens", "window"), [(1, 4), (4, 5), (4, 17), (6, 9), (9, 9)])
@pytest.mark.parametrize("chunk_size", [1, 7, 30])
def test_prompts_and_single_tokens_equal_the_paper(
    tmp_path: Path, num_sink_tokens: int, window: int, chunk_size: int
) -> None:
    harness = StreamingHarness(tmp_path, num_sink_tokens, window)
    harness.open(1, 60)
    for start in range(0, 60, chunk_size):
        harness.check((1, min(chunk_size, 60 - start)))
    for _ in range(10):
        harness.check((1, 1))
    harness.cache.check_integrity()


def test_the_number_of_blocks_stays_the_same(tmp_path: Path) -> None:
    harness = StreamingHarness(tmp_path, num_sink_tokens=4, window=8)
    harness.open(1, 3, max_tokens=120)
    harness.check((1, 3))
    most = 0
    for _ in range(110):
        harness.step((1, 1))
        most = max(most, harness.cache.num_used_blocks)
    assert most <= 1 + 8 // BLOCK_SIZE + 2, "a block of sinks, the window, and two more"
    harness.check((1, 1))


def test_sequences_of_all_lengths_share_a_step_and_forks_go_on(tmp_path: Path) -> None:
    harness = StreamingHarness(tmp_path, num_sink_tokens=5, window=11)
    for seq_id, prompt_len in ((1, 70), (2, 9), (3, 31)):
        harness.open(seq_id, prompt_len)
    harness.check((1, 40), (2, 9), (3, 3))
    harness.check((2, 1), (1, 30), (3, 28))
    harness.check((1, 1), (4, 1), (2, 1), fork=(1, 4))
    for _ in range(5):
        harness.check((1, 1), (2, 1), (3, 1), (4, 1))


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_scaled_rotations_are_counted_by_places_too(tmp_path: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    harness = StreamingHarness(tmp_path, num_sink_tokens=4, window=12, rope_parameters=rope)
    assert harness.config.rope.rope_type == rope_type
    harness.open(1, 50)
    harness.check((1, 45))
    harness.check((1, 1))


def test_positions_far_beyond_float32_cost_no_precision(tmp_path: Path) -> None:
    harness = StreamingHarness(tmp_path, num_sink_tokens=1, window=8)
    embedding = UnboundedRotaryEmbedding(harness.config.rope, torch.device("cpu"))
    zeros = torch.zeros(2, dtype=torch.int64)
    near = embedding(torch.tensor([100, 107]), zeros)
    far = embedding(torch.tensor([30_000_001, 30_000_008]), zeros)
    turns = [torch.atan2(sin, cos).diff(dim=0).remainder(2 * torch.pi) for cos, sin in (near, far)]
    torch.testing.assert_close(turns[1].cos(), turns[0].cos(), rtol=0, atol=2e-6)
    torch.testing.assert_close(turns[1].sin(), turns[0].sin(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [(torch.int8, 0.03), (torch.float8_e4m3fn, 0.12)])
def test_a_quantized_cache_rounds_and_nothing_more(
    tmp_path: Path, cache_dtype: torch.dtype, tolerance: float
) -> None:
    harness = StreamingHarness(tmp_path, num_sink_tokens=4, window=9, cache_dtype=cache_dtype)
    harness.open(1, 40)
    outputs = harness.step((1, 40))
    for layer, out in enumerate(outputs):
        expected = harness.reference(1, layer)
        assert (out - expected).norm() / expected.norm() < tolerance
