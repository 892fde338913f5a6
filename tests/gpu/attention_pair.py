"""Kernels and the torch reference, which run the same random steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.attn_worker.layers import DECODE_ONLY, BackendSetup, CapturableAttention, StepShape
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.channel import rows_of_layer
from services.common.attention.learned import Learned
from services.common.kv_cache.scales import KVScales
from services.common.model_config import ModelConfig, RopeConfig

# ‖out − reference‖ / ‖reference‖. The reference is float32 throughout; a lower precision rounds rotated
# queries, cached keys and values, attention weights and the output once each, to 2^-9 (bfloat16) or 2^-12.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MAX_MODEL_LEN = 4096
NUM_BLOCKS = 400


@dataclass(frozen=True)
class Kernels:
    """A backend under test."""

    make: Callable[[BackendSetup], CapturableAttention]
    device: torch.device
    dtype: torch.dtype  # the most precise one that it supports

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]


def make_config(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    windows: tuple[int | None, ...] = (None,),
    rope: RopeConfig | None = None,
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=1,
        hidden_size=num_heads * head_dim,
        intermediate_size=1,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=windows,
        max_position_embeddings=MAX_MODEL_LEN,
        rope=rope or RopeConfig("default", 10000.0, head_dim, MAX_MODEL_LEN),
        eos_token_ids=(),
        checkpoint_dtype="float32",
    )


@dataclass
class Sequence:
    blocks: list[int]
    num_computed: int = 0
    num_prompt: int = 0


class Pair:
    """The reference and the kernels run the same random steps."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype | None = None,
        block_size: int = 16,
        seed: int = 0,
        cache_dtype: torch.dtype | None = None,  # of 8 bits, for both; None: the reference has float32
        exceptions: tuple[int, ...] = (),  # layers that have the kernels' dtype all the same
        scales: KVScales | None = None,
    ) -> None:
        device, dtype = kernels.device, dtype or kernels.dtype
        if device.type == "cpu" and dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
        self.config, self.dtype, self.device, self.block_size = config, dtype, device, block_size
        self.cache_dtype = cache_dtype
        exact, spec = (
            dataclasses.replace(
                KVCacheSpec.of_model(config, cache_dtype or each, NUM_BLOCKS, block_size),
                exceptions=dict.fromkeys(exceptions, each),
            )
            for each in (torch.float32, dtype)
        )
        self.reference = TorchAttention(BackendSetup(config, exact, torch.float32, device, MAX_MODEL_LEN))
        self.kernels = kernels.make(BackendSetup(config, spec, dtype, device, MAX_MODEL_LEN, 32, 2048))
        for backend in (self.reference, self.kernels):
            backend.use_learned(Learned(scales or KVScales.ones(config.num_layers)))
            if config.attention.has_sinks:
                generator = torch.Generator().manual_seed(seed)
                sinks = 3 * torch.randn(config.num_layers, config.num_heads, generator=generator)
                backend.use_learned(Learned(sinks=sinks.tolist()))
        self.generator = torch.Generator().manual_seed(seed)
        self.free_blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
        self.sequences: dict[str, Sequence] = {}

    def plan(self, num_tokens: dict[str, int], failed: tuple[str, ...] = ()) -> StepMetadata:
        """A step of `num_tokens` tokens by sequence name; unknown names start as new sequences."""
        starts, prompts, tables = [], [], []
        for name, count in num_tokens.items():
            sequence = self.sequences.setdefault(name, Sequence([], num_prompt=count))
            end = sequence.num_computed + count
            while name not in failed and len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free_blocks.pop())
            starts.append(0 if name in failed else sequence.num_computed)
            prompts.append(sequence.num_prompt)
            tables.append([] if name in failed else sequence.blocks)
            sequence.num_computed = starts[-1] + count
        width = -(-max(s + n for s, n in zip(starts, num_tokens.values(), strict=True)) // self.block_size)
        padded = np.full((len(tables), width), NUM_BLOCKS, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        counts, positions = np.array(list(num_tokens.values()), np.int64), np.array(starts, np.int64)
        return build_step_metadata(counts, positions, np.array(prompts, np.int64), padded, self.block_size)

    def make_qkv(self, num_rows: int) -> torch.Tensor:
        qkv = torch.randn(num_rows, self.config.qkv_size, generator=self.generator)
        return qkv.to(self.dtype).to(self.device)

    def run(
        self,
        step: StepMetadata,
        qkv: torch.Tensor | None = None,
        padded_num_rows: int | None = None,
        shape: StepShape = DECODE_ONLY,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(kernels' output, reference) of each layer. The output is NaN where the kernels did not write."""
        num_tokens = len(step.positions)
        num_rows = padded_num_rows or num_tokens
        qkv = self.make_qkv(num_rows) if qkv is None else qkv
        before = qkv.clone()
        outputs = []
        with torch.inference_mode():
            self.kernels.begin_step(step, padded_num_rows, shape)
            self.reference.begin_step(step)
            for layer in range(self.config.num_layers):
                out = torch.full(
                    (num_rows, self.config.attn_size), float("nan"), dtype=self.dtype, device=self.device
                )
                expected = torch.empty(num_tokens, self.config.attn_size, device=self.device)
                self.kernels.forward(layer, qkv, out)
                self.reference.forward(layer, qkv[:num_tokens].float(), expected)
                width = self.config.layer_heads[layer].attn_size
                outputs.append((rows_of_layer(out, width), rows_of_layer(expected, width)))
        assert torch.equal(qkv.nan_to_num(), before.nan_to_num())
        return outputs

    def check(self, num_tokens: dict[str, int]) -> None:
        for out, expected in self.run(self.plan(num_tokens)):
            assert relative_error(out, expected) < TOLERANCES[self.dtype]


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    return float("inf") if error.isnan() else float(error)


def check_all_kinds_of_steps(pair: Pair) -> None:
    """Prompts, a later chunk beside decode, decode alone, and a prompt of one token."""
    pair.check({"a": 37, "b": 5, "c": 80})
    pair.check({"a": 1, "b": 70, "d": 1, "c": 1})
    pair.check({"c": 1, "a": 1, "d": 1})
    pair.check({"b": 1, "d": 1, "e": 3})
