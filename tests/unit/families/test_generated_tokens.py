"""Greedy tokens of both workers' parts in one process equal Hugging Face `generate`, however the steps are cut."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from tests.support.dense.whole_model import BLOCK_SIZE, WholeModel
from tests.support.models import make_model_dir
from tests.support.reference import LLAMA3_ROPE, VOCAB_SIZE, random_prompts, reference_tokens

torch.set_num_threads(1)
# Name, family, overrides of config.json. They cover several kinds of RoPE scaling.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-mha-bias-tied-yarn": (
        "llama",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mistral-mqa-sliding-window": ("mistral", {"num_key_value_heads": 1, "sliding_window": 24}),
    "qwen2-linear": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen3-q-k-norm": ("qwen3", {"head_dim": 32}),
}


def generate(
    model: WholeModel,
    prompts: dict[int, list[int]],
    max_tokens: dict[int, int],
    budget: int,
    gives_way: tuple[int, int] | None = None,
) -> dict[int, list[int]]:
    """Greedy tokens after each prompt, by seq_id, in steps of at most `budget` tokens: decoding goes first.

    gives_way: (seq_id, number of tokens after which it loses its cache)
    """
    tokens = {seq_id: list(prompt) for seq_id, prompt in prompts.items()}
    num_computed = {seq_id: model.open(seq_id, prompt) for seq_id, prompt in prompts.items()}
    running, sampled = set(prompts), {}
    while running:
        entries, room = [], budget
        for seq_id in sorted(running, key=lambda seq_id: len(tokens[seq_id]) - num_computed[seq_id]):
            if num_tokens := min(len(tokens[seq_id]) - num_computed[seq_id], room):
                entries.append((seq_id, num_tokens, num_computed[seq_id]))
                room -= num_tokens
        logits = model.step(*entries, sampled=sampled.items())
        sampled = {}
        for (seq_id, num_tokens, _), rows in zip(entries, logits, strict=True):
            num_computed[seq_id] += num_tokens
            if num_computed[seq_id] < len(tokens[seq_id]):
                continue
            sampled[seq_id] = int(rows[-1].argmax())
            tokens[seq_id].append(sampled[seq_id])
            num_answered = len(tokens[seq_id]) - len(prompts[seq_id])
            if num_answered == max_tokens[seq_id] or (seq_id, num_answered) == gives_way:
                model.cache.close_sequences([seq_id])
                del sampled[seq_id]
                if num_answered == max_tokens[seq_id]:
                    running.remove(seq_id)
                else:
                    num_computed[seq_id] = model.open(seq_id, tokens[seq_id])
    return {seq_id: each[len(prompts[seq_id]) :] for seq_id, each in tokens.items()}


@functools.cache
def expected_tokens(path: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """By Hugging Face, once for all chunk sizes."""
    return reference_tokens(path, list(prompt), max_tokens)


def check_generation(model: WholeModel, path: Path, prompts: list[list[int]], budget: int) -> None:
    """All prompts at once, the longest one also on its cached prefix."""
    max_tokens = {seq_id: 20 + seq_id for seq_id in range(len(prompts))}
    expected = {
        seq_id: expected_tokens(path, tuple(prompt), max_tokens[seq_id]) for seq_id, prompt in enumerate(prompts)
    }
    last = len(prompts) - 1
    assert generate(model, dict(enumerate(prompts)), max_tokens, budget, gives_way=(last - 1, 7)) == expected
    num_cached = model.open(100, prompts[last])
    assert num_cached == (len(prompts[last]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    model.cache.close_sequences([100])
    assert generate(model, {last: prompts[last]}, max_tokens, budget) == {last: expected[last]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_models_equal_hugging_face(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    path = make_model_dir(tmp_path, family, vocab_size=VOCAB_SIZE, **overrides)
    model = WholeModel(path, max_model_len=256, num_blocks=256)
    check_generation(model, path, random_prompts(8, longest=90, seed=1), budget=40)


@pytest.mark.parametrize("budget", [16, 100, 512])
def test_the_embedded_model_equals_hugging_face_at_every_chunk_size(budget: int) -> None:
    model = WholeModel(EMBEDDED_MODEL, max_model_len=512, num_blocks=1024)
    check_generation(model, EMBEDDED_MODEL, random_prompts(8, longest=300, seed=2), budget)
