"""The wire format of answers, with the whole gateway and a scripted dense worker behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.pb import dense_pb2, gateway_pb2
from tests.support.clients.http_clients import async_client, events
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense, fake_logprob

REFERENCE = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
EOS = REFERENCE.eos_token_id
MODEL = EMBEDDED_MODEL.name
USER = [{"role": "user", "content": "Hi"}]

Test = Callable[[httpx2.AsyncClient, RunningGateway], Awaitable[None]]


def ids(text: str) -> list[int]:
    return REFERENCE(text, add_special_tokens=False)["input_ids"]


def say(*texts: str) -> Callable[[dense_pb2.Submit], Sequence[int]]:
    """A script: the same tokens for every request."""
    token_ids = [token_id for text in texts for token_id in ids(text)]
    return lambda submit: token_ids


def with_client(tmp_path: Path, dense: FakeDense, test: Test, **options: Any) -> None:
    """Runs `test` against a serving gateway."""

    async def body() -> None:
        async with running_gateway(tmp_path, dense, **options) as gateway, async_client(gateway.http_address) as client:
            await test(client, gateway)

    run(body())


def test_a_completion_is_openais_object(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "Tell me", "max_tokens": 3},
            headers={"x-request-id": "mine-1"},
        )
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"] == "mine-1"
        answer = response.json()
        num_prompt_tokens = len(REFERENCE("Tell me")["input_ids"])
        created = answer.pop("created")
        assert isinstance(created, int)
        assert answer == {
            "id": "cmpl-mine-1",
            "object": "text_completion",
            "model": MODEL,
            "system_fingerprint": "fp_c0ffee",
            "choices": [
                {
                    "index": 0,
                    "text": REFERENCE.decode(ids(" one two three four")[:3]),
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                    "prompt_logprobs": None,
                }
            ],
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": 3,
                "total_tokens": num_prompt_tokens + 3,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
        }

    dense = FakeDense(say(" one two three four"))
    dense.num_cached_tokens = 2
    with_client(tmp_path, dense, test)


def test_a_streamed_completion_is_events_and_then_done(tmp_path: Path) -> None:
    text = " Łódź, 東京 🙂🙃 cities."

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "Tell me", "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/completions", json=body)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = events(response.text)
        *pieces, finish, usage = chunks
        assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
            (f"cmpl-{response.headers['x-request-id']}", "text_completion", MODEL)
        }
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
        assert len(pieces) > 1
        assert all(piece["choices"][0]["finish_reason"] is None and piece["usage"] is None for piece in pieces)
        assert finish["choices"] == [  # the chunk of EOS, which has no text
            {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(ids(text)) + 1

    with_client(tmp_path, FakeDense(lambda submit: [*ids(text), EOS], step_s=0.002), test)


def test_without_stream_options_no_usage_is_sent(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True})
        assert all("usage" not in chunk for chunk in events(response.text))

    with_client(tmp_path, FakeDense(say(" one two")), test)


def test_a_chat_stream_begins_with_the_role_of_every_answer(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"messages": USER, "max_tokens": 3, "n": 2, "stream": True}
        chunks = events((await client.post("/v1/chat/completions", json=body)).text)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [(choice["index"], choice["delta"]) for choice in choices[:2]] == [
            (0, {"role": "assistant", "content": ""}),
            (1, {"role": "assistant", "content": ""}),
        ]
        for index in range(2):
            mine = [choice for choice in choices if choice["index"] == index]
            text = "".join(choice["delta"].get("content", "") for choice in mine)
            assert text == REFERENCE.decode(ids(" one two three four")[:3])
            assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]

    with_client(tmp_path, FakeDense(say(" one two three four")), test)


def test_content_parts_are_one_message(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "more"}]
        for content in ("Tell me more", parts):
            messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": content}]
            response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert response.json()["prompt_logprobs"] is None
            message = response.json()["choices"][0]["message"]
            assert message == {"role": "assistant", "content": " one", "refusal": None}
        first, second = dense.submits
        assert first.prompt_token_ids == second.prompt_token_ids
        chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Tell me more"}]
        text = REFERENCE.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert list(first.prompt_token_ids) == ids(text)

    dense = FakeDense(say(" one two"))
    with_client(tmp_path, dense, test)


def test_an_assistant_may_have_said_nothing(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        question = {"role": "user", "content": "Why?"}
        for silence in ({"content": None}, {}, {"content": ""}, {"content": None, "tool_calls": []}):
            messages = [*USER, {"role": "assistant", **silence}, question]
            response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert response.status_code == 200, response.text
        chat = [*USER, {"role": "assistant", "content": ""}, question]
        text = REFERENCE.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert [list(submit.prompt_token_ids) for submit in dense.submits] == [ids(text)] * 4

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


PROMPTS = {
    "a text": ("Tell me", [REFERENCE("Tell me")["input_ids"]]),
    "texts": (["Tell me", "Why"], [REFERENCE("Tell me")["input_ids"], REFERENCE("Why")["input_ids"]]),
    "token ids": ([5, 6, 7], [[5, 6, 7]]),
    "lists of token ids": ([[5, 6], [7]], [[5, 6], [7]]),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", PROMPTS)
def test_choices_are_numbered_prompt_by_prompt(kind: str, is_stream: bool, tmp_path: Path) -> None:
    prompt, expected = PROMPTS[kind]
    n = 3

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": prompt, "max_tokens": 2, "n": n, "stream": is_stream, "return_token_ids": True}
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        response = await client.post("/v1/completions", json=body)
        objects = events(response.text) if is_stream else [response.json()]
        token_ids: dict[int, list[int]] = {}
        for each in objects:
            for choice in each["choices"]:
                token_ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
        # The script answers with the prompt's first token and the number of its tokens.
        assert token_ids == {
            place * n + j: [prompt_ids[0], len(prompt_ids)]
            for place, prompt_ids in enumerate(expected)
            for j in range(n)
        }
        assert objects[-1]["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert objects[-1]["usage"]["completion_tokens"] == 2 * n * len(expected)

    dense = FakeDense(lambda submit: [submit.prompt_token_ids[0], len(submit.prompt_token_ids)])
    with_client(tmp_path, dense, test)


def test_every_option_reaches_the_dense_worker(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {
            "prompt": "Tell me",
            "max_tokens": 7,
            "min_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 12,
            "min_p": 0.125,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {"17": -3, "18": 2.5},
            "bad_words": ["one"],
            "allowed_token_ids": [40, 20, 40],
            "seed": -1,
            "stop_token_ids": [99],
            "ignore_eos": True,
            "priority": -4,
            "cache_salt": "salt",
            "user": "me",
            "logprobs": 2,
            "prompt_logprobs": 1,
        }
        response = await client.post("/v1/completions", json=body, headers={"x-request-id": "all"})
        assert response.status_code == 200, response.text
        [submit] = dense.submits
        assert (submit.request_id, submit.max_tokens, submit.priority) == ("all", 7, -4)
        assert (list(submit.stop_token_ids), submit.cache_salt) == ([99], "salt")
        assert (submit.num_logprobs, submit.num_prompt_logprobs) == (2, 1)
        sampling = submit.sampling
        for name in ("min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"):
            assert getattr(sampling, name) == body[name], name
        assert sampling.repetition_penalty == 1.5
        assert dict(sampling.logit_bias) == {17: -3.0, 18: 2.5}
        assert sampling.seed == 2**64 - 1
        assert len(sampling.bad_words) >= 1
        assert list(sampling.allowed_token_ids) == [20, 40]

    dense = FakeDense(say(" one two three four five six seven eight"))
    with_client(tmp_path, dense, test)


def test_nulls_and_neutral_values_are_defaults(tmp_path: Path) -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "logit_bias", "stream", "user")
    neutral = {"suffix": None, "tools": None, "response_format": {"type": "text"}, "service_tier": "auto", "top_k": -1}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", **dict.fromkeys(names), **neutral, "logprobs": False, "of_tomorrow": [1e999]}
        text = str(body).replace("None", "null").replace("False", "false").replace("'", '"').replace("inf", "1e999")
        response = await client.post(
            "/v1/completions", content=text.encode(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 200, response.text
        [submit] = dense.submits
        assert submit.max_tokens == 16  # OpenAI's default for completions
        assert submit.sampling.temperature == 1.0
        assert not submit.sampling.HasField("top_k")

    dense = FakeDense(lambda submit: [5] * 20)
    with_client(tmp_path, dense, test)


def test_a_long_prompt_without_max_tokens_is_answered_with_what_the_context_leaves(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post("/v1/completions", json={"prompt": [70] * 2040})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 8

    with_client(tmp_path, FakeDense(lambda submit: [80] * 20), test)


@pytest.mark.parametrize("max_tokens", [8, 9, 2**62])
def test_max_tokens_beyond_the_context_is_what_the_context_leaves(max_tokens: int, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": [70] * 2040, "max_tokens": max_tokens}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 8)
        [submit] = dense.submits
        assert submit.max_tokens == 8
        chat = {"messages": USER, "max_completion_tokens": max_tokens + 2048}
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        assert answer["usage"]["total_tokens"] == 2048

    dense = FakeDense(lambda submit: [80] * 2048)
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("stop", [" three", ["absent", " three"]])
def test_stop_strings_end_the_answer_and_are_named(stop: str | list[str], tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": 50, "stop": stop}
        [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" one two", "stop", " three")
        await until(lambda: not dense.running)

    dense = FakeDense(say(" one two three four"))
    with_client(tmp_path, dense, test)


def test_an_aborted_answer_says_so(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"messages": USER, "stream": True}
        answer = asyncio.create_task(
            client.post("/v1/chat/completions", json=body, headers={"x-request-id": "to-abort"})
        )
        await until(lambda: bool(dense.submits))
        await asyncio.sleep(0.1)  # until its tokens are out
        assert (await gateway.stub.Abort(gateway_pb2.AbortRequest(request_id="to-abort"))).was_running
        choices = [choice for chunk in events((await answer).text) for choice in chunk["choices"]]
        assert choices[-1]["finish_reason"] == "abort"
        assert "".join(choice["delta"].get("content", "") for choice in choices) == " one two"

    dense = FakeDense(say(" one two"))  # then it hangs
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("options", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_an_answer_aborted_before_its_prompt_was_computed_has_no_prompt_logprobs(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        await dense.kill()
        body = {"prompt": [70, 80, 90], **options}
        answer = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "to-abort"}))
        while not (await gateway.stub.Abort(gateway_pb2.AbortRequest(request_id="to-abort"))).was_running:
            pass  # it is on its way
        [choice] = (await answer).json()["choices"]
        assert choice["finish_reason"] == "abort"
        if "echo" in options:
            assert choice["logprobs"]["token_logprobs"] == [None, None, None]
        else:
            assert choice["prompt_logprobs"] is None

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_legacy_logprobs_are_aligned_with_the_text(is_stream: bool, tmp_path: Path) -> None:
    prompt, text = "Tell me", " Łódź, 東京 🙂 cities"
    prompt_ids, token_ids = REFERENCE(prompt)["input_ids"], ids(text)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for echo in (False, True):
            body = {"prompt": prompt, "max_tokens": len(token_ids), "logprobs": 2, "echo": echo, "stream": is_stream}
            response = await client.post("/v1/completions", json=body)
            objects = events(response.text) if is_stream else [response.json()]
            whole = "".join(each["choices"][0]["text"] for each in objects)
            assert whole == (prompt + text if echo else text)
            merged: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for each in objects:
                for name, values in (each["choices"][0]["logprobs"] or {}).items():
                    merged[name] += values
            all_ids = [*prompt_ids, *token_ids] if echo else token_ids
            expected = [fake_logprob(token_id) for token_id in all_ids]
            assert merged["token_logprobs"] == ([None, *expected[1:]] if echo else expected)
            assert [len(values) for values in merged.values()] == [len(all_ids)] * 4
            for token, offset in zip(merged["tokens"], merged["text_offset"], strict=True):
                if not token.startswith("bytes:") and token not in REFERENCE.all_special_tokens:
                    assert whole[offset : offset + len(token)] == token
            for token, logprob, top in list(zip(*list(merged.values())[:3], strict=True))[1:]:
                assert top[token] == logprob
                assert 2 <= len(top) <= 3

    with_client(tmp_path, FakeDense(lambda submit: token_ids), test)


def test_chat_logprobs_have_bytes_and_the_likeliest_tokens(tmp_path: Path) -> None:
    text = " Łódź 🙂"
    token_ids = ids(text)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"messages": USER, "max_tokens": len(token_ids), "logprobs": True, "top_logprobs": 3}
        [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
        entries = choice["logprobs"]["content"]
        assert bytes(value for entry in entries for value in entry["bytes"]).decode() == text
        assert [entry["logprob"] for entry in entries] == [fake_logprob(token_id) for token_id in token_ids]
        for entry in entries:
            assert len(entry["top_logprobs"]) == 3
            assert {"token", "logprob", "bytes"} == entry["top_logprobs"][0].keys()
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
        del body["top_logprobs"]
        [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
        assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])

    with_client(tmp_path, FakeDense(lambda submit: token_ids), test)


def test_prompt_logprobs_are_by_token_id(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": [70, 80, 90], "max_tokens": 1, "prompt_logprobs": 2}
        [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for token_id, entry in zip((80, 90), others, strict=True):
            assert entry.keys() == {str(token_id), str(token_id - 1)}
            assert entry[str(token_id)]["logprob"] == fake_logprob(token_id)
            assert entry[str(token_id)]["decoded_token"]

    with_client(tmp_path, FakeDense(say(" one")), test)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("output", [EOS, 99])  # what the model would have said
def test_a_prompt_alone_can_be_scored(is_stream: bool, output: int, tmp_path: Path) -> None:
    prompts = [ids("Tell me more"), ids("Why not?"), [EOS, EOS]]  # the last has no text

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 2, "stream": is_stream}
        body["stream_options"] = {"include_usage": True} if is_stream else None
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        objects = events(response.text) if is_stream else [response.json()]
        choices = {choice["index"]: choice for each in objects for choice in each["choices"]}
        assert sum(len(each["choices"]) for each in objects) == len(prompts)
        for index, prompt in enumerate(prompts):
            choice = choices[index]
            assert choice["text"] == REFERENCE.decode(prompt, skip_special_tokens=True)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
            expected = [None, *map(fake_logprob, prompt[1:])]
            assert choice["logprobs"]["token_logprobs"] == expected
            assert len(choice["logprobs"]["tokens"]) == len(prompt)
        usage = objects[-1]["usage"]
        assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, sum(map(len, prompts)))
        assert [submit.max_tokens for submit in dense.submits] == [1] * 3
        metrics = (await client.get("/metrics")).text
        assert "twostroke_gateway_generated_tokens_total 0.0" in metrics
        assert "twostroke_gateway_time_to_first_token_seconds_count 0.0" in metrics

    dense = FakeDense(lambda submit: [output])
    with_client(tmp_path, dense, test)


def test_the_prompt_of_a_chat_can_be_scored(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"messages": USER, "max_tokens": 0, "prompt_logprobs": 0}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["usage"]["completion_tokens"] == 0
        [submit] = dense.submits
        logprobs = [
            each[str(i)]["logprob"]
            for i, each in zip(submit.prompt_token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
        ]
        assert logprobs == [fake_logprob(i) for i in submit.prompt_token_ids[1:]]

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


def test_best_of_returns_the_likeliest(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": 2, "n": 2, "best_of": 3, "return_token_ids": True, "seed": 10}
        choices = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert [(choice["index"], choice["token_ids"]) for choice in choices] == [(0, [40, 40]), (1, [50, 50])]
        assert all(choice["logprobs"] is None for choice in choices)

    dense = FakeDense(lambda submit: {10: [60, 60], 11: [40, 40], 12: [50, 50]}[submit.sampling.seed])
    with_client(tmp_path, dense, test)


def test_what_a_slow_reader_missed_comes_in_few_events(tmp_path: Path) -> None:
    token_ids = [5] * 2000

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": len(token_ids), "stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            await until(lambda: not dense.running)  # nobody has read until now
            chunks = events((await response.aread()).decode())
        received = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", ())]
        assert received == token_ids

    dense = FakeDense(lambda submit: token_ids)
    with_client(tmp_path, dense, test)
