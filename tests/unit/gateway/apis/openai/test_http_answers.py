"""The wire format of answers, with the whole gateway and a scripted dense worker behind it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import httpx2
import pytest

from services.pb import gateway_pb2
from tests.support.clients.gateway_calls import EOS, REFERENCE, ids
from tests.support.clients.http_clients import events
from tests.support.clients.http_gateway import MODEL, USER, check_error, say, with_client
from tests.support.reports import prompt_logprobs
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense


def test_a_body_may_name_its_request_and_the_header_wins(tmp_path: Path) -> None:
    bodies = {
        "/v1/completions": ({"prompt": "Tell me"}, "id", "cmpl-"),
        "/v1/chat/completions": ({"messages": USER}, "id", "chatcmpl-"),
        "/inference/v1/generate": ({"token_ids": [5, 6]}, "request_id", "generate-tokens-"),
    }

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, (body, field, prefix) in bodies.items():
            named = body | {"request_id": "of-body"}
            for headers, name in (({}, "of-body"), ({"x-request-id": "of-header"}, "of-header")):
                response = await client.post(path, json=named, headers=headers)
                assert response.json()[field] == prefix + name, response.text
                assert response.headers.get_list("x-request-id") == [name]
                assert dense.submits[-1].spec.request_id == name
            by_sglang = await client.post(path, json=body | {"rid": "sglang"})
            assert by_sglang.json()[field] == prefix + "sglang" == prefix + by_sglang.headers["x-request-id"]
            for wrong in ("", "a b", "Łódź", "a\nb", "x" * 116):
                message = f": has {len(wrong.encode())} bytes, must be 1 to 115 printable ASCII"
                check_error(await client.post(path, json=body | {"request_id": wrong}), 400, "request_id", message)
            longest = await client.post(path, json=body | {"request_id": "x" * 115})
            assert longest.json()[field] == prefix + "x" * 115

    dense = FakeDense(lambda submit: [EOS])
    with_client(tmp_path, dense, test)


def test_a_name_in_use_is_refused_with_the_field_that_gave_it(tmp_path: Path) -> None:
    bodies = {"/v1/completions": {"prompt": "Tell me"}, "/v1/chat/completions": {"messages": USER}}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        running = {"prompt": "Tell me", "max_tokens": 1500, "stream": True, "request_id": "busy"}
        async with client.stream("POST", "/v1/completions", json=running):
            await until(lambda: len(dense.running) == 1)
            for path, body in bodies.items():
                for field in ("request_id", "rid"):
                    check_error(
                        await client.post(path, json=body | {field: "busy"}), 400, field, f"{field} 'busy' is in"
                    )
                answer = await client.post(path, json=body | {"rid": "free"}, headers={"x-request-id": "busy"})
                check_error(answer, 400, "x-request-id", "x-request-id 'busy' is in use")

    dense = FakeDense(lambda submit: ids(" a") * 5000, step_s=0.002)
    with_client(tmp_path, dense, test)


def test_a_completion_has_openais_format(tmp_path: Path) -> None:
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
                    "matched_stop": None,
                    "prompt_logprobs": None,
                    "token_ids": None,
                    "prompt_token_ids": None,
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


def test_a_streamed_completion_consists_of_events_and_done(tmp_path: Path) -> None:
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
        [last] = finish["choices"]  # the chunk of EOS has no text
        ended = {"finish_reason": "stop", "stop_reason": None, "matched_stop": EOS}
        assert last == {"index": 0, "text": "", "logprobs": None, **ended}
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(ids(text)) + 1

    with_client(tmp_path, FakeDense(lambda submit: [*ids(text), EOS], step_s=0.01), test)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "Tell me"}),
        ("/v1/completions", {"prompt": "Tell me", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/messages", {"messages": USER}),
        ("/v1/responses", {"input": "Tell me"}),
        ("/api/generate", {"prompt": "Tell me"}),
        ("/api/chat", {"messages": USER}),
        ("/completion", {"prompt": "Tell me"}),
        ("/generate_stream", {"inputs": "Tell me"}),
    ],
)
def test_ends_of_lines_for_str_splitlines_end_no_line_of_a_stream(
    path: str, prompt: dict[str, object], tmp_path: Path
) -> None:
    """Some clients read lines with it, as httpx does."""
    text = " one\x85two\u2028three\u2029four"

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(path, json={"model": MODEL, "max_tokens": 50, "stream": True, **prompt})
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data:") for line in response.text.splitlines() if not line.startswith("event:")]
        found = [json.loads(line) for line in lines if line.strip() not in ("", "[DONE]")]
        assert len(found) > 3
        for end in ("\\u0085", "\\u2028", "\\u2029"):
            assert end in response.text

    with_client(tmp_path, FakeDense(lambda submit: [*ids(text), EOS], step_s=0.01), test)


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
            (0, {"role": "assistant", "content": "", "reasoning_content": None}),
            (1, {"role": "assistant", "content": "", "reasoning_content": None}),
        ]
        for index in range(2):
            mine = [choice for choice in choices if choice["index"] == index]
            text = "".join(choice["delta"].get("content", "") for choice in mine)
            assert text == REFERENCE.decode(ids(" one two three four")[:3])
            assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]

    with_client(tmp_path, FakeDense(say(" one two three four")), test)


def test_content_parts_form_one_message(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "more"}]
        for content in ("Tell me more", parts):
            messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": content}]
            response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert response.json()["prompt_logprobs"] is response.json()["prompt_token_ids"] is None
            assert response.json()["choices"][0]["token_ids"] is None
            message = response.json()["choices"][0]["message"]
            reasoning = {"reasoning": None, "reasoning_content": None}
            assert message == {"role": "assistant", "content": " one", "refusal": None, **reasoning}
        first, second = dense.submits
        assert first.spec.prompt_token_ids == second.spec.prompt_token_ids
        chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Tell me more"}]
        text = REFERENCE.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert list(first.spec.prompt_token_ids) == ids(text)

    dense = FakeDense(say(" one two"))
    with_client(tmp_path, dense, test)


def test_a_message_of_an_assistant_may_be_empty(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        question = {"role": "user", "content": "Why?"}
        for silence in ({"content": None}, {}, {"content": ""}, {"content": None, "tool_calls": []}):
            messages = [*USER, {"role": "assistant", **silence}, question]
            response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert response.status_code == 200, response.text
        chat = [*USER, {"role": "assistant", "content": ""}, question]
        text = REFERENCE.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert [list(submit.spec.prompt_token_ids) for submit in dense.submits] == [ids(text)] * 4

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


PROMPTS = {
    "a text": ("Tell me", [REFERENCE("Tell me")["input_ids"]]),
    "texts": (["Tell me", "Why"], [REFERENCE("Tell me")["input_ids"], REFERENCE("Why")["input_ids"]]),
    "token ids": ([5, 6, 7], [[5, 6, 7]]),
    "lists of token ids": ([[5, 6], [7]], [[5, 6], [7]]),
}


def test_choices_are_numbered_prompt_by_prompt(tmp_path: Path) -> None:
    n = 3

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for (prompt, expected), is_stream in itertools.product(PROMPTS.values(), [False, True]):
            body = {"prompt": prompt, "max_tokens": 2, "n": n, "stream": is_stream, "return_token_ids": True}
            if is_stream:
                body["stream_options"] = {"include_usage": True}
            response = await client.post("/v1/completions", json=body)
            objects = events(response.text) if is_stream else [response.json()]
            token_ids: dict[int, list[int]] = {}
            for each in objects:
                for choice in each["choices"]:
                    token_ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
            # Each answer consists of the prompt's first token and its number of tokens.
            assert token_ids == {
                index * n + j: [prompt_ids[0], len(prompt_ids)]
                for index, prompt_ids in enumerate(expected)
                for j in range(n)
            }, (prompt, is_stream)
            assert objects[-1]["usage"]["prompt_tokens"] == sum(map(len, expected))
            assert objects[-1]["usage"]["completion_tokens"] == 2 * n * len(expected)

    dense = FakeDense(lambda submit: [submit.spec.prompt_token_ids[0], len(submit.spec.prompt_token_ids)])
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
        assert (submit.spec.request_id, submit.spec.max_tokens, submit.spec.priority) == ("all", 7, -4)
        assert (list(submit.spec.stop_token_ids), submit.spec.cache_salt) == ([99], "salt")
        assert (submit.spec.num_logprobs, dict(submit.spec.features)) == (2, prompt_logprobs(1))
        sampling = submit.spec.sampling
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
    neutral |= {"thinking_token_budget": -1}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", **dict.fromkeys(names), **neutral, "logprobs": False, "of_tomorrow": [1e999]}
        text = str(body).replace("None", "null").replace("False", "false").replace("'", '"').replace("inf", "1e999")
        response = await client.post(
            "/v1/completions", content=text.encode(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 200, response.text
        [submit] = dense.submits
        assert submit.spec.max_tokens == 16  # OpenAI's default for completions
        assert submit.spec.sampling.temperature == 1.0
        assert not submit.spec.sampling.HasField("top_k")

    dense = FakeDense(lambda submit: [5] * 20)
    with_client(tmp_path, dense, test)


def test_without_max_tokens_a_long_prompt_gets_the_rest_of_the_context(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post("/v1/completions", json={"prompt": [70] * 2040})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 8

    with_client(tmp_path, FakeDense(lambda submit: [80] * 20), test)


@pytest.mark.parametrize("max_tokens", [8, 9, 2**62])
def test_max_tokens_beyond_the_context_is_lowered(max_tokens: int, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": [70] * 2040, "max_tokens": max_tokens}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 8)
        [submit] = dense.submits
        assert submit.spec.max_tokens == 8
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
        assert choice["matched_stop"] == " three"
        await until(lambda: not dense.running)

    dense = FakeDense(say(" one two three four"))
    with_client(tmp_path, dense, test)


def test_an_aborted_answer_has_its_own_finish_reason(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body, headers = {"messages": USER, "stream": True}, {"x-request-id": "to-abort"}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            text, pieces = "", response.aiter_text()
            while "two" not in text:
                text += await anext(pieces)
            assert (await gateway.stub.Abort(gateway_pb2.AbortRequest(request_id="to-abort"))).was_running
            text += "".join([piece async for piece in pieces])
        choices = [choice for chunk in events(text) for choice in chunk["choices"]]
        assert choices[-1]["finish_reason"] == "abort"
        assert "".join(choice["delta"].get("content", "") for choice in choices) == " one two"

    dense = FakeDense(say(" one two"))  # and then no more tokens
    with_client(tmp_path, dense, test)


def test_a_slow_reader_gets_all_tokens(tmp_path: Path) -> None:
    token_ids = [5] * 2000

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": len(token_ids), "stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            await until(lambda: not dense.running)  # the client has not read anything yet
            chunks = events((await response.aread()).decode())
        received = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", ())]
        assert received == token_ids

    dense = FakeDense(lambda submit: token_ids)
    with_client(tmp_path, dense, test)
