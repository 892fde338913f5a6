"""Log-probabilities of tokens that a request names, and of the whole vocabulary, compared with Hugging Face's."""

from __future__ import annotations

from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster
from tests.support.reference import VOCAB_SIZE, reference_model

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TOLERANCE = 2e-3  # see test_logits.py
NAMED = [900, 17, 5]


def post(cluster: Cluster, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = httpx2.post(f"http://{cluster.http_address}{path}", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == status, response.text
    return response.json()


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB_SIZE, num_tokens).tolist()


@torch.inference_mode()
def expected(token_ids: list[int]) -> np.ndarray:
    """Log-probabilities of the token after each one: float32 [num_tokens, vocab_size]."""
    return reference_model(EMBEDDED_MODEL)(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy()


def check(found: dict[str, float], row: np.ndarray, token_ids: list[int]) -> None:
    """`found` has the values of exactly these tokens, by vLLM's names of token ids."""
    assert set(found) == {f"token_id:{each}" for each in token_ids}
    for each in token_ids:
        assert found[f"token_id:{each}"] == pytest.approx(row[each], abs=TOLERANCE)


def test_completions_and_chats_give_named_tokens_in_place_of_the_likeliest(cluster: Cluster) -> None:
    prompt = random_prompt(30, seed=4)
    same = {"max_tokens": 6, "logprob_token_ids": NAMED, "return_tokens_as_token_ids": True, "return_token_ids": True}
    sampled = {"temperature": 2, "seed": 3, "logit_bias": {"17": -50}, "ignore_eos": True}
    for options in ({"logprobs": 4}, {"logprobs": 0, "prompt_logprobs": 1}):
        [choice] = post(cluster, COMPLETIONS, {"prompt": prompt, **same, **sampled, **options})["choices"]
        rows = expected([*prompt, *choice["token_ids"]])
        tops = choice["logprobs"]["top_logprobs"]
        assert len(tops) == 6
        for row, token_id, top in zip(rows[len(prompt) - 1 :], choice["token_ids"], tops, strict=False):
            check(top, row, [*NAMED, token_id])
        for row, entry in zip(rows, (choice["prompt_logprobs"] or [])[1:], strict=False):
            for each in NAMED:
                assert entry[str(each)]["logprob"] == pytest.approx(row[each], abs=TOLERANCE)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 3, **same}
    answer = post(cluster, CHATS, chat)
    [choice] = answer["choices"]
    rows = expected([*answer["prompt_token_ids"], *choice["token_ids"]])[len(answer["prompt_token_ids"]) - 1 :]
    assert choice["logprobs"]["content"]
    for row, token_id, each in zip(rows, choice["token_ids"], choice["logprobs"]["content"], strict=False):
        shown = list(dict.fromkeys([*NAMED, token_id]))  # as in vLLM the token itself, too
        assert [top["token"] for top in each["top_logprobs"]] == [f"token_id:{named}" for named in shown]
        assert [top["logprob"] for top in each["top_logprobs"]] == pytest.approx(row[shown].tolist(), abs=TOLERANCE)


def test_generate_gives_named_tokens_of_prompt_and_output_beside_the_likeliest(cluster: Cluster) -> None:
    prompts = [random_prompt(40, seed=6), random_prompt(25, seed=7)]
    named = [[3, 800], None]
    body = {
        "input_ids": prompts,
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 2,
        "token_ids_logprob": named,
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
    }
    first, second = post(cluster, GENERATE, body)
    about, rows = first["meta_info"], expected([*prompts[0], *first["output_ids"]])
    found = [*about["input_token_ids_logprobs"], *about["output_token_ids_logprobs"]]
    assert len(about["input_token_ids_logprobs"]) == len(prompts[0]) - 2 and len(found) == len(prompts[0]) + 3
    for row, triples, top in zip(
        rows[1:], found, [*about["input_top_logprobs"], *about["output_top_logprobs"]], strict=False
    ):
        assert [token_id for _, token_id, _ in triples] == [3, 800]
        assert [value for value, _, _ in triples] == pytest.approx(row[[3, 800]].tolist(), abs=TOLERANCE)
        assert [value for value, _, _ in top] == pytest.approx(sorted(row)[:-3:-1], abs=TOLERANCE)
    assert "output_token_ids_logprobs" not in second["meta_info"]
    [same] = post(cluster, GENERATE, body | {"input_ids": [prompts[0]], "token_ids_logprob": [3, 800, 3]})
    triples = same["meta_info"]["output_token_ids_logprobs"][0]
    assert [token_id for _, token_id, _ in triples] == [3, 800, 3]


def test_scores_are_the_probabilities_of_labels_behind_query_and_item(cluster: Cluster) -> None:
    query, items, labels = random_prompt(12, seed=9), [random_prompt(n, seed=n) for n in (1, 5)], [900, 17, 900]
    body = {"query": query, "items": items, "label_token_ids": labels}
    rows = [np.exp(expected([*query, *item])[-1][labels]) for item in items]
    answer = post(cluster, "/v1/score", body)
    for scores, row in zip(answer["scores"], rows, strict=True):
        assert scores == pytest.approx(row.tolist(), rel=5e-3)
    num_tokens = sum(len(query) + len(item) for item in items)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    shares = post(cluster, "/score", body | {"apply_softmax": True})["scores"]
    assert shares == [pytest.approx((row / row.sum()).tolist(), rel=5e-3) for row in rows]
    before = post(cluster, "/v1/score", body | {"item_first": True})["scores"]
    assert before[1] == pytest.approx(np.exp(expected([*items[1], *query])[-1][labels]).tolist(), rel=5e-3)

    vllm = post(cluster, "/generative_scoring", body)
    assert [each["score"] for each in vllm["data"]] == pytest.approx([row[0] / row.sum() for row in rows], rel=5e-3)
    assert vllm["usage"] == {
        "prompt_tokens": num_tokens, "completion_tokens": 2, "total_tokens": num_tokens + 2
    }  # fmt: skip
    texts = {"query": "San Francisco", "items": [" is", " was"], "label_token_ids": labels}
    whole = post(cluster, COMPLETIONS, {
        "prompt": "San Francisco was", "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [17],
        "return_tokens_as_token_ids": True, "temperature": 0,
    })["choices"][0]["logprobs"]["top_logprobs"][0]  # fmt: skip
    assert post(cluster, "/v1/score", texts)["scores"][1][1] == pytest.approx(np.exp(whole["token_id:17"]), rel=5e-3)


def test_the_whole_vocabulary_at_every_position_of_a_prompt(cluster: Cluster) -> None:
    """Of three prompts at once with 256 thousand values, which are computed in many short steps."""
    prompts = [random_prompt(num_tokens, seed=8) for num_tokens in (150, 61, 39)]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": -1}
    choices = post(cluster, COMPLETIONS, body)["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        first, *entries = choice["prompt_logprobs"]
        rows = expected(prompt)
        assert first is None and len(entries) == len(prompt) - 1
        for row, token_id, entry in zip(rows, prompt[1:], entries, strict=False):
            found = [entry[str(each)]["logprob"] for each in range(VOCAB_SIZE)]
            np.testing.assert_allclose(found, row, atol=TOLERANCE, rtol=0)
            assert entry[str(token_id)]["rank"] == np.count_nonzero(np.array(found) >= found[token_id])


def test_what_cannot_be_served_is_refused_with_value_and_limit(cluster: Cluster) -> None:
    base = {"prompt": [5] * 4000, "max_tokens": 1}
    for path, body, param, *parts in (
        (COMPLETIONS, {"prompt": "a", "logprob_token_ids": [5]}, "logprob_token_ids", "logprobs must be set"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": [1024]}, "logprob_token_ids", "1024"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": [5] * 129}, "logprob_token_ids", "129"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "21", "20", "-1"),
        (COMPLETIONS, {"prompt": [5] * 1000, "n": 8, "prompt_logprobs": -1}, "logprobs", "8200000", "4000000"),
        (GENERATE, {"text": "a", "token_ids_logprob": [5]}, "token_ids_logprob", "only with return_logprob"),
        (GENERATE, {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [[5]]}, "token_ids_logprob", "2"),
        (GENERATE, {"text": "a", "return_logprob": True, "token_ids_logprob": [7000]}, "token_ids_logprob", "7000"),
        (
            COMPLETIONS,
            {"prompt": "a", "use_beam_search": True, "n": 2, "temperature": 0, "logprobs": 0, "logprob_token_ids": [5]},
            "logprob_token_ids",
            "beam",
        ),
    ):
        error = post(cluster, path, base | body if path == COMPLETIONS else body, 400)["error"]
        assert error["param"] == param, error
        assert all(part in error["message"] for part in parts), error


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_named_tokens_over_grpc_count_towards_the_limit_and_are_part_of_the_journal(
    cluster: Cluster, role: str
) -> None:
    """A stream that a worker's death interrupts goes on with the same tokens named."""
    prompt = random_prompt(30, seed=9)
    request = gateway_pb2.GenerateRequest(
        prompt_token_ids={"ids": prompt}, max_tokens=120, ignore_eos=True, logprobs=0, sampling={"temperature": 0}
    )
    request.sampling.logprob_token_ids.extend(NAMED)
    token_ids, found = [], []
    for chunk in cluster.gateway.GenerateStream(request, timeout=REQUEST_TIMEOUT_S):
        if not found:
            cluster.kill(role)
        token_ids += chunk.token_ids
        found += [(list(each.top_token_ids), list(each.top_logprobs)) for each in chunk.logprobs]
    rows = expected([*prompt, *token_ids])[len(prompt) - 1 : -1]
    assert len(found) == 120
    for row, (named, values) in zip(rows, found, strict=True):
        assert named == NAMED
        assert values == pytest.approx(row[NAMED].tolist(), abs=TOLERANCE)
