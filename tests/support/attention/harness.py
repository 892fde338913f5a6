"""TorchAttention with a real KVCache, compared with dense attention over contiguous keys and values.

The reference rotates with the functions of transformers. It computes one sequence at a time, in float64 after the
rotation, with an explicit mask, without blocks, padding or batches. Keys and values are rounded as the cache stores
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from services.attn_worker.cache.build_cache import WindowBlocks, build_cache
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.common.attention.learned import Learned
from services.common.kv_cache.scales import KVScales
from services.common.model_config import ModelConfig, load_model_config
from tests.support.attention.open_now import open_sequence
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


class Harness:
    """A backend with its KV cache, and all unrotated q, k, v that were given to it."""

    def __init__(
        self,
        path: Path,
        heads: tuple[int, int] = (8, 2),
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        windows: tuple[int | None, ...] | None = None,
        num_sink_tokens: int = 0,
        exceptions: Mapping[int, torch.dtype] | None = None,
        scales: KVScales | None = None,
        sinks: torch.Tensor | None = None,  # learned ones, [num_layers, num_heads]
        window_blocks: WindowBlocks | None = None,
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
        self.sinks = sinks
        options = dataclasses.replace(self.config.attention, has_sinks=sinks is not None)
        self.config = dataclasses.replace(self.config, attention=options)
        attention = dataclasses.replace(self.config.attention, num_sink_tokens=num_sink_tokens)
        self.config = dataclasses.replace(self.config, attention=attention)
        self.dtype = dtype
        self.spec = KVCacheSpec.of_model(self.config, cache_dtype or dtype, NUM_BLOCKS, BLOCK_SIZE)
        self.spec = dataclasses.replace(self.spec, exceptions=exceptions or {})
        if windows is not None:
            self.spec = dataclasses.replace(self.spec, windows=windows)
        kept = {"window": self.spec.window, "num_sink_tokens": num_sink_tokens}
        self.spec = dataclasses.replace(self.spec, window_blocks=window_blocks)
        self.cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, **kept, window_blocks=window_blocks)
        self.backend = TorchAttention(BackendSetup(self.config, self.spec, dtype, CPU, MAX_MODEL_LEN))
        self.scales = scales or KVScales.ones(self.config.num_layers)
        self.backend.use_learned(Learned(self.scales, () if sinks is None else sinks.tolist()))
        self.inputs: dict[int, torch.Tensor] = {}  # [num_layers, prompt and output, qkv_size]
        self.prompt_lens: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def open(self, seq_id: int, prompt_len: int, max_tokens: int = 40) -> None:
        """Opens a sequence with random activations. It shares no prefix with other sequences."""
        result = open_sequence(self.cache, seq_id, [seq_id] * prompt_len, prompt_len)
        assert result.num_cached_tokens == 0
        self.inputs[seq_id] = self.draw(prompt_len + max_tokens, prompt_len)
        self.prompt_lens[seq_id], self.lengths[seq_id] = prompt_len, 0

    def draw(self, num_tokens: int, prompt_len: int) -> torch.Tensor:
        """Random activations of a sequence, [num_layers, num_tokens, qkv_size].

        Every key and value is so far from a tie between two numbers of the cache's format that another order of
        operations in the rotation cannot round it to the other one.
        """
        drawn = torch.randn(self.config.num_layers, num_tokens, self.config.qkv_size).to(self.dtype)
        for layer, rows in enumerate(drawn):
            while (near := self.is_near_tie(rows, layer, prompt_len)).any():
                rows[near] = torch.randn(int(near.sum()), self.config.qkv_size).to(self.dtype)
        return drawn

    def is_near_tie(self, rows: torch.Tensor, layer: int, prompt_len: int) -> torch.Tensor:
        """Of which rows [num_tokens, qkv_size] a millionth more or less changes what the cache stores, bool."""
        near = torch.zeros(len(rows), dtype=torch.bool)
        if self.spec.dtype_of(layer) == self.dtype:
            return near
        _, k, v = self.rotated_heads(rows, prompt_len)
        for heads, scales in ((k, self.scales.keys), (v, self.scales.values)):
            margin = 1e-6 * heads.abs().amax(-1, keepdim=True).double()
            low, high = (self.stored(heads.double() + sign * margin, layer, scales) for sign in (-1, 1))
            near |= ((high - low).abs() > 3 * margin).any(-1).any(0)
        return near

    def step(self, *advances: tuple[int, int], fork: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """Runs `advances`, (seq_id, num_tokens), as one batch; returns each layer's output [total_tokens, attn_size].

        `fork`: (parent, child). The child begins at the parent's length; its later activations differ.
        """
        forks = []
        if fork is not None:
            parent, child = fork
            length = self.lengths[child] = self.lengths[parent]
            self.prompt_lens[child] = self.prompt_lens[parent]
            own = self.draw(self.inputs[parent].shape[1], self.prompt_lens[child])
            self.inputs[child] = torch.cat((self.inputs[parent][:, :length], own[:, length:]), dim=1)
            forks = [(parent, child, length)]
        entries = [(seq_id, n, self.lengths[seq_id]) for seq_id, n in advances]
        planned = self.cache.plan_step(dataclasses.replace(make_plan(entries, forks=forks), evicts_blocks=True))
        assert planned.errors == {}
        self.backend.storage.copy_blocks(planned.block_copies)
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

    def reference(self, seq_id: int, layer: int, *, is_exact: bool = False) -> torch.Tensor:
        """Attention outputs of all tokens so far, float32 [length, attn_size]; `is_exact`: nothing is rounded."""
        config, length = self.config, self.lengths[seq_id]
        q, k, v = self.rotated_heads(self.inputs[seq_id][layer, :length], self.prompt_lens[seq_id])
        if not is_exact:  # rounded by the cache, after the rotation
            k, v = self.stored(k, layer, self.scales.keys), self.stored(v, layer, self.scales.values)
        q, k, v = q.double(), k.double(), v.double()
        group_size = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group_size, dim=0), v.repeat_interleave(group_size, dim=0)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        window = self.spec.windows[layer] or length
        scores = q @ k.transpose(1, 2) / config.head_dim**0.5
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        if self.sinks is not None:  # a last column, whose weight goes to no value
            column = self.sinks[layer].double()[:, None, None].expand(-1, length, 1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(length, -1).float()

    def rotated_heads(self, rows: torch.Tensor, prompt_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q and k, and v, of the first tokens of a sequence, float32 [heads, tokens, head_dim] each."""
        config, length = self.config, len(rows)
        heads = rows.float().view(length, -1, config.head_dim).transpose(0, 1)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        return *self.rotate(q, k, length, prompt_len), v

    def stored(self, heads: torch.Tensor, layer: int, scales: tuple[float, ...]) -> torch.Tensor:
        """Keys or values as the cache gives them back, float64 [num_kv_heads, length, head_dim]."""
        dtype, heads = self.spec.dtype_of(layer), heads.double()
        if dtype == torch.float8_e4m3fn:
            return (heads / scales[layer]).clamp(-448, 448).to(dtype).double() * scales[layer]
        if dtype == torch.int8:
            scale = heads.abs().amax(-1, keepdim=True) / 127
            return torch.where(scale > 0, (heads / scale).round() * scale, 0)
        return heads if dtype == self.dtype else heads.to(dtype).double()

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
