"""Tokens of a picture that see each other: the prompt kernel gives the results of the torch reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.attn_worker.cache.step_metadata import StepMetadata
from services.common.model_config import ModelConfig
from tests.gpu.attention_pair import TOLERANCES, Kernels, Pair, make_config, relative_error

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
Spans = Mapping[str, Sequence[tuple[int, int]]]  # by sequence: first token of the step and length


@pytest.fixture
def kernels(kernel_device: torch.device) -> Kernels:
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


def seeing(config: ModelConfig) -> ModelConfig:
    return replace(config, attention=replace(config.attention, sees_spans=True))


def with_spans(step: StepMetadata, num_tokens: Mapping[str, int], spans: Spans) -> StepMetadata:
    later, first = np.zeros(sum(num_tokens.values()), np.int32), 0
    for name, count in num_tokens.items():
        for start, length in spans.get(name, ()):
            later[first + start : first + start + length] = np.arange(length)[::-1]
        first += count
    return replace(step, num_later=later)


def check(pair: Pair, num_tokens: dict[str, int], spans: Spans) -> None:
    step = pair.plan(num_tokens)
    qkv = pair.make_qkv(len(step.positions))
    found = pair.run(with_spans(step, num_tokens, spans), qkv)
    for out, expected in found:
        assert relative_error(out, expected) < TOLERANCES[pair.dtype]
    for (out, _), (causal, _) in zip(found, pair.run(step, qkv), strict=True):
        assert relative_error(out, causal) > 0.01, "the rows of spans see more"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_kv_heads"),
    [(torch.float32, 64, 2), (torch.float16, 64, 1), (torch.float16, 256, 2), (torch.bfloat16, 256, 4)],
    ids=str,
)
def test_spans_in_prompts(kernels: Kernels, dtype: torch.dtype, head_dim: int, num_kv_heads: int) -> None:
    """Over several blocks of queries and of keys, in layers with a window and without, beside decode rows."""
    pair = Pair(seeing(make_config(4, num_kv_heads, head_dim, windows=(None, 20))), kernels, dtype)
    check(pair, {"a": 150, "b": 33}, {"a": [(3, 12), (60, 90)], "b": [(0, 33)]})
    check(pair, {"a": 1, "c": 140, "b": 1}, {"c": [(50, 20), (70, 18)]})
    check(pair, {"a": 70, "b": 40, "c": 1}, {"b": [(20, 19)]})


def test_spans_in_short_chunks(kernels: Kernels) -> None:
    """Which have a kernel of their own without one, as others of the same step do."""
    pair = Pair(seeing(make_config(num_kv_heads=4, windows=(None, 20))), kernels)
    check(pair, {"a": 6, "b": 5}, {"a": [(1, 4)]})
    check(pair, {"a": 7, "b": 4, "c": 1}, {"b": [(0, 4)]})


def test_many_rows_with_several_heads_in_a_program(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.attn_worker.layers.triton_attention.MAX_CAPTURED_PROMPT_ROWS", 64)
    pair = Pair(seeing(make_config(4, 2, 128, windows=(None, 20))), kernels, torch.float16)
    check(pair, {"a": 99, "b": 29}, {"a": [(30, 60)], "b": [(2, 8)]})


def test_a_model_whose_tokens_do_not_see_later_ones_ignores_spans(kernels: Kernels) -> None:
    pair = Pair(make_config(), kernels)
    num_tokens = {"a": 40}
    for out, expected in pair.run(with_spans(pair.plan(num_tokens), num_tokens, {"a": [(3, 12)]})):
        assert relative_error(out, expected) < TOLERANCES[pair.dtype]
