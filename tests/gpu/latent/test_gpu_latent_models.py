"""Tiny DeepSeek models on one GPU give the tokens of Hugging Face: exactly in float32, nearly in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.cluster import Cluster
from tests.support.reference import make_served_model, random_prompts, reference_model, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# The last prompts take several steps, in which the others decode, and their contexts are split.
PROMPTS = random_prompts(4, longest=40, seed=3) + random_prompts(3, longest=400, seed=4)[1:]
MAX_TOKENS = [24 + i for i in range(len(PROMPTS))]
ERROR_RATIO = 1.5  # of two implementations that round to bfloat16 in different places

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
_SMALL = {"kv_lora_rank": 48, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16, "v_head_dim": 24, "head_dim": 16}
_PUBLISHED = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}


@dataclass(frozen=True)
class Case:
    """A random model."""

    family: str
    dtype: torch.dtype
    fields: dict[str, Any]  # of config.json


CASES = {
    "v2-lite": Case(
        "deepseek_v2",
        torch.float32,
        {
            **_SMALL,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
    ),
    "v3": Case(
        "deepseek_v3",
        torch.float32,
        {
            **_SMALL,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "q_lora_rank": 40,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _YARN,
        },
    ),
    # Without experts: where rounding changes the choice of an expert, errors have no bound.
    "published-heads-bfloat16": Case(
        "deepseek_v3",
        torch.bfloat16,
        {
            **_PUBLISHED,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 96,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 3,
            "rope_parameters": _YARN,
        },
    ),
}


@dataclass(frozen=True)
class Served:
    case: Case
    path: Path
    cluster: Cluster


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    case = CASES[request.param]
    path = make_served_model(
        tmp_path_factory.mktemp(request.param),
        case.family,
        dtype=case.dtype,
        **{"hidden_size": 128, "max_position_embeddings": 1024} | case.fields,
    )
    settings = (
        f"model.path={path}",
        f"model.dtype={str(case.dtype).removeprefix('torch.')}",
        "scheduler.max_num_batched_tokens=96",
        "scheduler.max_num_seqs=8",
        "attention.num_blocks=200",
    )
    with gpu_cluster(tmp_path_factory.mktemp("cluster"), *settings) as cluster:
        yield Served(case, path, cluster)


def assert_tokens(served: Served, prompts: list[list[int]], found: list[list[int]]) -> None:
    """Checks the greedy tokens after each prompt against Hugging Face on the CPU."""
    if served.case.dtype == torch.float32:
        for prompt, answer in zip(prompts, found, strict=True):
            assert answer == reference_tokens(served.path, prompt, len(answer))
        return
    # Each token must be the best one after the tokens before it, within twice the error of a logit. The errors of
    # Hugging Face's own bfloat16 give its size.
    exact, rounded = (reference_model(served.path, dtype=dtype) for dtype in (torch.float32, served.case.dtype))
    errors, shortfalls, spreads = [], [], []
    for prompt, answer in zip(prompts, found, strict=True):
        token_ids = torch.tensor([prompt + answer])
        with torch.inference_mode():
            logits, rounded_logits = (
                model(token_ids).logits[0, len(prompt) - 1 : -1].float() for model in (exact, rounded)
            )
        best = logits.amax(dim=1)
        errors.append((rounded_logits - logits).abs().max().item())
        shortfalls.append((best - logits[range(len(answer)), answer]).max().item())
        spreads.append((best - logits.mean(dim=1)).min().item())
    tolerance = 2 * ERROR_RATIO * max(errors)
    assert tolerance < min(spreads) / 4, "the check would pass any token"
    assert max(shortfalls) <= tolerance


def test_greedy_tokens_of_a_batch_of_prompts_equal_hugging_face(served: Served) -> None:
    answers = served.cluster.generate_all(PROMPTS, MAX_TOKENS)
    assert [len(answer.token_ids) for answer in answers] == MAX_TOKENS
    assert_tokens(served, PROMPTS, [answer.token_ids for answer in answers])
    served.cluster.wait_idle()


def test_a_prompt_whose_prefix_is_cached_gets_the_same_tokens(served: Served) -> None:
    prompt = PROMPTS[-1]
    served.cluster.generate(prompt, 1)
    again = served.cluster.generate(prompt, 20)
    assert again.finish.usage.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert_tokens(served, [prompt], [again.token_ids])
