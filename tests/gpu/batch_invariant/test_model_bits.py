"""Whole models with the kernels for CUDA: the logits of a text are the same to the last bit in every step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.attn_worker.layers import BackendSetup
from services.dense_worker.model.on_the_fly import with_quantization
from services.dense_worker.model.weights import load_weights
from tests.support.dense.random_steps import RandomSteps, compute_alone, differing_rows
from tests.support.dense.whole_model import WholeModel
from tests.support.models import make_model_dir

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 320}
VARIANTS = {
    "llama": ("llama", {"num_key_value_heads": 8}),
    "llama-gqa": ("llama", {"num_key_value_heads": 2, "attention_bias": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2}),
    "mistral-window": ("mistral", {"num_key_value_heads": 4, "sliding_window": 48}),
    "gemma2": ("gemma2", {"num_key_value_heads": 4, "sliding_window": 48, "query_pre_attn_scalar": 64}),
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    ),
}
MAX_MODEL_LEN, NUM_BLOCKS, MAX_NUM_TOKENS = 800, 2500, 1024


class DeterministicModel(WholeModel):
    """A model in bfloat16 with both workers' batch-invariant kernels."""

    def __init__(self, path: Path, quantization: str) -> None:
        from services.attn_worker.layers.batch_invariant.triton_attention import BatchInvariantTritonAttention
        from services.dense_worker.backends.cuda_backend import CudaBackend

        def make_dense(weights: Any) -> CudaBackend:
            config = with_quantization(self.config, quantization, path)
            if quantization != "checkpoint":
                weights = load_weights(path, config, torch.bfloat16, torch.device("cuda"))
            return CudaBackend(weights, config, MAX_NUM_TOKENS, is_deterministic=True)

        def make_attention(setup: BackendSetup) -> BatchInvariantTritonAttention:
            return BatchInvariantTritonAttention(replace(setup, max_num_seqs=64, max_num_tokens=MAX_NUM_TOKENS))

        super().__init__(
            path,
            make_dense,
            MAX_MODEL_LEN,
            make_attention,
            torch.device("cuda"),
            torch.bfloat16,
            num_blocks=NUM_BLOCKS,
        )


@pytest.mark.parametrize("quantization", ["checkpoint", "fp8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_text_are_the_same_in_200_random_steps(tmp_path: Path, variant: str, quantization: str) -> None:
    family, fields = VARIANTS[variant]
    if quantization == "fp8" and "num_experts_per_tok" in fields:
        pytest.skip("experts of other than 16 bits are refused")
    path = make_model_dir(tmp_path, family, **SIZES, **fields, num_hidden_layers=2, max_position_embeddings=1024)
    draw = random.Random(4)
    prefix = [draw.randrange(300) for _ in range(100)]
    model = DeterministicModel(path, quantization)
    texts = []
    for shared, length in ((100, 40), (41, 300), (0, 600)):
        token_ids = [*prefix[:shared], *(draw.randrange(300) for _ in range(length))]
        texts.append(compute_alone(model, token_ids))
        model.cache.use_weights(bytes([len(texts)]))  # so that nothing of the text is found
    steps = RandomSteps(model, texts)
    for logits, expected in steps.run(num_steps=200, max_open=12):
        assert differing_rows(logits, expected) == 0
    assert steps.num_computed > 3000
    assert steps.num_cached > 300
