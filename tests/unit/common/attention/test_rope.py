"""Every kind of RoPE, compared with the rotary module of transformers, called as `generate` calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.common.attention.rope import RotaryEmbedding, length_dependent_beyond
from services.common.model_config import RopeConfig

HEAD_DIM, MAX_POSITION, ORIGINAL, MAX_MODEL_LEN = 32, 64, 32, 256
LONGROPE = {
    "short_factor": tuple(1 + 0.1 * i for i in range(HEAD_DIM // 2)),
    "long_factor": tuple(2 + 0.3 * i for i in range(HEAD_DIM // 2)),
    "original_max_position_embeddings": ORIGINAL,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 4.0}),
    "dynamic": ("dynamic", {"factor": 1.7}),
    "yarn": ("yarn", {"factor": 2.0, "original_max_position_embeddings": ORIGINAL}),
    "yarn with all options": (
        "yarn",
        {
            "factor": 40.0,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "truncate": False,
        },
    ),
    "yarn with its attention factor": (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3},
    ),
    "longrope": ("longrope", {"factor": MAX_POSITION / ORIGINAL, **LONGROPE}),
    "longrope with its attention factor": ("longrope", {"factor": 8.0, "attention_factor": 1.2, **LONGROPE}),
    "proportional": ("proportional", {"factor": 2.0, "num_turning": HEAD_DIM // 8}),
    "llama3": (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
}
# An angle is position * frequency, so the rounding of a frequency in float32 changes that of position 255 by
# 255 * 2**-24.
TOLERANCE = {"rtol": 0, "atol": 3e-5}


def make_pair(kind: str) -> tuple[RotaryEmbedding, LlamaRotaryEmbedding]:
    rope_type, parameters = KINDS[kind]
    rope = RopeConfig(
        rope_type=rope_type,
        theta=10_000.0,
        rotary_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        **parameters,
    )
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in parameters.items()}
    if "num_turning" in lists:
        lists["partial_rotary_factor"] = 2 * lists.pop("num_turning") / HEAD_DIM
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10_000.0, **lists},
    )
    return RotaryEmbedding(rope, MAX_MODEL_LEN, torch.device("cpu")), LlamaRotaryEmbedding(config)


def ask_hugging_face(module: LlamaRotaryEmbedding, positions: torch.Tensor) -> list[torch.Tensor]:
    """cos, sin [num_tokens, HEAD_DIM / 2] by transformers, which stores every column twice."""
    return [table[0, :, : HEAD_DIM // 2] for table in module(torch.zeros(1), positions[None])]


@pytest.mark.parametrize("prompt_len", [1, ORIGINAL, ORIGINAL + 1, MAX_POSITION, MAX_POSITION + 1, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_generated_tokens_are_rotated_as_by_hugging_face(kind: str, prompt_len: int) -> None:
    rope, module = make_pair(kind)
    prompt = torch.arange(prompt_len)
    calls = [prompt, *prompt.new_tensor(range(prompt_len, min(prompt_len + 40, MAX_MODEL_LEN)))[:, None]]
    expected = [ask_hugging_face(module, positions) for positions in calls]
    positions = torch.cat(calls)
    actual = rope(positions, (positions + 1).clamp(min=prompt_len))
    for table, per_call in zip(actual, zip(*expected, strict=True), strict=True):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table, torch.cat(per_call), **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_different_lengths_is_rotated_sequence_by_sequence(kind: str) -> None:
    rope, module = make_pair(kind)
    prompts = [torch.arange(length) for length in (100, 20, MAX_POSITION, 150)]
    per_prompt = [ask_hugging_face(module, positions) for positions in prompts]
    expected = [torch.cat(tables) for tables in zip(*per_prompt, strict=True)]
    rope_lens = torch.cat([torch.full_like(positions, len(positions)) for positions in prompts])
    for table, hf_table in zip(rope(torch.cat(prompts), rope_lens), expected, strict=True):
        torch.testing.assert_close(table, hf_table, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_matters_only_beyond_the_declared_length(kind: str) -> None:
    rope, _ = make_pair(kind)
    rope_type, parameters = KINDS[kind]
    beyond = length_dependent_beyond(RopeConfig(rope_type, 1e4, HEAD_DIM, MAX_POSITION, **parameters))
    position = torch.tensor([5])

    def rotation(rope_len: int) -> torch.Tensor:
        return torch.cat(rope(position, torch.tensor([rope_len])))

    same = [6, MAX_MODEL_LEN] if beyond is None else [6, beyond]
    assert torch.equal(rotation(same[0]), rotation(same[1]))
    assert beyond is None or not torch.equal(rotation(beyond), rotation(beyond + 1))
