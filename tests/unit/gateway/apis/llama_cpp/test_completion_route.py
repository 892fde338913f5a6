"""llama.cpp's /completion: the same answers as completions give, in llama.cpp's objects."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.common.token_logprobs import LogprobRows
from services.gateway.link.journal_entry import JournalEntry
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, answers_to, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

URL = "/completion"
TEXT = " in Łódź, 東京."
PROMPT = "a city"


def events(stream: str) -> list[dict[str, Any]]:
    """The objects of a stream, which nothing follows."""
    *lines, end = stream.split("\n\n")
    assert end == "" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def answering() -> FakeDense:
    return FakeDense(lambda submit: [*ids(TEXT), EOS][: submit.spec.max_tokens])


def test_an_answer_and_what_is_known_about_it(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for url in (URL, "/completions"):
            answer = (await client.post(url, json={"prompt": PROMPT, "seed": 5})).json()
            assert (answer["content"], answer["tokens"], answer["stop"]) == (TEXT, [], True)
            assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == ("eos", "", False)
            submit = dense.submits[-1]
            assert answer["tokens_evaluated"] == len(submit.spec.prompt_token_ids)
            assert answer["tokens_predicted"] == len(ids(TEXT)) + 1
            assert answer["timings"]["predicted_n"] == len(ids(TEXT)) + 1
            assert answer["prompt"].endswith(PROMPT)
            settings = answer["generation_settings"]
            assert (settings["temperature"], settings["top_k"], settings["seed"]) == (0.8, 40, 5)
            assert (submit.spec.sampling.temperature, submit.spec.sampling.top_k) == (pytest.approx(0.8), 40)
        cut = (await client.post(URL, json={"prompt": PROMPT, "n_predict": 3, "return_tokens": True})).json()
        assert (cut["tokens"], cut["stop_type"]) == (ids(TEXT)[:3], "limit")
        stopped = (await client.post(URL, json={"prompt": PROMPT, "stop": [",", ""]})).json()
        assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == (" in Łódź", "word", ",")
        chosen = {"prompt": PROMPT, "response_fields": ["content", "timings/predicted_n", "no"], "n_predict": 3}
        assert (await client.post(URL, json=chosen)).json().keys() == {"content", "timings/predicted_n"}

    dense = answering()
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("url", [COMPLETIONS, CHATS])
def test_the_length_may_have_its_name_at_the_routes_of_openai(url: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"prompt": "a"} if url == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for asked, expected in (({"n_predict": 3}, 3), ({"n_predict": 3, "max_tokens": 3}, 3)):
            assert (await client.post(url, json=given | asked)).status_code == 200
            assert dense.submits[-1].spec.max_tokens == expected
        assert (await client.post(url, json=given | {"n_predict": -1})).status_code == 200
        spec = dense.submits[-1].spec
        assert spec.max_tokens == 64 - len(spec.prompt_token_ids), "the rest of the context"
        wrong: list[tuple[dict[str, Any], str]] = [({"n_predict": 3, "max_tokens": 4}, "same"), ({"n_predict": 0}, "0")]
        for asked, said in wrong:
            refused = await client.post(url, json=given | asked)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "n_predict", refused.text
            assert said in refused.json()["error"]["message"]

    dense = FakeDense(lambda submit: [70] * submit.spec.max_tokens, max_model_len=64)
    with_client(tmp_path, dense, test)


def test_options_are_those_of_completions(tmp_path: Path) -> None:
    same = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.25,
        "seed": 3, "stop": "x", "grammar": 'root ::= "a"*',
    }  # fmt: skip
    own = {"n_predict": 5, "repeat_penalty": 1.5, "logit_bias": [[70, 1.5], [80, -2]], "repeat_last_n": -1}
    of_completions = {"max_tokens": 5, "repetition_penalty": 1.5, "logit_bias": {"70": 1.5, "80": -2}}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for url, body in ((COMPLETIONS, same | of_completions), (URL, same | own)):
            response = await client.post(url, json={"prompt": PROMPT, **body})
            assert response.status_code == 200, response.text
        first, second = dense.submits
        for each in (first, second):
            for name in ("seq_id", "queue_timeout_ms"):
                each.ClearField(name)
            each.spec.ClearField("request_id")
        assert first == second

    dense = FakeDense(lambda submit: ids("a") * submit.spec.max_tokens)
    with_client(tmp_path, dense, test)


def test_an_end_of_text_that_is_ignored_is_never_sampled(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": PROMPT, "n_predict": 3}
        banned = [{"token": EOS, "bias": None}]
        for ignores, found in ((True, banned), (False, [])):
            answer = (await client.post(URL, json=body | {"ignore_eos": ignores})).json()
            assert answer["generation_settings"]["logit_bias"] == found
            words = [list(word.token_ids) for word in dense.submits[-1].spec.sampling.bad_words]
            assert words == [[each["token"]] for each in found]

    dense = FakeDense(lambda submit: ids("a") * submit.spec.max_tokens)
    with_client(tmp_path, dense, test)


def test_samplers_that_are_not_named_have_no_effect(tmp_path: Path) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.5}
    neutral = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}  # of the message's other options: not set

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": PROMPT, "n_predict": 2, "repeat_last_n": 64}
        for top_k in (0, -1, -5):  # all tokens, as there
            await client.post(URL, json=body | {"top_k": top_k})
            assert not dense.submits[-1].spec.sampling.HasField("top_k")
        for given in (["xtc", "top_k", "temperature"], "xkt"):  # names, or letters
            answer = (await client.post(URL, json=body | options | {"samplers": given})).json()
            assert answer["generation_settings"]["samplers"] == ["temperature", "top_k"], answer
            sampling = dense.submits[-1].spec.sampling
            assert (sampling.temperature, sampling.top_k) == (0.5, 7)
            assert (sampling.top_p, sampling.min_p) == (neutral["top_p"], neutral["min_p"])
            assert sampling.repetition_penalty in (0.0, 1.0)
        await client.post(URL, json={"prompt": PROMPT, "n_predict": 2, **options, "samplers": []})
        sampling = dense.submits[-1].spec.sampling
        assert {name: getattr(sampling, name) for name in neutral} == neutral and not sampling.HasField("top_k")

    dense = answering()
    with_client(tmp_path, dense, test)


def test_biases_name_tokens_by_id_or_text_and_false_bans_them(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        word = " San Francisco"
        for bias in ([[70, 2.0], [80, False], [word, -1]], {"70": 2.0, "80": False, word: -1}):
            response = await client.post(URL, json={"prompt": PROMPT, "logit_bias": bias, "n_predict": 2})
            assert response.status_code == 200, response.text
            sampling = dense.submits[-1].spec.sampling
            assert [list(each.token_ids) for each in sampling.bad_words] == [[80]]
            of_word = dict.fromkeys(set(ids(word)), 0.0)
            for token_id in ids(word):
                of_word[token_id] -= 1.0
            assert dict(sampling.logit_bias) == {70: 2.0, **of_word}
            shown = {each["token"]: each["bias"] for each in response.json()["generation_settings"]["logit_bias"]}
            assert shown == {70: 2.0, 80: None, word: -1.0}

    dense = answering()
    with_client(tmp_path, dense, test)


def test_prompts_are_texts_ids_or_both_and_several_give_a_list(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for prompt, count in (([5, 6, 7], 1), ("a", 1), (["a", "b"], 2), ([[5, 6], "b", [5, "b"]], 3), ([["a"]], 1)):
            answers = (await client.post(URL, json={"prompt": prompt})).json()
            answers = answers if count > 1 else [answers]
            assert [(each["index"], each["content"]) for each in answers] == [(i, TEXT) for i in range(count)]
        await client.post(URL, json={"prompt": [5, " one", 6, " two"]})
        assert list(dense.submits[-1].spec.prompt_token_ids) == [5, *ids(" one"), 6, *ids(" two")]
        texts = [{"prompt_string": "a"}, {"prompt_string": "b", "multimodal_data": []}]
        for prompt, count in ((texts[0], 1), (texts, 2)):
            await client.post(URL, json={"prompt": prompt})
            given = [list(each.spec.prompt_token_ids)[-1:] for each in dense.submits[-count:]]
            assert sorted(given) == sorted(ids(each)[-1:] for each in "ab"[:count])
        twice = (await client.post(URL, json={"prompt": "a", "n_cmpl": 2})).json()
        assert [each["index"] for each in twice] == [0, 1]

    dense = answering()
    with_client(tmp_path, dense, test)


def test_a_prompt_without_an_answer_is_computed(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = (await client.post(URL, json={"prompt": [5, 6, 7], "n_predict": 0})).json()
        assert (answer["content"], answer["tokens_predicted"], answer["tokens_evaluated"]) == ("", 0, 3)

    with_client(tmp_path, answering(), test)


def test_a_stream_ends_with_the_object_that_has_stop(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(URL, json={"prompt": PROMPT, "stream": True, "timings_per_token": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        *pieces, last = events(response.text)
        assert "".join(each["content"] for each in pieces) == TEXT and len(pieces) > 1
        assert [token for each in pieces for token in each["tokens"]] == [*ids(TEXT), EOS]
        assert not any(each["stop"] for each in pieces) and last["stop"]
        assert (last["content"], last["tokens"], last["stop_type"]) == ("", [], "eos")
        assert pieces[-1]["timings"]["predicted_n"] == len(ids(TEXT)) + 1

    with_client(tmp_path, FakeDense(lambda submit: [*ids(TEXT), EOS], step_s=0.005), test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_probabilities_are_those_of_completions(
    tmp_path: Path, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = JournalEntry.take_new_tokens

    def take_all(entry: JournalEntry) -> Any:
        """Takes nothing before the last token has come, so that all are in one chunk."""
        if entry.finish_reason is not None:
            return take(entry)
        entry._is_in_updates = False
        return [], LogprobRows(), None

    monkeypatch.setattr(JournalEntry, "take_new_tokens", take_all)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        text, num_tokens = " one two", len(ids(" one two"))
        body = {"prompt": [5, 6, 7], "n_predict": num_tokens, "n_probs": 2, "stream": is_stream}
        found = events((await client.post(URL, json=body)).text) if is_stream else [
            (await client.post(URL, json=body)).json()
        ]  # fmt: skip
        given = [each for piece in found for each in piece.get("completion_probabilities", ())]
        body = {"prompt": [5, 6, 7], "logprobs": 2, "max_tokens": num_tokens}
        [choice] = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        assert [each["logprob"] for each in given] == choice["logprobs"]["token_logprobs"]
        assert [each["id"] for each in given] == ids(text)
        assert b"".join(bytes(each["bytes"]) for each in given).decode() == text
        assert [len(each["top_logprobs"]) for each in given] == [2] * num_tokens
        if is_stream:  # as there, an event has one token, however many came together
            *pieces, _ = found
            assert [each["tokens"] for each in pieces] == [[token_id] for token_id in ids(text)]
            assert [each["tokens_predicted"] for each in pieces] == list(range(1, num_tokens + 1))
            assert all(len(each["completion_probabilities"]) == 1 for each in pieces)
            assert "".join(each["content"] for each in pieces) == text

    with_client(tmp_path, FakeDense(say(" one two")), test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_probabilities_of_what_was_sampled(tmp_path: Path, is_stream: bool) -> None:
    """The worker is asked for them; they are written as probabilities."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "n_predict": 3, "n_probs": 2, "stream": is_stream}
        objects = []
        for asks in (False, True):
            answer = await client.post(URL, json=body | {"post_sampling_probs": asks})
            found = events(answer.text) if is_stream else [answer.json()]
            objects.append([each for piece in found for each in piece.get("completion_probabilities", ())])
            assert dense.submits[-1].spec.sampling.sampled_logprobs == asks
        for own, after in zip(*objects, strict=True):
            assert after.keys() == {"id", "token", "bytes", "prob", "top_probs"}
            assert after["prob"] == pytest.approx(math.exp(own["logprob"]))
            assert all(each.keys() == {"id", "token", "bytes", "prob"} for each in after["top_probs"])
        assert len(objects[0]) == 3

    dense = FakeDense(say(" one two three"))
    with_client(tmp_path, dense, test)


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["prompt"]),
    ({"prompt": []}, ["no tokens"]),
    ({"prompt": [[]]}, ["no tokens"]),
    ({"prompt": {"a": 1}}, ["prompt"]),
    ({"prompt": [1.5]}, ["prompt"]),
    ({"prompt": [10**9]}, ["prompt[0] is 1000000000", "vocabulary"]),
    ({"prompt": [5, "a"] * 65}, ["65 texts", "64"]),
    ({"prompt": ["a"] * 65}, ["65", "64"]),
    ({"prompt": "a", "n_predict": -5}, ["n_predict is -5"]),
    ({"prompt": "a", "n_probs": 10**6}, ["n_probs is 1000000"]),
    ({"prompt": "a", "n_cmpl": 10**6}, ["n_cmpl is 1000000"]),
    ({"prompt": "a", "mirostat": 2}, ["mirostat", "not supported"]),
    ({"prompt": "a", "dry_multiplier": 0.5}, ["dry_multiplier", "not supported"]),
    ({"prompt": "a", "xtc_probability": 0.5}, ["xtc_probability", "not supported"]),
    ({"prompt": "a", "typical_p": 0.5}, ["typical_p", "not supported"]),
    ({"prompt": "a", "samplers": ["top_k", "best_k"]}, ["samplers", "no sampler 'best_k'"]),
    ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, ["prompt", "1 files for 0 of <__media__>"]),
    ({"prompt": {"prompt_string": "<__media__>", "multimodal_data": []}}, ["prompt", "0 files for 1 of <__media__>"]),
    ({"prompt": ["a", {"prompt_string": "<__media__>", "multimodal_data": ["x"]}]}, ["sees no pictures"]),
    ({"prompt": {"prompt_string": "<__media__>", "multimodal_data": [5]}}, ["multimodal_data[0] is 5"]),
    ({"prompt": {"prompt_string": "<__media__>" * 65, "multimodal_data": ["x"] * 65}}, ["65 elements", "64"]),
    ({"prompt": "a", "repeat_last_n": 64, "repeat_penalty": 1.1}, ["repeat_last_n", "64"]),
    ({"prompt": "a", "logit_bias": [[5, 1e9]]}, ["1e+09", "100"]),
    ({"prompt": "a", "logit_bias": [[5]]}, ["logit_bias"]),
    ({"prompt": "a", "logit_bias": [[10**6, 1]]}, ["logit_bias", "1000000"]),
    ({"prompt": "a", "logit_bias": {"": 1}}, ["logit_bias", "0 characters"]),
    ({"prompt": "a", "logit_bias": [[f"w{i}", 1] for i in range(65)]}, ["65 texts", "64"]),
    ({"prompt": "a", "response_fields": ["a"] * 65}, ["response_fields", "65"]),
    ({"prompt": "a", "grammar": "root ::= ("}, ["grammar"]),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[httpx2.Response]:
    """One gateway's answers to all wrong bodies, after which it answers a right one."""
    bodies = [body for body, _ in WRONG]
    *found, right = answers_to(tmp_path_factory.mktemp("refusals"), answering(), URL, [*bodies, {"prompt": "a"}])
    assert right.status_code == 200, right.text
    return found


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[str(body)[:60] for body, _ in WRONG])
def test_a_wrong_body_is_an_error_of_llama_cpp(refusals: list[httpx2.Response], number: int) -> None:
    response = refusals[number]
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error"), error
    assert all(word in error["message"] for word in WRONG[number][1]), error


def test_a_prompt_that_is_too_long_is_named_so(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(URL, json={"prompt": [5] * 5000})
        assert (response.status_code, response.json()["error"]["type"]) == (400, "exceed_context_size_error")
        assert "exceeds the available context size" in response.json()["error"]["message"]
        assert (response.json()["error"]["n_prompt_tokens"], response.json()["error"]["n_ctx"]) == (5000, 2048)

    with_client(tmp_path, FakeDense(say(" one"), max_model_len=2048), test)
