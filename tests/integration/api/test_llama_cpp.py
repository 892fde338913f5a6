"""llama.cpp's /completion: the tokens and log-probabilities of Hugging Face, and a stream over a kill."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import Cluster, free_port, running_cluster
from tests.support.models import TWO_LAYERS
from tests.support.reference import random_prompts, reference_logprobs, reference_tokens

URL = "/completion"
NUM_TOKENS = 40
END_OF_TEXT = 2  # of the embedded model


def complete(cluster: Cluster, **body: Any) -> Any:
    response = httpx2.post(f"http://{cluster.http_address}{URL}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_and_log_probabilities_are_those_of_hugging_face(cluster: Cluster) -> None:
    prompts = random_prompts(2, 40, seed=3)
    options = {"n_predict": NUM_TOKENS, "temperature": 0, "n_probs": 3, "return_tokens": True, "ignore_eos": True}
    for prompt, answer in zip(prompts, complete(cluster, prompt=prompts, **options), strict=True):
        token_ids = answer["tokens"]
        assert token_ids[: len(expected := reference_tokens(EMBEDDED_MODEL, prompt, NUM_TOKENS))] == expected
        logprobs = [each["logprob"] for each in answer["completion_probabilities"]]
        of_reference = reference_logprobs(EMBEDDED_MODEL, prompt + token_ids)[len(prompt) - 1 :]
        assert logprobs == pytest.approx(of_reference, abs=1e-4)
        assert all(each["top_logprobs"][0]["id"] == each["id"] for each in answer["completion_probabilities"])


def test_probabilities_behind_the_samplers(cluster: Cluster) -> None:
    [prompt] = random_prompts(1, 40, seed=4)
    options = {"n_predict": 5, "n_probs": 4, "ignore_eos": True, "post_sampling_probs": True, "return_tokens": True}
    greedy = complete(cluster, prompt=prompt, temperature=0, **options)
    for each in greedy["completion_probabilities"]:
        assert each["prob"] == 1.0 and [one["prob"] for one in each["top_probs"]] == [1.0, 0.0, 0.0, 0.0]
    two = complete(cluster, prompt=prompt, temperature=1.5, top_k=2, top_p=1, min_p=0, **options)
    own = complete(cluster, prompt=prompt + two["tokens"][:-1], temperature=0, n_predict=1, n_probs=3, ignore_eos=True)
    likely, last = own["completion_probabilities"][0]["top_logprobs"], two["completion_probabilities"][-1]
    first, second = [each for each in likely if each["id"] != END_OF_TEXT][:2]  # which no sampler chooses here
    expected = 1 / (1 + math.exp((second["logprob"] - first["logprob"]) / 1.5))
    assert [each["prob"] for each in last["top_probs"]] == pytest.approx([expected, 1 - expected, 0, 0], abs=1e-4)
    assert [each["id"] for each in last["top_probs"][:2]] == [first["id"], second["id"]]


def test_a_stream_goes_on_over_a_kill_of_the_dense_worker(tmp_path: Path) -> None:
    http_address = f"gateway.http_address=127.0.0.1:{free_port()}"
    with running_cluster(tmp_path, http_address, TWO_LAYERS, is_warm=True) as cluster:
        check_stream_over_kill(cluster)


def check_stream_over_kill(cluster: Cluster) -> None:
    body = {"prompt": "Count from 1", "n_predict": 200, "temperature": 0, "ignore_eos": True}
    expected = complete(cluster, **body)["content"]
    url, pieces = f"http://{cluster.http_address}{URL}", []
    with httpx2.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line:
                pieces.append(json.loads(line.removeprefix("data: ")))
            if len(pieces) == 5 and line:
                os.kill(cluster.pid_of("dense_worker"), signal.SIGKILL)
    assert "".join(each["content"] for each in pieces) == expected
    assert [each["stop"] for each in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["tokens_predicted"] == 200
