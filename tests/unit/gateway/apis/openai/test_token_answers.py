"""vLLM's route for token ids: it gives the tokens that completions and chats give as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_gateway import COMPLETIONS, check_error, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

URL = "/inference/v1/generate"
PROMPT = ids("Where is Łódź?")
ANSWER = [*ids(" in Poland 🙂"), EOS]


def answering() -> FakeDense:
    return FakeDense(lambda submit: ANSWER[: submit.spec.max_tokens])


async def ask(client: httpx2.AsyncClient, params: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"token_ids": PROMPT, "sampling_params": params, **more})
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[dict[str, Any]]:
    *data, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(each.removeprefix("data: ")) for each in data]


def test_the_answer_is_token_ids_to_the_end_of_the_context(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for params in (None, {}, {"temperature": 0.0, "n_predict": -1}):
            answer = await ask(client, params)
            [choice] = answer["choices"]
            assert choice == {"index": 0, "logprobs": None, "finish_reason": "stop", "token_ids": ANSWER}
            spec = dense.submits[-1].spec
            assert (list(spec.prompt_token_ids), spec.max_tokens) == (PROMPT, 64 - len(PROMPT))
        assert answer["request_id"].startswith("generate-tokens-")
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), len(ANSWER))
        named = await ask(client, {"max_tokens": 2, "n": 2}, request_id="42", model="tiny-llama", cache_salt="a")
        assert named["request_id"] == "generate-tokens-42"
        assert [(each["index"], each["token_ids"], each["finish_reason"]) for each in named["choices"]] == [
            (0, ANSWER[:2], "length"), (1, ANSWER[:2], "length")
        ]  # fmt: skip
        assert (await ask(client, kv_transfer_params={"do_remote_decode": True}))["choices"][0]["token_ids"] == ANSWER

    dense = FakeDense(lambda submit: ANSWER[: submit.spec.max_tokens], max_model_len=64)
    with_client(tmp_path, dense, test)


def test_options_are_those_of_completions(tmp_path: Path) -> None:
    params = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.5, "seed": 3,
        "ignore_eos": True, "logit_bias": {"70": 1.5}, "stop": ["x"], "stop_token_ids": [9], "min_tokens": 2,
        "max_tokens": 5, "logprobs": 2, "prompt_logprobs": 1, "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    of_request = {"priority": 3, "cache_salt": "salt"}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        whole = await client.post(COMPLETIONS, json={"prompt": PROMPT, **params, **of_request})
        assert whole.status_code == 200, whole.text
        await ask(client, params, **of_request)
        first, second = dense.submits
        for each in (first, second):
            for name in ("seq_id", "queue_timeout_ms"):
                each.ClearField(name)
            each.spec.ClearField("request_id")
        assert first == second

    dense = FakeDense(lambda submit: ids("aaaaa")[: submit.spec.max_tokens])
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_log_probabilities_name_tokens_by_their_ids(tmp_path: Path, count: int) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        params = {"max_tokens": 4, "logprobs": count, "prompt_logprobs": 1}
        answer = await ask(client, params)
        found = answer["choices"][0]["logprobs"]["content"]
        assert [each["token"] for each in found] == [f"token_id:{token_id}" for token_id in ANSWER[:4]]
        assert all(len(each["top_logprobs"]) == max(count, 1) for each in found)
        if not count:  # there the token stands for the likely ones
            assert all(each["top_logprobs"][0]["logprob"] == each["logprob"] for each in found)
        reference = (await client.post(COMPLETIONS, json={"prompt": PROMPT, **params})).json()["choices"][0]
        assert [each["logprob"] for each in found] == reference["logprobs"]["token_logprobs"]
        assert answer["prompt_logprobs"] == reference["prompt_logprobs"] and len(reference["prompt_logprobs"]) > 1

    with_client(tmp_path, answering(), test)


def test_a_stream_has_the_tokens_of_the_whole_answer(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"token_ids": PROMPT, "sampling_params": {"logprobs": 1}, "stream": True}
        response = await client.post(URL, json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [each["choices"] for each in events(response.text)]
        assert all(len(choices) == 1 and choices[0]["token_ids"] for choices in found)
        assert [token_id for [choice] in found for token_id in choice["token_ids"]] == ANSWER
        assert [choice["finish_reason"] for [choice] in found] == [None] * (len(found) - 1) + ["stop"]
        assert all(len(choice["logprobs"]["content"]) == len(choice["token_ids"]) for [choice] in found)
        options = {"include_usage": True, "continuous_usage_stats": True}
        *pieces, last = events((await client.post(URL, json={**body, "stream_options": options})).text)
        counts = 0
        for each in pieces:
            counts += len(each["choices"][0]["token_ids"])
            assert each["usage"]["completion_tokens"] == counts
            assert each["usage"]["total_tokens"] == len(PROMPT) + counts
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(ANSWER)
        assert last["usage"]["prompt_tokens"] == len(PROMPT)

    with_client(tmp_path, answering(), test)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": None}, 400, "token_ids"),
        ({"token_ids": ["a"]}, 400, "token_ids[0]"),
        ({"token_ids": [10**6]}, 400, "token_ids"),
        ({"token_ids": [5] * 3000}, 400, "token_ids"),
        ({"model": "other"}, 404, "model"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"features": {"mm_hashes": {}}}, 400, "features"),
        ({"sampling_params": {"temperature": "x"}}, 400, "sampling_params.temperature"),
        ({"sampling_params": {"stop": ["a"], "detokenize": False}}, 400, "sampling_params.stop"),
        ({"sampling_params": {"prompt": "a"}}, 400, "sampling_params.prompt"),
        ({"sampling_params": {"stream": True}}, 400, "sampling_params.stream"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for body, status, param in wrong:
            check_error(await client.post(URL, json={"token_ids": PROMPT} | body), status, param)
        assert not dense.submits
        assert (await ask(client, {"stop": None, "detokenize": False}))["choices"][0]["token_ids"] == ANSWER

    dense = answering()
    with_client(tmp_path, dense, test)
