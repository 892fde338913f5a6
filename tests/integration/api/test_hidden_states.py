"""Hidden states and the progress of prompts through three processes. The states are compared with Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.clients.interrupted import over_a_kill
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, running_cluster
from tests.support.reference import VOCAB_SIZE, reference_model

TOLERANCE = 2e-3  # of values from -20 to 20; both sum in other orders
STEP_TOKENS = 32  # so that longer prompts take several steps


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = (
        f"gateway.http_address=127.0.0.1:{free_port()}",
        f"scheduler.max_num_batched_tokens={STEP_TOKENS}",
        "scheduler.max_num_seqs=8",
        "gateway.max_held_bytes=20000000",
    )
    with running_cluster(tmp_path_factory.mktemp("hidden"), *settings, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_idle()


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB_SIZE, num_tokens).tolist()


def post(cluster: Cluster, body: dict[str, Any], status: int = 200, path: str = "/generate") -> Any:
    response = httpx2.post(f"http://{cluster.http_address}{path}", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == status, response.text
    return response.json()


def asking(prompts: Any, **sampling: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 7, "temperature": 2, "sampling_seed": 4, "ignore_eos": True, **sampling}
    return {"input_ids": prompts, "return_hidden_states": True, "sampling_params": sampling}


@torch.inference_mode()
def check(prompt: list[int], answer: dict[str, Any]) -> None:
    """SGLang's form: first the states of the prompt, then one for each token but the last."""
    first, *others = answer["meta_info"]["hidden_states"]
    token_ids = answer["output_ids"]
    assert len(first) == len(prompt) and len(others) == len(token_ids) - 1
    tokens = torch.tensor([[*prompt, *token_ids[:-1]]])
    wanted = reference_model(EMBEDDED_MODEL)(tokens, output_hidden_states=True).hidden_states[-1][0].numpy()
    np.testing.assert_allclose(np.array([*first, *others]), wanted, atol=TOLERANCE, rtol=0)


def test_hidden_states_are_those_of_transformers_whatever_the_cache_and_the_answers_beside(cluster: Cluster) -> None:
    """Twice: the second time the prompts are in the prefix cache, and are computed all the same."""
    prompts = [random_prompt(count, seed=count) for count in (1, 70, 33)]
    for _ in range(2):
        answers = post(cluster, asking(prompts, n=2))
        assert len({tuple(each["output_ids"]) for each in answers}) == 6
        for index, answer in enumerate(answers):
            check(prompts[index // 2], answer)
    plain = post(cluster, asking(prompts) | {"return_hidden_states": False})
    assert all("hidden_states" not in each["meta_info"] for each in plain)
    for prompt in prompts[:2]:  # one is short
        check(prompt, post(cluster, asking(prompt, max_new_tokens=1)))


@torch.inference_mode()
def test_openais_objects_have_the_state_of_the_last_token_that_was_computed(cluster: Cluster) -> None:
    prompt, path = random_prompt(20, seed=8), "/v1/completions"
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_hidden_states": True}
    [choice] = post(cluster, body | {"return_token_ids": True}, path=path)["choices"]
    tokens = torch.tensor([[*prompt, *choice["token_ids"][:-1]]])
    wanted = reference_model(EMBEDDED_MODEL)(tokens, output_hidden_states=True).hidden_states[-1][0, -1].numpy()
    np.testing.assert_allclose(choice["hidden_states"], wanted, atol=TOLERANCE, rtol=0)
    choices = [each["choices"][0] for each in streamed(cluster, path, body | {"n": 2})]
    ends = [each for each in choices if "hidden_states" in each]
    assert sorted(each["index"] for each in ends) == [0, 1]
    for each in ends:
        assert each["finish_reason"] == "length"
        np.testing.assert_allclose(each["hidden_states"], wanted, atol=TOLERANCE, rtol=0)
    [single] = post(cluster, body | {"max_tokens": 1}, path=path)["choices"]
    assert single["hidden_states"] == [], "only the prompt was computed"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    [plain] = post(cluster, chat, path="/v1/chat/completions")["choices"]
    assert "hidden_states" not in plain
    chat["return_hidden_states"] = True
    [whole] = post(cluster, chat, path="/v1/chat/completions")["choices"]
    deltas = [each["choices"][0]["delta"] for each in streamed(cluster, "/v1/chat/completions", chat)]
    [found] = [each["hidden_states"] for each in deltas if "hidden_states" in each]
    np.testing.assert_allclose(found, whole["hidden_states"], atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_several_choices_hold_no_states_that_none_of_them_shows(cluster: Cluster) -> None:
    """Those of all tokens would be 170 MB, of which 20 may be held; the answers compute the prompt once."""
    prompt = random_prompt(1500, seed=9)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 2, "seed": 3, "ignore_eos": True, "n": 8}
    body |= {"return_hidden_states": True, "return_token_ids": True}
    for further in ({}, {"stop": ["never in any answer"]}):
        choices = post(cluster, body | further, path="/v1/completions")["choices"]
        assert len({tuple(each["token_ids"]) for each in choices}) == 8
        for choice in choices[::7]:
            tokens = torch.tensor([[*prompt, *choice["token_ids"][:-1]]])
            wanted = reference_model(EMBEDDED_MODEL)(tokens, output_hidden_states=True).hidden_states[-1][0, -1]
            np.testing.assert_allclose(choice["hidden_states"], wanted.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_the_last_state_is_right_after_a_worker_was_killed(cluster: Cluster, role: str) -> None:
    body = {"prompt": random_prompt(60, seed=6), "max_tokens": 250, "temperature": 0, "ignore_eos": True}
    body |= {"return_hidden_states": True}
    path = "/v1/completions"
    [wanted] = post(cluster, body, path=path)["choices"]
    answer = over_a_kill(
        lambda: post(cluster, body, path=path),
        lambda: cluster.attention_status().num_computed_tokens,
        100,
        lambda: cluster.kill(role),
    )
    [found] = answer["choices"]
    assert found["text"] == wanted["text"]
    np.testing.assert_allclose(found["hidden_states"], wanted["hidden_states"], atol=TOLERANCE, rtol=0)


def test_a_stop_string_cuts_the_states_too(cluster: Cluster) -> None:
    prompt = random_prompt(20, seed=5)
    whole = post(cluster, asking(prompt, max_new_tokens=30))
    stop = whole["text"][5:7]
    cut = post(cluster, asking(prompt, max_new_tokens=30, stop=[stop]))
    assert 0 < len(cut["output_ids"]) < 30
    check(prompt, cut)


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_no_state_is_missing_after_a_worker_was_killed(cluster: Cluster, role: str) -> None:
    prompt = random_prompt(60, seed=6)
    answer = over_a_kill(
        lambda: post(cluster, asking(prompt, max_new_tokens=250)),
        lambda: cluster.attention_status().num_computed_tokens,
        100,
        lambda: cluster.kill(role),
    )
    check(prompt, answer)


def test_what_cannot_be_served_is_refused_by_name(cluster: Cluster) -> None:
    for body, *parts in (
        (asking([5]) | {"stream": True}, "return_hidden_states", "stream"),
        (asking([5] * 1500, n=8), "for hidden states", "gateway.max_held_bytes is 20000000"),
        (asking([5], use_beam_search=True, n=2, temperature=0), "beam search"),
    ):
        message = json.dumps(post(cluster, body, 400))
        assert all(part in message for part in parts), message
    for field in ("return_hidden_states", "return_progress"):
        request = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1, **{field: True})
        with pytest.raises(grpc.RpcError) as refused:
            cluster.gateway.Generate(request, timeout=REQUEST_TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in refused.value.details()
    completion = {"prompt": "a", "return_progress": True}
    assert post(cluster, completion, 400, "/v1/completions")["error"]["param"] == "return_progress"


def streamed(cluster: Cluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    url = f"http://{cluster.http_address}{path}"
    with httpx2.stream("POST", url, json=body | {"stream": True}, timeout=REQUEST_TIMEOUT_S) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]" and not line.startswith("event: ")]


def test_progress_counts_the_computed_and_the_cached_tokens_of_each_step(cluster: Cluster) -> None:
    prompt = random_prompt(150, seed=7)
    body = {"prompt": prompt, "n_predict": 3, "return_progress": True, "ignore_eos": True}
    for _ in range(2):
        pieces = streamed(cluster, "/completion", body)
        found = [each["prompt_progress"] for each in pieces if "prompt_progress" in each]
        assert pieces[: len(found)] == [each for each in pieces if "prompt_progress" in each], "they come first"
        assert all(each["content"] == "" and each["stop"] is False for each in pieces[: len(found)])
        cached = pieces[-1]["tokens_cached"]
        assert {(each["total"], each["cache"]) for each in found} == {(150, cached)}
        counts = [each["processed"] for each in found]
        assert counts == sorted(set(counts)) and counts[0] == cached and counts[-1] == 150
        assert len(counts) <= -(-(150 - cached) // STEP_TOKENS) + 1, "at most one event for each step"
        times = [each["time_ms"] for each in found]
        assert times == sorted(times)
    assert cached > 0, "the second time"
    plain = streamed(cluster, "/completion", body | {"return_progress": False})
    assert not any("prompt_progress" in each for each in plain)


def test_progress_of_a_chat_has_no_text(cluster: Cluster) -> None:
    chat = {"messages": [{"role": "user", "content": "Tell me. " * 40}], "max_tokens": 3, "return_progress": True}
    events = streamed(cluster, "/v1/chat/completions", chat | {"stream_options": {"include_usage": True}})
    found = [each for each in events if "prompt_progress" in each]
    num_tokens = events[-1]["usage"]["prompt_tokens"]
    assert len(found) > 1 and found[-1]["prompt_progress"]["processed"] == num_tokens
    assert all(each["choices"][0]["delta"]["content"] is None for each in found)
    assert {each["id"] for each in events} == {found[0]["id"]}


def test_progress_of_a_response_is_told_while_it_is_in_progress(cluster: Cluster) -> None:
    body = {"input": "Tell me. " * 50, "max_output_tokens": 3, "return_progress": True}
    sent = streamed(cluster, "/responses", body)
    found = [each for each in sent if "prompt_progress" in each]
    assert len(found) > 1 and {each["type"] for each in found} == {"response.in_progress"}
    assert [each["sequence_number"] for each in sent] == list(range(len(sent)))
    assert found[-1]["prompt_progress"]["processed"] == sent[-1]["response"]["usage"]["input_tokens"]
    assert sent.index(found[-1]) < [each["type"] for each in sent].index("response.output_item.added")
