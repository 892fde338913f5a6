"""TorchAttention with a real KVCache, compared with dense attention over contiguous keys and values.

The reference rotates with the functions of transformers. It computes one sequence at a time in float32, with an
explicit mask, without blocks, padding or batches.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from services.attn_worker.backends.torch_attention import TorchAttention
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.spec import KVCacheSpec
from services.common.errors import CapacityError, ConfigError
from services.common.model_config import ModelConfig, load_model_config
from tests.support.plans import make_plan

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 128, 128
HEAD_DIM = 16
CPU = torch.device("cpu")
# In float32 only the order of sums differs. In half precision rotated q and k, probabilities and the output are
# each rounded to 8 (bfloat16) or 11 (float16) bits.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
    torch.float16: {"rtol": 2e-3, "atol": 4e-3},
}


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


class Harness:
    """A backend with its KV cache, and all unrotated q, k, v that were given to it."""

    def __init__(
        self,
        path: Path,
        heads: tuple[int, int] = (8, 2),
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        windows: tuple[int | None, ...] | None = None,
        **overrides: Any,
    ) -> None:
        num_heads, num_kv_heads = heads
        fields = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": MAX_MODEL_LEN,
            **overrides,
        }
        self.hf_config = AutoConfig.for_model(fields.pop("family", "llama"), **fields)
        self.hf_config.to_json_file(path / "config.json", use_diff=False)
        self.config: ModelConfig = load_model_config(path)
        self.dtype = dtype
        self.cache = KVCache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)
        self.spec = KVCacheSpec.of_model(self.config, cache_dtype or dtype, NUM_BLOCKS, BLOCK_SIZE)
        if windows is not None:
            self.spec = dataclasses.replace(self.spec, windows=windows)
        self.backend = TorchAttention(self.config, self.spec, dtype, CPU, MAX_MODEL_LEN)
        self.inputs: dict[int, torch.Tensor] = {}  # [num_layers, prompt and output, qkv_size]
        self.prompt_lens: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def open(self, seq_id: int, prompt_len: int, max_tokens: int = 40) -> None:
        """Opens a sequence with random activations. It shares no prefix with other sequences."""
        result = self.cache.open_sequence(seq_id, [seq_id] * prompt_len, prompt_len)
        assert result.num_cached_tokens == 0
        shape = (self.config.num_layers, prompt_len + max_tokens, self.config.qkv_size)
        self.inputs[seq_id] = torch.randn(shape).to(self.dtype)
        self.prompt_lens[seq_id], self.lengths[seq_id] = prompt_len, 0

    def step(self, *advances: tuple[int, int], fork: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """Runs `advances`, (seq_id, num_tokens), as one batch; returns each layer's output [total_tokens, attn_size].

        `fork`: (parent, child). The child begins at the parent's length; its later activations differ.
        """
        forks = []
        if fork is not None:
            parent, child = fork
            length = self.lengths[child] = self.lengths[parent]
            self.prompt_lens[child] = self.prompt_lens[parent]
            self.inputs[child] = torch.randn_like(self.inputs[parent])
            self.inputs[child][:, :length] = self.inputs[parent][:, :length]
            forks = [(parent, child, length)]
        entries = [(seq_id, n, self.lengths[seq_id]) for seq_id, n in advances]
        planned = self.cache.plan_step(make_plan(entries, forks=forks))
        assert planned.errors == {}
        self.backend.copy_blocks(planned.block_copies)
        self.backend.begin_step(planned.metadata)
        outputs = []
        for layer in range(self.config.num_layers):
            rows = [self.inputs[s][layer, self.lengths[s] : self.lengths[s] + n] for s, n in advances]
            qkv = torch.cat(rows)
            before = qkv.clone()
            out = torch.full((len(qkv), self.config.attn_size), torch.nan, dtype=self.dtype)
            self.backend.forward(layer, qkv, out)
            torch.testing.assert_close(qkv, before, rtol=0, atol=0, equal_nan=True)
            outputs.append(out)
        self.cache.commit_step()
        for seq_id, num_tokens in advances:
            self.lengths[seq_id] += num_tokens
        return outputs

    def check(self, *advances: tuple[int, int], fork: tuple[int, int] | None = None) -> None:
        """Runs a step and compares every row of every layer with the reference."""
        outputs = self.step(*advances, fork=fork)
        for layer, out in enumerate(outputs):
            assert out.dtype == self.dtype
            expected = [self.reference(seq_id, layer)[-n:] for seq_id, n in advances]
            torch.testing.assert_close(out.float(), torch.cat(expected), **TOLERANCES[self.dtype])

    def reference(self, seq_id: int, layer: int) -> torch.Tensor:
        """Attention outputs of all tokens so far, float32 [length, attn_size]."""
        config, length, prompt_len = self.config, self.lengths[seq_id], self.prompt_lens[seq_id]
        heads = self.inputs[seq_id][layer, :length].float().view(length, -1, config.head_dim).transpose(0, 1)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        q, k = self.rotate(q, k, length, prompt_len)
        if self.spec.dtype != self.dtype:  # rounded by the cache, after the rotation
            k, v = k.to(self.spec.dtype).float(), v.to(self.spec.dtype).float()
        group_size = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group_size, dim=0), v.repeat_interleave(group_size, dim=0)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        window = self.spec.windows[layer] or length
        scores = q @ k.transpose(1, 2) / config.head_dim**0.5
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, length: int, prompt_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates q and k by transformers, which computes the prompt in one call and every later token in its own."""
        module = LlamaRotaryEmbedding(self.hf_config)
        prompt_len = min(prompt_len, length) if "dynamic" not in module.rope_type else prompt_len
        calls = [torch.arange(prompt_len), *torch.arange(prompt_len, length)[:, None]]
        tables = [module(q, positions[None]) for positions in calls]
        cos, sin = (torch.cat(parts, dim=1)[:, :length] for parts in zip(*tables, strict=True))
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin)
        return q[0], k[0]


HEADS = {"MHA": (4, 4), "GQA": (8, 2), "MQA": (4, 1)}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_prefill_chunks_decodes_and_mixed_batches(
    tmp_path: Path, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    harness = Harness(tmp_path, heads, dtype)
    for seq_id, prompt_len in enumerate([5, 1, 23, 16, 40]):
        harness.open(seq_id, prompt_len)
    harness.check((0, 5), (2, 10))  # first chunks of different lengths
    harness.check((0, 1))  # one decode alone
    harness.check((1, 1), (2, 7), (0, 1), (3, 16), (4, 17))  # decodes between first and later chunks
    harness.check((4, 23), (2, 6), (3, 1))
    for _ in range(5):
        harness.check((0, 1), (1, 1), (2, 1), (3, 1), (4, 1))
    harness.check((3, 1), (1, 1))


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 16, 29, 30])
def test_any_chunk_size_gives_the_same_prompt(tmp_path: Path, chunk_size: int) -> None:
    harness = Harness(tmp_path)
    harness.open(0, 30)
    for start in range(0, 30, chunk_size):
        harness.check((0, min(chunk_size, 30 - start)))


@pytest.mark.parametrize("chunk_size", [3, 40])
def test_layers_with_and_without_a_sliding_window(tmp_path: Path, chunk_size: int) -> None:
    harness = Harness(
        tmp_path,
        family="qwen3",
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        num_hidden_layers=3,
    )
    assert harness.config.sliding_windows == (None, 6, 6)
    harness.open(0, 40)
    harness.open(1, 4)
    harness.check((1, 4))
    for start in range(0, 40, chunk_size):
        harness.check((0, min(chunk_size, 40 - start)), (1, 1))
    for _ in range(4):
        harness.check((0, 1), (1, 1))


ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {
        "short_factor": [1 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [2 + 0.3 * i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_scaled_rope_with_prompts_above_and_below_the_original_length(tmp_path: Path, rope_type: str) -> None:
    rope_parameters = {"rope_type": rope_type, "rope_theta": 10_000.0, **ROPES[rope_type]}
    harness = Harness(tmp_path, max_position_embeddings=32, rope_parameters=rope_parameters)
    harness.open(0, 50)
    harness.open(1, 12)
    harness.open(2, 30)
    harness.check((0, 50), (1, 12), (2, 30))
    for _ in range(25):  # sequences 1 and 2 grow past a maximum
        harness.check((0, 1), (1, 1), (2, 1))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_length_scaled_rope_does_not_depend_on_the_chunks_of_a_prompt(tmp_path: Path, rope_type: str) -> None:
    rope_parameters = {"rope_type": rope_type, "rope_theta": 10_000.0, **ROPES[rope_type]}
    harness = Harness(tmp_path, max_position_embeddings=32, rope_parameters=rope_parameters)
    whole = Harness(tmp_path, max_position_embeddings=32, rope_parameters=rope_parameters)
    for each in (harness, whole):
        each.open(0, 50)
        each.inputs[0] = harness.inputs[0]
    chunks = [harness.step((0, num_tokens)) for num_tokens in (10, 25, 15)]
    for layer, expected in enumerate(whole.step((0, 50))):
        actual = torch.cat([outputs[layer] for outputs in chunks])
        torch.testing.assert_close(actual, expected, **TOLERANCES[torch.float32])
    harness.check((0, 1))


def test_uneven_lengths_split_into_several_groups(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    prompt_lens = [3, 80, 4, 5, 2, 70, 3]
    for seq_id, prompt_len in enumerate(prompt_lens):
        harness.open(seq_id, prompt_len)
    harness.check(*enumerate(prompt_lens))
    harness.check(*((seq_id, 30 if seq_id == 2 else 1) for seq_id in range(len(prompt_lens))))


def test_a_prefix_computed_by_another_sequence_is_read(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.open(0, 12)
    harness.step((0, 12))
    result = harness.cache.open_sequence(1, [0] * 12, 12)
    assert result.num_cached_tokens == 8
    harness.inputs[1], harness.prompt_lens[1], harness.lengths[1] = harness.inputs[0], 12, 8
    harness.check((1, 4), (0, 1))


def test_bad_values_stay_in_the_rows_of_their_own_sequence(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.open(0, 6)
    harness.open(1, 7)
    harness.inputs[0][:, 2:] = torch.nan
    harness.inputs[0][:, 4:] = torch.inf
    outputs = harness.step((0, 6), (1, 7))
    for layer, out in enumerate(outputs):
        torch.testing.assert_close(out[6:], harness.reference(1, layer), **TOLERANCES[torch.float32])
    harness.cache.close_sequences([0])
    harness.open(2, 5)
    harness.check((1, 1), (2, 1))  # the rest of the block contains values of sequence 0
    harness.check((1, 1), (2, 4))


def test_rows_of_a_sequence_without_blocks_do_not_change_others(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.open(0, 6)
    planned = harness.cache.plan_step(make_plan([(77, 9, 0), (0, 6, 0), (78, 1, 3)]))
    assert sorted(planned.errors) == [77, 78]
    harness.backend.begin_step(planned.metadata)
    harness.lengths[0] = 6
    for layer in range(harness.config.num_layers):
        junk = torch.full((9, harness.config.qkv_size), torch.nan)
        out = torch.empty(16, harness.config.attn_size)
        harness.backend.forward(layer, torch.cat([junk, harness.inputs[0][layer, :6], junk[:1]]), out)
        torch.testing.assert_close(out[9:15], harness.reference(0, layer), **TOLERANCES[torch.float32])
    harness.cache.commit_step()
    harness.check((0, 1))


@pytest.mark.parametrize("length", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1, 1])
def test_a_fork_shares_full_blocks_and_copies_the_last_one(tmp_path: Path, length: int) -> None:
    harness = Harness(tmp_path)
    harness.open(0, length)
    harness.check((0, length))
    num_used = harness.cache.num_used_blocks
    harness.check((0, 1), (1, 1), fork=(0, 1))
    has_part = length % BLOCK_SIZE > 0
    assert harness.cache.num_used_blocks - num_used == (1 if has_part else 2), "one new block per sequence in need"
    for _ in range(BLOCK_SIZE + 1):
        harness.check((1, 1), (0, 1))
    harness.check((2, 3), (0, 1), fork=(1, 2))
    harness.cache.close_sequences([0, 1])
    harness.check((2, BLOCK_SIZE))
    harness.cache.check_integrity()


def test_a_step_without_rows_works(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.backend.begin_step(harness.cache.plan_step(make_plan([])).metadata)
    config = harness.config
    harness.backend.forward(0, torch.empty(0, config.qkv_size), torch.empty(0, config.attn_size))


@pytest.mark.parametrize("windows", [(1, None), (7, 3), (BLOCK_SIZE, MAX_MODEL_LEN)], ids=str)
def test_the_windows_of_the_cache_spec_are_used(tmp_path: Path, windows: tuple[int | None, ...]) -> None:
    harness = Harness(tmp_path, windows=windows)
    assert harness.config.sliding_windows == (None, None)
    harness.open(0, 20)
    harness.open(1, 5)
    harness.check((0, 13), (1, 2))
    harness.check((1, 3), (0, 7))
    for _ in range(4):
        harness.check((0, 1), (1, 1))


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16])
def test_a_cache_may_store_another_dtype_than_the_model_computes_in(tmp_path: Path, cache_dtype: torch.dtype) -> None:
    harness = Harness(tmp_path, cache_dtype=cache_dtype)
    # A cache that stores float32 would differ by more than this; a key rounded to the next number differs by less.
    tolerance = {"rtol": 0, "atol": torch.finfo(cache_dtype).eps / 5}
    harness.open(0, 9)
    harness.open(1, 5)
    for advances in [((0, 9), (1, 5)), ((0, 1), (1, 2)), ((1, 1), (0, 1))]:
        for layer, out in enumerate(harness.step(*advances)):
            expected = torch.cat([harness.reference(seq_id, layer)[-n:] for seq_id, n in advances])
            torch.testing.assert_close(out, expected, **tolerance)


def test_numbers_beyond_the_dtype_of_the_cache_do_not_change_other_sequences(tmp_path: Path) -> None:
    harness = Harness(tmp_path, cache_dtype=torch.float16)
    harness.open(0, 6)
    harness.inputs[0] *= 1e30
    assert all(out.isfinite().all() for out in harness.step((0, 6)))
    harness.cache.close_sequences([0])
    harness.open(1, 5)  # the rest of its block contains values of sequence 0
    for layer, out in enumerate(harness.step((1, 5))):
        torch.testing.assert_close(out, harness.reference(1, layer), rtol=0, atol=2e-4)


def test_a_cache_dtype_without_arithmetic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this KV cache is torch\.int8"):
        Harness(tmp_path, cache_dtype=torch.int8)


def test_the_error_for_a_cache_that_does_not_fit_names_its_size(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    spec = dataclasses.replace(harness.spec, num_blocks=10**13)
    with pytest.raises(CapacityError, match=f"{10**13 + 1} KV blocks need {(10**13 + 1) * 2048} bytes"):
        TorchAttention(harness.config, spec, torch.float32, CPU, MAX_MODEL_LEN)
