"""Shapes of attention, and steps over contexts of one length, for the benchmarks of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.common.model_config import ModelConfig, RopeConfig

MAX_MODEL_LEN = 32768


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"


def make_config(shape: Shape, num_layers: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=1,
        hidden_size=shape.num_heads * shape.head_dim,
        intermediate_size=1,
        num_layers=num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        norm_eps=1e-5,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        max_position_embeddings=MAX_MODEL_LEN,
        rope=RopeConfig("default", 10000.0, shape.head_dim, MAX_MODEL_LEN),
        eos_token_ids=(),
        checkpoint_dtype="bfloat16",
    )


def make_step(tables: np.ndarray, context: int, num_tokens: int, block_size: int) -> StepMetadata:
    """The last `num_tokens` of sequences of `context` tokens each."""
    counts = np.full(len(tables), num_tokens, np.int64)
    return build_step_metadata(counts, context - counts, np.full(len(tables), context), tables, block_size)
