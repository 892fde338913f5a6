"""Text Generation Inference's routes: asked by Hugging Face's client, and compared with completions."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import IncompleteGenerationError, OverloadedError, ValidationError
from structlog.testing import capture_logs

from tests.support.clients.gateway_calls import EOS, REFERENCE, ids
from tests.support.clients.http_clients import async_client
from tests.support.clients.http_gateway import COMPLETIONS, check_error, say, with_client
from tests.support.cluster import free_port
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense

URL, STREAM = "/generate", "/generate_stream"
TEXT = " in Łódź, 東京."
PROMPT = "a city"
NAME = "hers"  # of a request of Hugging Face's client


def ask(directory: Path, dense: FakeDense, **arguments: Any) -> Any:
    """What Hugging Face's client makes of the answer of a gateway."""

    answers = []

    def generate(address: str) -> Any:
        client = InferenceClient(f"http://{address}", headers={"x-request-id": NAME})
        found = client.text_generation(PROMPT, **arguments)
        return list(found) if arguments.get("stream") else found

    async def body() -> None:
        async with running_gateway(directory, dense, http_address=f"127.0.0.1:{free_port()}") as gateway:
            answers.append(await asyncio.to_thread(generate, gateway.http_address))

    run(body())
    return answers[0]


def until_eos() -> FakeDense:
    return FakeDense(lambda submit: [*ids(TEXT), EOS][: submit.spec.max_tokens])


def test_the_client_of_hugging_face_gets_the_text(tmp_path: Path) -> None:
    assert ask(tmp_path, until_eos()) == TEXT


def test_the_client_gets_the_tokens_with_their_log_probabilities(tmp_path: Path) -> None:
    found = ask(tmp_path, until_eos(), details=True, decoder_input_details=True, top_n_tokens=2, return_full_text=True)
    details, prompt = found.details, REFERENCE.encode(PROMPT)
    assert found.generated_text == PROMPT + TEXT
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("eos_token", len(ids(TEXT)) + 1, None)
    assert [each.id for each in details.tokens] == [*ids(TEXT), EOS]
    assert "".join([each.text for each in details.tokens if not each.special]) == TEXT
    assert [each.special for each in details.tokens] == [False] * len(ids(TEXT)) + [True]
    assert details.tokens[-1].text == REFERENCE.eos_token
    assert [each.id for each in details.prefill] == prompt
    assert [len(each) for each in details.top_tokens] == [2] * len(details.tokens)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": PROMPT, "max_tokens": 100, "logprobs": 2, "prompt_logprobs": 0}
        [choice] = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        assert [each.logprob for each in details.tokens] == choice["logprobs"]["token_logprobs"]
        rows = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        of_prompt = [each[str(token_id)]["logprob"] for token_id, each in rows]
        assert [each.logprob for each in details.prefill] == [None, *of_prompt]

    with_client(tmp_path, until_eos(), test)


def test_a_stream_of_the_client_has_an_event_for_each_token(tmp_path: Path) -> None:
    found = ask(tmp_path, until_eos(), stream=True, details=True)
    assert [each.token.id for each in found] == [*ids(TEXT), EOS]
    assert [each.index for each in found] == list(range(1, len(found) + 1))
    assert "".join([each.token.text for each in found if not each.token.special]) == TEXT
    assert [each.generated_text for each in found] == [None] * (len(found) - 1) + [TEXT]
    last = found[-1].details
    assert (last.finish_reason, last.generated_tokens) == ("eos_token", len(found))
    assert last.input_length == len(REFERENCE.encode(PROMPT))


def test_errors_are_those_that_the_client_knows(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="maximum context"):
        ask(tmp_path, FakeDense(say(" one"), max_model_len=3))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_busy_server_is_overloaded(is_stream: bool, tmp_path: Path) -> None:
    dense = FakeDense(say(" one"))
    dense.errors = {NAME: (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")}
    with pytest.raises(OverloadedError, match="no room"):
        ask(tmp_path, dense, stream=is_stream)


def test_an_aborted_stream_is_an_incomplete_generation(tmp_path: Path) -> None:
    """As TGI ends a stream without a whole text: `Event::from(InferError::IncompleteGeneration)`."""
    texts = []

    def read(address: str) -> None:
        client = InferenceClient(f"http://{address}")  # a stream ends with its client
        for each in client.text_generation(PROMPT, stream=True, details=True):
            texts.append(each.token.text)

    async def body() -> None:
        async with running_gateway(tmp_path, dense, http_address=f"127.0.0.1:{free_port()}") as gateway:
            reading = asyncio.create_task(asyncio.to_thread(read, gateway.http_address))
            await until(lambda: len(texts) == 2)
            url = f"http://{gateway.http_address}/abort_request"
            await asyncio.to_thread(httpx2.post, url, json={"abort_all": True})
            with pytest.raises(IncompleteGenerationError, match="aborted"):
                await reading

    dense = FakeDense(lambda submit: ids(TEXT)[:2])  # and no more
    run(body())


@pytest.mark.parametrize("path", [URL, "/"])
@pytest.mark.parametrize("details", [False, True])
def test_an_aborted_answer_is_an_incomplete_generation(path: str, details: bool, tmp_path: Path) -> None:
    """As TGI answers without a whole text: `InferError::IncompleteGeneration`."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"inputs": PROMPT, "parameters": {"details": details}}
        reading = asyncio.create_task(client.post(path, json=body))
        await until(lambda: len(dense.submits) == 1)
        while not reading.done():
            await client.post("/abort_request", json={"abort_all": True})
            await asyncio.wait({reading}, timeout=0.01)
        response = await reading
        assert response.status_code == 499 and response.json()["error_type"] == "incomplete_generation"
        assert "aborted" in response.json()["error"]

    dense = FakeDense(lambda submit: ids(TEXT)[:2])  # and no more
    with_client(tmp_path, dense, test)


def test_a_stop_string_ends_the_answer_and_is_kept(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"inputs": PROMPT, "parameters": {"stop": [","], "details": True}}
        answer = (await client.post(URL, json=body)).json()
        assert answer["generated_text"] == " in Łódź," and answer["details"]["finish_reason"] == "stop_sequence"
        cut = (await client.post(URL, json={"inputs": PROMPT, "parameters": {"max_new_tokens": 2}})).json()
        assert cut == {"generated_text": REFERENCE.decode(ids(TEXT)[:2])} or cut["generated_text"] in TEXT
        assert dense.submits[-1].spec.max_tokens == 2

    dense = until_eos()
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize(
    ("given", "temperature", "seed"),
    [
        ({}, 0, None),
        ({"temperature": 1.0}, 0, None),
        ({"do_sample": True, "seed": 5}, 1, 5),
        ({"temperature": 0.5, "seed": 5}, 0.5, 5),
        ({"top_k": 3, "seed": 5}, 1, 5),
        ({"top_p": 0.5, "seed": 5}, 1, 5),
    ],
)
def test_tokens_are_drawn_only_if_asked_for(
    given: dict[str, Any], temperature: float, seed: int | None, tmp_path: Path
) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"inputs": PROMPT, "parameters": {**given, "details": True}}
        answer = await client.post(URL, json=body)
        assert answer.json()["details"]["seed"] == seed, answer.text
        sampling = dense.submits[-1].spec.sampling
        assert (sampling.temperature if sampling.HasField("temperature") else 1) == temperature
        assert dense.submits[-1].spec.max_tokens == 100

    dense = until_eos()
    with_client(tmp_path, dense, test)


def test_the_likeliest_of_several_answers_comes_first(tmp_path: Path) -> None:
    """By the mean of its tokens, not by their sum. The fake worker's log-probability of a token falls with its id."""
    answers = [[300, EOS], [100] * 5, [900] * 5]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        options = {"best_of": 3, "do_sample": True, "seed": 0, "max_new_tokens": 5, "details": True}
        answer = (await client.post(URL, json={"inputs": PROMPT, "parameters": options})).json()
        others = answer["details"].pop("best_of_sequences")
        found = [answer["details"], *others]
        means = [math.fsum(each["logprob"] for each in one["tokens"]) / len(one["tokens"]) for one in found]
        assert means == sorted(means, reverse=True)
        assert [one["tokens"][0]["id"] for one in found] == [100, 300, 900]
        assert answer["generated_text"] == "".join([each["text"] for each in found[0]["tokens"]])
        bare = await client.post(URL, json={"inputs": PROMPT, "parameters": {**options, "details": False}})
        assert bare.json() == {"generated_text": answer["generated_text"]}

    with_client(tmp_path, FakeDense(lambda submit: answers[submit.spec.sampling.seed]), test)


def test_a_body_may_be_sent_to_each_of_the_routes(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"inputs": PROMPT, "parameters": None}
        answers = {path: await client.post(path, json=body) for path in (URL, "/", STREAM)}
        assert answers[URL].json() == {"generated_text": TEXT}
        assert answers["/"].json() == [{"generated_text": TEXT}]
        events = [each.removeprefix("data: ") for each in answers[STREAM].text.split("\n\n") if each]
        assert len(events) == len(ids(TEXT)) + 1 and "[DONE]" not in answers[STREAM].text
        for path in (URL, "/"):
            streamed = await client.post(path, json=body | {"stream": True})
            assert streamed.text == answers[STREAM].text
        of_sglang = (await client.post(URL, json={"text": PROMPT})).json()
        assert of_sglang["text"] == TEXT
        info = (await client.get("/info")).json()
        assert info["max_total_tokens"] == 2048 and info["model_pipeline_tag"] == "text-generation"

    with_client(tmp_path, until_eos(), test)


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (URL, {"inputs": 5}, "inputs", "5"),
    (URL, {"inputs": None}, "inputs", "null"),
    (URL, {"inputs": ""}, "inputs", "empty"),
    (URL, {"inputs": "a", "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens", "0"),
    (URL, {"inputs": "a", "parameters": {"temperature": -1.0}}, "parameters.temperature", "-1"),
    (URL, {"inputs": "a", "parameters": {"top_k": -5}}, "parameters.top_k", "-5"),
    (URL, {"inputs": "a", "parameters": {"best_of": 1000}}, "parameters.best_of", "1000"),
    (URL, {"inputs": "a", "parameters": {"stop": ["x"] * 17}}, "parameters.stop", "17"),
    (URL, {"inputs": "a", "parameters": {"details": True, "top_n_tokens": 500}}, "parameters.top_n_tokens", "500"),
    (URL, {"inputs": "a", "parameters": {"watermark": True}}, "parameters.watermark", "not supported"),
    (URL, {"inputs": "a", "parameters": {"typical_p": 0.5}}, "parameters.typical_p", "not supported"),
    (URL, {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": {}}}},
     "parameters.grammar.value", "text"),
    (URL, {"inputs": "a", "parameters": {"grammar": {"type": "json_schema", "value": {"schema": 5}}}},
     "parameters.grammar.value", "schema"),
    (STREAM, {"inputs": "a", "parameters": {"best_of": 2}}, "parameters.best_of", "stream"),
    ("/", {"inputs": "a", "stream": True, "parameters": {"decoder_input_details": True}},
     "parameters.decoder_input_details", "stream"),
]  # fmt: skip


def test_wrong_requests_name_the_field(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body, param, word in WRONG:
            response = await client.post(path, json=body)
            message = response.json()["error"]
            assert (response.status_code, response.json()) == (422, {"error": message, "error_type": "validation"})
            assert param in message and word in message

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_what_is_no_json_has_an_error_of_this_server(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in ("/", STREAM):
            for body, content_type, status, word in (
                (b'{"inputs": "a",', "application/json", 422, "not JSON"),
                (b"", "application/json", 422, "body"),
                (b"{}", "text/plain", 415, "text/plain"),
            ):
                response = await client.post(path, content=body, headers={"content-type": content_type})
                message = response.json()["error"]
                assert (response.status_code, response.json()) == (
                    status, {"error": message, "error_type": "validation"},
                )  # fmt: skip
                assert word in message

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_errors_do_not_depend_on_the_name_of_the_host(tmp_path: Path) -> None:
    """Without a valid one Starlette puts the name of a Unix socket in front of the path of a URL."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post("/", json={}, headers={"host": "a/b"})
        assert (response.status_code, response.json()["error_type"]) == (422, "validation")

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_unknown_fields_are_logged_once(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in (URL, STREAM, "/"):
            with capture_logs() as logs:
                await client.post(path, json={"inputs": "a", "beyond": 1, "parameters": {"within": 1}})
            assert [each.get("fields") for each in logs if each.get("num_fields")] == ["beyond", "within"], path

    with_client(tmp_path, until_eos(), test)


def test_the_document_names_the_errors_of_each_route(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        paths = (await client.get("/openapi.json")).json()["paths"]
        for path, status, names in (
            (STREAM, "422", ["TgiErrorBody"]),
            (STREAM, "429", ["TgiErrorBody"]),
            (URL, "400", ["ErrorBody"]),
            (URL, "422", ["TgiErrorBody"]),
            (URL, "429", ["ErrorBody", "TgiErrorBody"]),
        ):
            schema = paths[path]["post"]["responses"][status]["content"]["application/json"]["schema"]
            found = [each["$ref"].rpartition("/")[2] for each in schema.get("anyOf", [schema])]
            assert found == names, (path, status)
        assert "400" not in paths[STREAM]["post"]["responses"]

    with_client(tmp_path, until_eos(), test)


def test_a_prompt_has_one_name(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for prompt in ({"text": PROMPT}, {"input_ids": [5]}):
            [name] = prompt
            answer = await client.post(URL, json=prompt | {"inputs": PROMPT, "parameters": {"details": True}})
            check_error(answer, 400, "inputs", "Text Generation Inference", f"with {name}")
            assert (await client.post(URL, json={name: None, "inputs": PROMPT})).json() == {"generated_text": TEXT}
            assert (await client.post(URL, json=prompt | {"inputs": None})).json()["text"] == TEXT

    with_client(tmp_path, until_eos(), test)


@pytest.mark.parametrize(
    ("grammar", "of_vllm"),
    [
        ({"type": "json", "value": {"const": 7}}, {"json": {"const": 7}}),
        ({"type": "json_schema", "value": {"name": "n", "schema": {"const": 7}}}, {"json": {"const": 7}}),
        ({"type": "regex", "value": "[a-z]+"}, {"regex": "[a-z]+"}),
    ],
)
def test_a_grammar_is_the_form_of_completions(grammar: Any, of_vllm: Any, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body in (
            (URL, {"inputs": PROMPT, "parameters": {"grammar": grammar}}),
            (COMPLETIONS, {"prompt": PROMPT, "structured_outputs": of_vllm}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
        first, second = (each.spec.sampling.structured_output for each in dense.submits)
        for form in (first, second):
            form.ClearField("field_name")
        assert first == second and first.ByteSize() > 0

    dense = until_eos()
    with_client(tmp_path, dense, test)


def test_a_prompt_is_cut_at_its_beginning(tmp_path: Path) -> None:
    async def body() -> None:
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            await client.post(URL, json={"inputs": PROMPT * 5, "parameters": {"truncate": 3}})
        assert list(dense.submits[-1].spec.prompt_token_ids) == REFERENCE.encode(PROMPT * 5)[-3:]

    dense = until_eos()
    run(body())
