"""Streamed `echo` with several answers, and `best_of`, by the real `openai` client and against Hugging Face."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import Cluster
from tests.support.reference import random_prompts, reference_logprobs

MODEL = EMBEDDED_MODEL.name


@pytest.fixture
def api(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        api_key="none needed", base_url=f"http://{cluster.http_address}/v1", max_retries=0
    ) as api:
        yield api


def test_the_streamed_echo_of_several_answers_has_the_logprobs_of_hugging_face(api: openai.OpenAI) -> None:
    prompts = [random_prompts(1, 40, seed)[0] for seed in (7, 8)]
    options: Any = {"model": MODEL, "prompt": prompts, "max_tokens": 5, "n": 2, "echo": True, "logprobs": 0, "seed": 5}
    chunks = list(api.completions.create(**options, stream=True, extra_body={"return_token_ids": True}))
    logprobs: dict[int, list[float | None]] = {}
    token_ids: dict[int, list[int]] = {}
    for chunk in chunks:
        [choice] = chunk.choices
        if choice.logprobs is not None:
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
        token_ids.setdefault(choice.index, []).extend(choice.model_extra["token_ids"])
    assert sorted(logprobs) == [0, 1, 2, 3]
    for index, (first, *others) in logprobs.items():
        assert first is None
        expected = reference_logprobs(EMBEDDED_MODEL, [*prompts[index // 2], *token_ids[index]])
        assert others == pytest.approx(expected, abs=1e-4)
    assert token_ids[0] != token_ids[1] and token_ids[2] != token_ids[3], "they have different seeds"


def test_best_of_returns_the_answers_with_the_highest_mean_logprob_of_hugging_face(api: openai.OpenAI) -> None:
    [prompt] = random_prompts(1, 20, 9)
    options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "seed": 11, "temperature": 2}
    more = {"return_token_ids": True, "ignore_eos": True}
    all_answers = api.completions.create(**options, n=5, extra_body=more).choices
    means = {}
    for choice in all_answers:
        token_ids = choice.model_extra["token_ids"]
        means[choice.text] = statistics.fmean(reference_logprobs(EMBEDDED_MODEL, [*prompt, *token_ids])[-6:])
    best = sorted(means, key=means.__getitem__, reverse=True)
    chosen = api.completions.create(**options, n=2, best_of=5, extra_body=more).choices
    assert [choice.text for choice in chosen] == best[:2]


def test_best_of_cannot_be_streamed(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="best answers are known only at the end") as refused:
        api.completions.create(model=MODEL, prompt="a", n=1, best_of=2, stream=True)
    assert refused.value.param == "best_of"
