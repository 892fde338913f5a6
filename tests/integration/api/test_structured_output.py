"""Forms of answers through the whole cluster, over both APIs: the answer has the form, whatever options go with it."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx2
import jsonschema
import openai
import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.support.clients.http_clients import events
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, request

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 120, "seed": 3}
PROMPT: dict[str, Any] = {"prompt": "The number is", "max_tokens": 120, "seed": 3}
PHONE = r"\d{3}-[a-f]{2,4}"
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
Choice = dict[str, Any]


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> httpx2.Client:
    return httpx2.Client(base_url=f"http://{cluster.http_address}", timeout=REQUEST_TIMEOUT_S)


def post(http: httpx2.Client, body: dict[str, Any], **options: Any) -> list[Choice]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = http.post(path, json=body | options)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def text_of(choice: Choice) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def check_person(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


FORMS: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": RESPONSE_FORMAT},
    "json": {"structured_outputs": {"json": PERSON}},
    "no whitespace": {"structured_outputs": {"json": json.dumps(PERSON), "disable_any_whitespace": True}},
    "guided_json": {"guided_json": PERSON},
    "guided_json text": {"guided_json": json.dumps(PERSON)},
    "json_schema": {"json_schema": json.dumps(PERSON)},
}
ASKED = {"chat": CHAT, "completion": PROMPT}


@pytest.fixture(scope="module")
def persons(http: httpx2.Client) -> dict[tuple[str, str], Choice]:
    """The answers to all requests with a schema, which run at once."""
    keys = [(form, body) for form in FORMS for body in ASKED]
    with ThreadPoolExecutor(len(keys)) as threads:
        answers = threads.map(lambda key: post(http, ASKED[key[1]], **FORMS[key[0]]), keys)
        return {key: choice for key, [choice] in zip(keys, answers, strict=True)}


@pytest.mark.parametrize("body", ASKED)
@pytest.mark.parametrize("form", FORMS)
def test_a_schema_however_it_is_given(persons: dict[tuple[str, str], Choice], body: str, form: str) -> None:
    choice = persons[form, body]
    assert choice["finish_reason"] == "stop"
    check_person(text_of(choice))
    if FORMS[form].get("structured_outputs", {}).get("disable_any_whitespace"):
        assert not re.search(r"[,:{\[] ", re.sub(r'"[^"]*"', '""', text_of(choice)))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": PHONE}}, PHONE),
        ({"guided_regex": PHONE}, PHONE),
        ({"regex": f"^{PHONE}$"}, PHONE),
        ({"structured_outputs": {"choice": ["yes", "no, never", "é\n"]}}, "yes|no, never|é\n"),
        ({"guided_choice": ["(a)", "b|c"]}, r"\(a\)|b\|c"),
        ({"structured_outputs": {"grammar": 'root ::= "a"{2,5} [0-9]'}}, "a{2,5}[0-9]"),
        ({"guided_grammar": 'start: A+ /[0-9]/\nA: "ab"'}, "(ab)+[0-9]"),
        ({"ebnf": 'root ::= "x" | "y"'}, "x|y"),
        ({"grammar": 'root ::= "x" | "y"'}, "x|y"),
    ],
)
def test_patterns_choices_and_grammars(http: httpx2.Client, form: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        [choice] = post(http, PROMPT, **form, seed=seed, temperature=1.5)
        assert choice["finish_reason"] == "stop", choice
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


@pytest.mark.parametrize(
    "form",
    [{"response_format": TAG}, {"structured_outputs": {"structural_tag": json.dumps(TAG)}}],
    ids=["response_format", "structured_outputs"],
)
def test_a_structural_tag(http: httpx2.Client, form: dict[str, Any]) -> None:
    # Without a bias for its first letter the model would hardly ever begin a tag.
    bias = {str(token_id): 100 for token_id in http.post("/tokenize", json={"prompt": "<f>"}).json()["tokens"]}
    [choice] = post(http, PROMPT, **form, logit_bias=bias, max_tokens=200)
    assert choice["finish_reason"] == "stop", choice
    [content] = re.fullmatch(r"(?s).*?<f>(.*)</f>", choice["text"]).groups()
    check_person(content)


def test_a_json_object(http: httpx2.Client) -> None:
    options = {"n": 8, "temperature": 1.5, "max_tokens": 150}
    answers = post(http, CHAT | options, response_format={"type": "json_object"})
    ended = [text_of(each) for each in answers if each["finish_reason"] == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    assert all(text_of(each).startswith("{") for each in answers)


def test_answers_with_all_other_options(http: httpx2.Client) -> None:
    options = {"n": 4, "logprobs": True, "top_logprobs": 3, "temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.5}
    plain = post(http, CHAT, response_format=RESPONSE_FORMAT, **options)
    assert len({text_of(each) for each in plain}) > 1, "each answer has a seed of its own"
    for choice in plain:
        assert choice["finish_reason"] == "stop"
        check_person(text_of(choice))
        assert "".join(each["token"] for each in choice["logprobs"]["content"]) == text_of(choice)
    assert [text_of(each) for each in post(http, CHAT, response_format=RESPONSE_FORMAT, **options)] == [
        text_of(each) for each in plain
    ]
    streamed = dict.fromkeys(range(4), "")
    body = CHAT | options | {"response_format": RESPONSE_FORMAT, "stream": True}
    for event in events(http.post("/v1/chat/completions", json=body).text):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert list(streamed.values()) == [text_of(each) for each in plain]


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"ignore_eos": True}, "abcabc", "stop"),  # nothing can follow
        ({"min_tokens": 50}, "abcabc", "stop"),  # the form wins
        ({"bad_words": ["c"]}, "abcabc", "stop"),
        ({"allowed_token_ids": [70, 71]}, "abcabc", "stop"),
        ({"stop": ["ca"]}, "ab", "stop"),
        ({"stop": ["ca"], "include_stop_str_in_output": True}, "abca", "stop"),
    ],
)
def test_what_contradicts_a_form(http: httpx2.Client, options: dict[str, Any], text: str, reason: str) -> None:
    [choice] = post(http, PROMPT, guided_choice=["abcabc"], **options)
    assert (choice["text"], choice["finish_reason"]) == (text, reason)


def test_max_tokens_cuts_a_form(http: httpx2.Client) -> None:
    [choice] = post(http, PROMPT, guided_regex="[ab]{500}", max_tokens=7)
    assert choice["finish_reason"] == "length"
    assert re.fullmatch("[ab]{7,}", choice["text"])


def test_min_tokens_delays_the_end_where_the_form_can_go_on(http: httpx2.Client) -> None:
    body = PROMPT | {"guided_regex": "[ab ]*", "min_tokens": 40, "max_tokens": 60}
    response = http.post("/v1/completions", json=body)
    assert response.json()["usage"]["completion_tokens"] >= 40


def test_openai_parses_the_answer(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0) as official:
        answer = official.chat.completions.create(
            model=official.models.list().data[0].id, response_format=RESPONSE_FORMAT, **CHAT
        )
    assert answer.choices[0].finish_reason == "stop"
    check_person(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"json_schema": json.dumps({"type": "boolean"})}, "true|false"),
        ({"json_object": True}, r"\{.*"),
        ({"regex": PHONE}, PHONE),
        ({"choice": {"choices": ["yes", "no"]}}, "yes|no"),
        ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'}, "x"),
    ],
)
def test_forms_over_grpc(cluster: Cluster, form: dict[str, Any], pattern: str) -> None:
    sampling = {"structured_output": sampling_pb2.StructuredOutput(**form), "temperature": 1.0, "seed": 2}
    answer = cluster.generate("The answer is", 60, **sampling)
    assert re.fullmatch(pattern, answer.text, re.DOTALL), answer.text


@pytest.mark.parametrize("form", [{}, {"json_object": False}, {"choice": {}}, {"regex": "("}, {"json_schema": "x"}])
def test_wrong_forms_over_grpc(cluster: Cluster, form: dict[str, Any]) -> None:
    message = request("x", 5, structured_output=sampling_pb2.StructuredOutput(**form))
    with pytest.raises(grpc.RpcError) as refused:
        cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "structured_output" in refused.value.details()


def test_a_form_that_fails_later_ends_its_stream_alone(http: httpx2.Client) -> None:
    """It is legal, and it shows its cost only after the tokens that are tried before it runs."""
    late = {"grammar": "start: A B\nA: /[xy]{120}/\nB: /((a{100}){100}){100}/"}

    def fail() -> httpx2.Response:
        return http.post("/v1/completions", json=PROMPT | {"structured_outputs": late, "max_tokens": 600})

    with ThreadPoolExecutor(4) as threads:
        failing = threads.submit(fail)
        others = [threads.submit(post, http, CHAT, response_format=RESPONSE_FORMAT, seed=i) for i in range(3)]
        for other in others:
            [choice] = other.result()
            check_person(text_of(choice))
    response = failing.result()
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "structured_outputs.grammar"), response.text
    assert "the form of the output cannot be followed" in error["message"]
    stream = http.post("/v1/completions", json=PROMPT | {"structured_outputs": late, "max_tokens": 600, "stream": True})
    assert stream.status_code == 200, "its first tokens were sent, though the same form has exploded before"
    *chunks, last = [json.loads(part.removeprefix("data: ")) for part in stream.text.split("\n\n") if part]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert len(text) > 100 and last["error"]["code"] == "invalid_request", last
    assert last["error"]["param"] == error["param"]


def test_streams_without_a_form_get_the_same_tokens_beside_such_with_one(cluster: Cluster) -> None:
    prompts = [f"Number {i} is" for i in range(4)]
    alone = [cluster.generate(prompt, 60, seed=1, temperature=1.0).token_ids for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        formed = [
            threads.submit(cluster.generate, prompt, 60, temperature=1.0, seed=1,
                           structured_output=sampling_pb2.StructuredOutput(regex="[0-9]{40,}"))
            for prompt in prompts
        ]  # fmt: skip
        plain = [threads.submit(cluster.generate, prompt, 60, seed=1, temperature=1.0) for prompt in prompts]
        assert [each.result().token_ids for each in plain] == alone
        assert all(each.result().text.isdecimal() for each in formed)
    cluster.wait_idle()


def test_a_finish_of_a_complete_form_names_no_stop_token(cluster: Cluster) -> None:
    form = sampling_pb2.StructuredOutput(choice=sampling_pb2.Choice(choices=["abc"]))
    finish = cluster.generate("x", 20, structured_output=form).finish
    assert finish.reason == gateway_pb2.FINISH_REASON_STOP
    assert not finish.HasField("stop_token_id") and not finish.HasField("stop_string")
