"""`generate` and `generate_stream` over HTTP, in front of a scripted dense worker; texts against transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clients.gateway_calls import EOS, REFERENCE, ids, text_of
from tests.support.clients.http_gateway import answers_to, with_client
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense

URL = "/v2/models/ensemble/generate"
PROMPT = "San Francisco is a"
ANSWER = " city in Łódź, 東京 and 🙂."
TOKENS = ids(ANSWER)
BODY = {"text_input": PROMPT, "max_tokens": len(TOKENS), "bad_words": "", "stop_words": ""}
PROMPT_IDS = REFERENCE(PROMPT)["input_ids"]


def talkative() -> FakeDense:
    return FakeDense(lambda submit: TOKENS)


def sent_events(text: str) -> list[dict[str, Any]]:
    """The objects of a whole stream of events."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_text_follows_the_prompt_unless_it_is_excluded(tmp_path: Path, model: str) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        url = f"/v2/models/{model}/generate"
        # As curl sends it: not declared as JSON.
        form = {"content-type": "application/x-www-form-urlencoded"}
        answer = (await client.post(url, content=json.dumps(BODY), headers=form)).json()
        assert answer["text_output"] == text_of([*PROMPT_IDS, *TOKENS]) == PROMPT + ANSWER
        assert (answer["model_name"], answer["model_version"]) == (model, "1")
        alone = (await client.post(url, json={**BODY, "exclude_input_in_output": True})).json()
        assert alone["text_output"] == ANSWER

    with_client(tmp_path, talkative(), test)


def test_options_have_the_meaning_of_tensorrt_llm(tmp_path: Path) -> None:
    dense = talkative()

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def submitted(**options: Any) -> Any:
            response = await client.post(URL, json={**BODY, **options})
            assert response.status_code == 200, response.text
            return dense.submits[-1]

        submit = await submitted()
        assert submit.spec.sampling.temperature == 0, "without top_k and top_p the most likely token is taken"
        assert list(submit.spec.stop_token_ids) == [EOS]
        assert submit.spec.prompt_token_ids == PROMPT_IDS and submit.spec.max_tokens == len(TOKENS)
        sampling = (await submitted(top_k=7, top_p=0.0, temperature=0.5)).spec.sampling
        assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.seed) == (7, 1.0, 0.5, 0)
        sampling = (await submitted(top_p=0.25)).spec.sampling
        assert (sampling.HasField("top_k"), sampling.top_p, sampling.temperature) == (False, 0.25, 1.0)
        sampling = (await submitted(parameters={"top_k": 3}, random_seed=2**63, min_length=2)).spec.sampling
        assert (sampling.top_k, sampling.seed, sampling.min_tokens) == (3, 2**63, 2)
        penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
        sampling = (await submitted(**penalties, min_tokens=1, seed=9)).spec.sampling
        assert {name: getattr(sampling, name) for name in penalties} == penalties
        assert (sampling.min_tokens, sampling.seed) == (1, 9)
        assert list((await submitted(end_id=42, pad_id=3)).spec.stop_token_ids) == [42], "instead of the model's own"
        assert list((await submitted(end_id=-1)).spec.stop_token_ids) == []
        words = (await submitted(bad_words=["cat", ""])).spec.sampling.bad_words
        assert ids("cat") in [list(word.token_ids) for word in words]
        guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]+"}
        assert (await submitted(**guide)).spec.sampling.HasField("structured_output")
        assert (await submitted(guided_decoding_guide_type="json")).spec.sampling.HasField("structured_output")
        assert not (await submitted(guided_decoding_guide_type="")).spec.sampling.HasField("structured_output")
        # Without effect: only one beam, and names that Triton would pass on as parameters.
        await submitted(beam_width=1, length_penalty=2.0, early_stopping=True, temperature=None, nothing_known=[1])

    with_client(tmp_path, dense, test)


def test_stop_words_end_the_text(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        options = {"stop_words": ["東京", "🙂"], "exclude_input_in_output": True}
        answer = (await client.post(URL, json={**BODY, **options})).json()
        assert answer["text_output"] == ANSWER[: ANSWER.index("東京")]

    with_client(tmp_path, talkative(), test)


def test_log_probabilities_counts_and_indexes_are_given_on_request(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        wanted = {"return_log_probs": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
        answer = (await client.post(URL, json={**BODY, **wanted, "id": "mine"})).json()
        expected = [-token_id / 1000 for token_id in TOKENS]
        assert len(answer["output_log_probs"]) == len(expected)
        assert answer["cum_log_probs"] == pytest.approx(sum(answer["output_log_probs"]), rel=1e-5)
        assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (len(PROMPT_IDS), len(TOKENS))
        assert (answer["batch_index"], answer["sequence_index"], answer["id"]) == (0, 0, "mine")
        plain = (await client.post(URL, json=BODY)).json()
        assert plain.keys() & {"output_log_probs", "cum_log_probs", "num_input_tokens", "id"} == set()

    with_client(tmp_path, talkative(), test)


def test_several_sequences_come_as_lists(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = (await client.post(URL, json={**BODY, "num_return_sequences": 2, "top_k": 5})).json()
        assert answer["text_output"] == [PROMPT + ANSWER] * 2
        assert (answer["batch_index"], answer["sequence_index"]) == ([0, 0], [0, 1])

    with_client(tmp_path, talkative(), test)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_stream_has_pieces_or_one_whole_answer(tmp_path: Path, is_stream: bool) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(f"{URL}_stream", json={**BODY, "stream": is_stream, "return_log_probs": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        objects = sent_events(response.text)
        text = "".join(each["text_output"] for each in objects)
        if is_stream:
            assert text == ANSWER, "pieces never include the prompt"
            assert len(objects) > 1
            probabilities = [p for each in objects for p in _list(each["output_log_probs"])]
            assert len(probabilities) == len(TOKENS)
            assert objects[-1]["cum_log_probs"] == pytest.approx(sum(probabilities), rel=1e-5)
        else:
            assert (text, len(objects)) == (PROMPT + ANSWER, 1)

    dense = talkative()
    dense.step_s = 0.002
    with_client(tmp_path, dense, test)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


WRONG = [
    ({"text_input": None}, ["text_input"]),
    ({"max_tokens": None}, ["max_tokens", "INT32"]),
    ({"max_tokens": 0}, ["max_tokens is 0", "at least 1"]),
    ({"max_tokens": -5}, ["max_tokens is -5"]),
    ({"max_tokens": 2**31}, ["2147483648", "2147483647"]),
    ({"max_tokens": "20"}, ["'20'", "INT32"]),
    ({"max_tokens": [1, 2]}, ["2 values", "must have 1"]),
    ({"max_tokens": True}, ["true", "INT32"]),
    ({"text_input": ["a", "b"]}, ["text_input has 2 values"]),
    ({"text_input": 5}, ["5", "BYTES"]),
    ({"text_input": ""}, ["prompt is empty"]),
    ({"beam_width": 0}, ["beam_width is 0", "at least 1"]),
    ({"beam_width": 17}, ["beam_width is 17", "from 1 to 16"]),
    ({"beam_width": 2, "num_return_sequences": 3}, ["num_return_sequences is 3", "which is 2"]),
    ({"beam_width": 2, "top_p": 0.5}, ["top_p is 0.5", "beam search"]),
    ({"beam_width": 2, "repetition_penalty": 1.5}, ["repetition_penalty is 1.5", "beam search"]),
    ({"beam_width": 2, "length_penalty": 11.0}, ["length_penalty is 11.0", "-10 to 10"]),
    ({"beam_search_diversity_rate": 0.5}, ["beam_search_diversity_rate is 0.5", "must be 0.0"]),
    ({"temperature": -1.0}, ["temperature is -1"]),
    ({"temperature": 1e300}, ["temperature is inf"]),
    ({"top_p": 1.5}, ["top_p is 1.5"]),
    ({"top_k": -3}, ["top_k is -3"]),
    ({"random_seed": -1}, ["-1", "UINT64"]),
    ({"end_id": 10**6}, ["1000000", "vocabulary"]),
    ({"num_return_sequences": 0}, ["num_return_sequences is 0"]),
    ({"num_return_sequences": 20}, ["num_return_sequences is 20", "16"]),
    ({"bad_words": ["x"] * 9000}, ["9000 strings", "8192"]),
    ({"stop_words": ["x"] * 100}, ["stop has 100", "16"]),
    ({"lora_weights": [1.0]}, ["lora_weights", "not supported"]),
    ({"lora_task_id": -1}, ["-1", "UINT64"]),
    ({"prompt_embedding_table": [1.0]}, ["prompt_embedding_table", "gateway.enable_prompt_embeds is not set"]),
    ({"return_perf_metrics": True}, ["return_perf_metrics is true", "not supported"]),
    ({"stream": True}, ["stream is true", "generate_stream"]),
    ({"gpt_model_type": "V1"}, ["gpt_model_type is 'V1'", "inflight_fused_batching"]),
    ({"id": "x" * 101}, ["id has 101 characters", "100"]),
    ({"parameters": {"gpt_model_type": "V1"}}, ["gpt_model_type is 'V1'"]),
    ({"temperature": 10**400}, ["temperature", "FP32"]),
    ({"random_seed": 10**30}, ["1000000000000000000000000000000", "UINT64"]),
    ({f"field{i}": 1 for i in range(300)}, ["304 fields", "256"]),
    ({"id": 7}, ["id must be a string"]),
    ({"guided_decoding_guide": "a+"}, ["needs a guided_decoding_guide_type"]),
    ({"guided_decoding_guide_type": "regex"}, ["regex needs a guided_decoding_guide"]),
    ({"guided_decoding_guide_type": "xml"}, ["'xml'", "json_schema"]),
    ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(a"}, ["regex"]),
    ({"parameters": 7}, ["parameters is 7"]),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[httpx2.Response]:
    """One gateway's answers to all wrong requests, after which it answers a right one."""
    bodies = [{**BODY, **options} for options, _ in WRONG]
    *found, right = answers_to(tmp_path_factory.mktemp("refusals"), talkative(), URL, [*bodies, BODY])
    assert right.status_code == 200, right.text
    return found


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[json.dumps(options)[:40] for options, _ in WRONG])
def test_a_wrong_request_gets_a_400_with_value_and_limit(refusals: list[httpx2.Response], number: int) -> None:
    response = refusals[number]
    assert response.status_code == 400, response.text
    error = response.json()
    assert error.keys() == {"error"} and len(error["error"]) < 500
    for word in WRONG[number][1]:
        assert word in error["error"]


def test_wrong_bodies_models_and_versions(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for content, status in (
            (b"", 400),
            (b"[]", 400),
            (b"{", 400),
            (b'{"text_input": NaN}', 400),
            (b"[" * 100_000, 413),
            (b" " * 3_000_000, 413),
        ):
            response = await client.post(URL, content=content)
            assert response.status_code == status, (content[:20], response.text)
            assert isinstance(response.json()["error"], str)
        for url in ("/v2/models/llama/generate", "/v2/models/ensemble/versions/2/generate"):
            response = await client.post(url, json=BODY)
            assert response.status_code == 404 and "unknown" in response.json()["error"]
        assert (await client.post("/v2/models/ensemble/versions/1/generate", json=BODY)).status_code == 200
        assert (await client.get("/v2/nothing")).json()["error"] == "this server has no GET /v2/nothing"

    with_client(tmp_path, talkative(), test)


def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    dense = FakeDense(lambda submit: ids(" a") * 10_000, step_s=0.001)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"text_input": PROMPT, "max_tokens": 1000, "stream": True}
        async with client.stream("POST", f"{URL}_stream", json=body) as response:
            async for _ in response.aiter_lines():
                break
        await until(lambda: len(dense.cancelled_seq_ids) == 1)

    with_client(tmp_path, dense, test)


def test_stop_ends_requests_of_the_same_id_with_what_they_have(tmp_path: Path) -> None:
    """Also two at once, and not a request with another id."""
    dense = FakeDense(lambda submit: ids(" a") * 10_000, step_s=0.001)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"text_input": PROMPT, "max_tokens": 1900}
        calls = [
            asyncio.ensure_future(client.post(URL, json={**body, "id": name, "return_num_output_tokens": True}))
            for name in ("one", "one", "other")
        ]
        await until(lambda: len(dense.submits) == 3)
        stop = {"input_ids": [1], "input_lengths": 0, "request_output_len": 0, "stop": True}
        stopped = await client.post("/v2/models/tensorrt_llm/generate", json={**stop, "id": "one"})
        assert stopped.status_code == 200
        for call in calls[:2]:
            response = await call
            assert response.status_code == 200 and response.json()["num_output_tokens"] < 1900
        assert not calls[2].done()
        nameless = await client.post("/v2/models/tensorrt_llm/generate", json=stop)
        assert nameless.status_code == 400 and "stop needs the id" in nameless.json()["error"]
        calls[2].cancel()

    with_client(tmp_path, dense, test)
