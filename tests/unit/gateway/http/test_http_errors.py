"""Refusals: the right status, OpenAI's error object, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2

from services.common.config import EMBEDDED_MODEL
from services.gateway import __version__
from tests.support.clients.http_clients import async_client, events
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense

MODEL = EMBEDDED_MODEL.name
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
Test = Callable[[httpx2.AsyncClient, RunningGateway], Awaitable[None]]


def with_client(tmp_path: Path, dense: FakeDense | None, test: Test, **options: Any) -> None:
    """Runs `test` against a gateway."""

    async def body() -> None:
        async with running_gateway(tmp_path, dense, **options) as gateway, async_client(gateway.http_address) as client:
            await test(client, gateway)

    run(body())


def check_error(response: httpx2.Response, status: int, param: str | None, *words: str) -> None:
    """A whole error object, with the request's id."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["param"] == param, error
    assert error["code"]
    for word in words:
        assert word in error["message"]
    assert len(error["message"]) < 500


PROMPT = {"prompt": "a"}
CHAT = {"messages": USER}
WRONG_BODIES: list[tuple[str, Any, str | None, tuple[str, ...]]] = [
    (COMPLETIONS, {}, "prompt", ("required",)),
    (COMPLETIONS, [], None, ("[]",)),
    (COMPLETIONS, {"prompt": ""}, "prompt", ("empty",)),
    (COMPLETIONS, {"prompt": []}, "prompt", ("0 prompts", "64")),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt", ("65 prompts", "64")),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", ()),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", ()),
    (COMPLETIONS, {"prompt": [1, "b"]}, "prompt[1]", ("'b'",)),
    (COMPLETIONS, {"prompt": ["b", 1]}, "prompt[1]", ("1",)),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0]", ("True",)),
    (COMPLETIONS, {"prompt": [[1], 2]}, "prompt[1]", ("2",)),
    (COMPLETIONS, {"prompt": [10**9]}, "prompt", ("prompt[0] is 1000000000, out of vocabulary", "32000")),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", ("prompt[0] is -1, out of vocabulary",)),
    (COMPLETIONS, {"prompt": [[32_000], [5]]}, "prompt", ("prompt[0][0] is 32000, out of vocabulary",)),
    (COMPLETIONS, {"prompt": [[32_000]]}, "prompt", ("prompt[0] is 32000, out of vocabulary",)),
    (COMPLETIONS, {"prompt": [2**63]}, "prompt[0]", (str(2**63),)),
    (COMPLETIONS, {"prompt": [5] * 2048}, "prompt", ("2048",)),
    (COMPLETIONS, {"prompt": "word " * 300_000}, "prompt", ("1500000", "2048")),
    (COMPLETIONS, PROMPT | {"max_tokens": True}, "max_tokens", ("True",)),
    (COMPLETIONS, PROMPT | {"max_tokens": 0}, "max_tokens", ("0", "echo")),
    (COMPLETIONS, PROMPT | {"max_tokens": 0, "echo": True, "n": 2}, "n", ("2", "must be 1")),
    (COMPLETIONS, PROMPT | {"max_tokens": 10**30}, "max_tokens", ()),
    (COMPLETIONS, PROMPT | {"max_tokens": 3000, "min_tokens": 3000}, "min_tokens", ("3000", "2048")),
    (COMPLETIONS, PROMPT | {"max_tokens": "5"}, "max_tokens", ("'5'",)),
    (COMPLETIONS, PROMPT | {"temperature": -1}, "temperature", ("-1",)),
    (COMPLETIONS, PROMPT | {"temperature": True}, "temperature", ("True",)),
    (COMPLETIONS, PROMPT | {"temperature": 10**400}, "temperature", ()),
    (COMPLETIONS, PROMPT | {"top_p": 0}, "top_p", ("0",)),
    (COMPLETIONS, PROMPT | {"top_k": -2}, "top_k", ("-2",)),
    (COMPLETIONS, PROMPT | {"n": 0}, "n", ("0", "16")),
    (COMPLETIONS, PROMPT | {"n": 17}, "n", ("17", "16")),
    (COMPLETIONS, PROMPT | {"n": 2, "best_of": 1}, "best_of", ("1", "2")),
    (COMPLETIONS, PROMPT | {"best_of": 2, "stream": True}, "best_of", ("streamed",)),
    (COMPLETIONS, PROMPT | {"logprobs": 21}, "logprobs", ("21", "20")),
    (COMPLETIONS, PROMPT | {"logprobs": -1}, "logprobs", ("32000", "the vocabulary", "20", "gateway.max_logprobs")),
    (COMPLETIONS, PROMPT | {"logprobs": -2}, "logprobs", ("-2",)),
    (COMPLETIONS, PROMPT | {"prompt_logprobs": 21}, "prompt_logprobs", ("21", "20")),
    (COMPLETIONS, PROMPT | {"logprobs": True}, "logprobs", ("True",)),
    (COMPLETIONS, PROMPT | {"stop": ["a"] * 17}, "stop", ("17", "16")),
    (COMPLETIONS, PROMPT | {"stop": [""]}, "stop", ()),
    (COMPLETIONS, PROMPT | {"stop": 5}, "stop", ("5",)),
    (COMPLETIONS, PROMPT | {"logit_bias": {"x": 1}}, "logit_bias", ("'x'",)),
    (COMPLETIONS, PROMPT | {"logit_bias": {"99999": 1}}, "logit_bias", ("99999",)),
    (COMPLETIONS, PROMPT | {"logit_bias": {"1": 1e300}}, "logit_bias", ()),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": []}, "allowed_token_ids", ("at least 1",)),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [5] * 1025}, "allowed_token_ids", ("1025", "1024")),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [5, 32_000]}, "allowed_token_ids", ("32000",)),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [-1]}, "allowed_token_ids[0]", ("-1",)),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [99], "stop_token_ids": [99], "min_tokens": 1},
     "allowed_token_ids", ("exclude all", "min_tokens")),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ("-1 or at least 1",)),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ("-2",)),
    (COMPLETIONS, {"prompt": [5] * 3000, "truncate_prompt_tokens": 2500}, "prompt", ("2048",)),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": -1, "max_tokens": 2048},
     "truncate_prompt_tokens", ("2048",)),
    (COMPLETIONS, PROMPT | {"priority": 101}, "priority", ("101", "100")),
    (COMPLETIONS, PROMPT | {"user": "a\nb"}, "user", ()),
    (COMPLETIONS, PROMPT | {"stream_options": {}}, "stream_options", ("stream",)),
    (COMPLETIONS, PROMPT | {"suffix": "x"}, "suffix", ("not supported",)),
    (COMPLETIONS, PROMPT | {"guided_json": {}}, "guided_json", ("not supported",)),
    (COMPLETIONS, PROMPT | {"response_format": {"type": "json_object"}}, "response_format", ("not supported",)),
    (COMPLETIONS, PROMPT | {"max_completion_tokens": 5}, "max_completion_tokens", ("not supported",)),
    (COMPLETIONS, PROMPT | {"top_logprobs": 2}, "top_logprobs", ("not supported",)),
    (COMPLETIONS, PROMPT | {"messages": USER}, "messages", ("not supported",)),
    (COMPLETIONS, PROMPT | {"tools": [{}]}, "tools", ("not supported",)),
    (CHATS, CHAT | {"prompt": "x"}, "prompt", ("not supported",)),
    (CHATS, CHAT | {"suffix": "x"}, "suffix", ("not supported",)),
    (CHATS, {}, "messages", ("required",)),
    (CHATS, {"messages": []}, "messages", ("at least 1",)),
    (CHATS, {"messages": "Hi"}, "messages", ("'Hi'",)),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", ("required",)),
    (CHATS, {"messages": [{"role": "user", "content": ""}]}, "messages", ("content",)),
    (CHATS, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", ("required",)),
    (CHATS, {"messages": [*USER, {"role": "system"}]}, "messages[1].content", ("required", "system")),
    (CHATS, {"messages": [*USER, {"role": "assistant", "content": 5}]}, "messages[1].content", ("5",)),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", ()),
    (CHATS, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", ("'tool'",)),
    (CHATS, {"messages": [*USER, {"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[1].tool_calls", ()),
    (CHATS, {"messages": [{"role": "user", "content": "word " * 300_000}]}, "messages", ("1500000",)),
    (CHATS, CHAT | {"top_logprobs": 2}, "top_logprobs", ("logprobs is true",)),
    (CHATS, CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ("21", "20")),
    (CHATS, CHAT | {"logprobs": True, "top_logprobs": -1}, "top_logprobs", ("32000", "20")),
    (CHATS, CHAT | {"logprobs": 1}, "logprobs", ()),
    (CHATS, CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", ("1", "2")),
    (CHATS, CHAT | {"tools": [{"type": "function"}]}, "tools", ("not supported",)),
    (CHATS, CHAT | {"tool_choice": "auto"}, "tool_choice", ("not supported",)),
    (CHATS, CHAT | {"functions": [{}]}, "functions", ("not supported",)),
    (CHATS, CHAT | {"audio": {}}, "audio", ("not supported",)),
    (CHATS, CHAT | {"modalities": ["text", "audio"]}, "modalities", ("not supported",)),
    ("/tokenize", {}, "prompt", ("exactly one",)),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt", ("exactly one",)),
    ("/tokenize", {"prompt": ""}, "prompt", ("''",)),
    ("/tokenize", {"prompt": "word " * 300_000}, "prompt", ("1500000",)),
    ("/tokenize", {"messages": [{"role": "user", "content": "word " * 300_000}]}, "messages", ("1500000",)),
    ("/detokenize", {"tokens": [32_000]}, "tokens", ("tokens[0] is 32000, out of vocabulary",)),
    ("/detokenize", {"tokens": [True]}, "tokens[0]", ("True",)),
]  # fmt: skip


def test_wrong_requests_are_refused_by_field_while_a_stream_goes_on(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body, headers={"x-request-id": "beside"}) as stream:
            for path, wrong, param, words in WRONG_BODIES:
                try:
                    check_error(await client.post(path, json=wrong), 400, param, *words)
                except AssertionError as error:
                    raise AssertionError(f"{path} {json.dumps(wrong)[:200]}") from error
            assert [submit.request_id for submit in dense.submits] == ["beside"]
            assert len(dense.running) == 1
            assert stream.status_code == 200
        await until(lambda: not dense.running)

    dense = FakeDense(lambda submit: [5] * 2000, step_s=0.02)
    with_client(tmp_path, dense, test)


def test_of_several_prompts_the_wrong_one_is_named(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": [[5], [6, 32_000]]})
        check_error(response, 400, "prompt", "prompt[1][1] is 32000, out of vocabulary")
        await until(lambda: not dense.running)

    dense = FakeDense(lambda submit: [5] * 2000, step_s=0.02)
    with_client(tmp_path, dense, test)


BROKEN_BODIES = {
    "nothing": b"",
    "cut": b'{"prompt": "a"',
    "more after the end": b'{"prompt": "a"}}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone low surrogate": b'{"prompt": "a\\udc00b"}',
    "a surrogate in a name": b'{"prompt": "a", "\\ud800": 1}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-8 of a surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "an endless number": b'{"prompt": "a", "temperature": ' + b"9" * 5000 + b"}",
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "depth": b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "depth in an unknown field": b'{"prompt": "a", "x": ' + b'{"a":' * 30_000 + b"1" + b"}" * 30_000 + b"}",
    "another encoding": '{"prompt": "a"}'.encode("utf-16"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
def test_broken_json_is_a_400(path: str, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name, data in BROKEN_BODIES.items():
            if name == "infinity" and "token" in path:
                continue  # well-formed JSON, of an unknown field there
            response = await client.post(path, content=data, headers={"content-type": "application/json"})
            assert response.status_code == 400, name
            assert response.json()["error"]["message"]
        for content_type in ("text/plain", "application/x-www-form-urlencoded"):
            response = await client.post(path, content=b'{"prompt": "a"}', headers={"content-type": content_type})
            check_error(response, 415, None, content_type)
        request = client.build_request("POST", path, content=b'{"prompt": "a"}')
        assert "content-type" not in request.headers
        check_error(await client.send(request), 415, None, "no content-type")

    with_client(tmp_path, FakeDense(lambda submit: [5]), test)


LONG_CHAT = {"messages": [{"role": "user", "content": "word " * 2100}]}
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "word " * 2100}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 3000}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 2040, "max_tokens": 9}, "max_tokens"),
    (COMPLETIONS, {"prompt": [5] * 2040, "max_tokens": 9, "stream": True}, "max_tokens"),
    (CHATS, LONG_CHAT, "messages"),
    (CHATS, CHAT | {"max_completion_tokens": 2047}, "max_tokens"),
    ("/tokenize", {"prompt": "word " * 300_000}, "prompt"),
]


def test_a_context_overflow_is_one_that_clients_recognise(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body, param in TOO_LONG:
            response = await client.post(path, json=body)
            check_error(response, 400, param, "This model's maximum context length is 2048 tokens")
            assert response.json()["error"]["code"] == "context_length_exceeded"
        assert not dense.submits

    dense = FakeDense(lambda submit: [5])
    with_client(tmp_path, dense, test, strict_max_tokens=True)


def test_an_unknown_model_is_a_404(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        bodies = {COMPLETIONS: PROMPT, CHATS: CHAT, "/tokenize": PROMPT, "/detokenize": {"tokens": [5]}}
        for path, body in bodies.items():
            check_error(await client.post(path, json=body | {"model": "gpt-5"}), 404, "model", "gpt-5", MODEL)
            assert (await client.post(path, json=body | {"model": "x"})).json()["error"]["code"] == "model_not_found"
            for name in (MODEL, None):
                assert (await client.post(path, json=body | {"model": name})).status_code == 200
        check_error(await client.get("/v1/models/a/b"), 404, "model", "a/b")
        assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL

    with_client(tmp_path, FakeDense(lambda submit: [5] * 3000), test)


def test_paths_and_methods_that_are_not_there(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check_error(await client.get("/v1/nothing"), 404, None)
        check_error(await client.get(COMPLETIONS), 405, None)
        # No redirect: it would lead to whatever host the request names.
        check_error(await client.post(f"{COMPLETIONS}/", json=PROMPT), 404, None)
        check_error(await client.request("BREW", "/health"), 400, None)  # the parser knows no such method

    with_client(tmp_path, FakeDense(lambda submit: [5]), test)


def test_a_request_id_is_checked_and_may_not_be_in_use(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for wrong in ("a b", "x" * 101, "é".encode(), ""):
            response = await client.get("/health", headers={"x-request-id": wrong})
            check_error(response, 400, "x-request-id")
            assert response.headers["x-request-id"] != wrong
        headers = {"x-request-id": "twice"}
        async with client.stream("POST", COMPLETIONS, json=PROMPT | {"stream": True}, headers=headers):
            for path, body in ((COMPLETIONS, PROMPT), (CHATS, CHAT)):
                check_error(await client.post(path, json=body, headers=headers), 400, "x-request-id", "twice")

    with_client(tmp_path, FakeDense(lambda submit: [5]), test)


@pytest.mark.parametrize("body", [{"prompt": "a", "n": 3}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "n": 2}])
def test_what_a_key_never_admits_is_not_worth_a_retry(body: dict[str, Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "team"\nkey = "0123456789abcdef"\nmax_concurrent_answers = 2\n')

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        headers = {"authorization": "Bearer 0123456789abcdef"}
        response = await client.post(COMPLETIONS, json=body, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
        assert "retry-after" not in response.headers
        assert not dense.submits
        two = {"prompt": ["a", "b"], "max_tokens": 2}
        assert (await client.post(COMPLETIONS, json=two, headers=headers)).status_code == 200

    dense = FakeDense(lambda submit: [5] * 16)
    with_client(tmp_path, dense, test, api_keys_file=keys)


def test_prompts_beyond_a_rate_use_up_nothing_of_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "team"\nkey = "0123456789abcdef"\nrequests_per_minute = 4\n')

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def ask(num_prompts: int) -> httpx2.Response:
            headers = {"authorization": "Bearer 0123456789abcdef"}
            body = {"prompt": ["a"] * num_prompts, "max_tokens": 1}
            return await client.post(COMPLETIONS, json=body, headers=headers)

        assert (await ask(5)).status_code == 403
        assert (await ask(1)).status_code == 200
        refused = await ask(4)
        assert refused.status_code == 429
        assert 10 < int(refused.headers["retry-after"]) <= 15  # then there is room for all four
        assert (await ask(3)).status_code == 200
        assert len(dense.submits) == 4

    dense = FakeDense(lambda submit: [5])
    with_client(tmp_path, dense, test, api_keys_file=keys)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_of_the_dense_worker_becomes_a_status(is_stream: bool, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        full = grpc.StatusCode.RESOURCE_EXHAUSTED
        dense.errors = {"full": (full, "no room"), "two-1": (full, "no room")}
        for name, prompt in (("full", "a"), ("two", ["a", "b"])):
            body = {"prompt": prompt, "stream": is_stream}
            response = await client.post(COMPLETIONS, json=body, headers={"x-request-id": name})
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert "no room" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1
        await until(lambda: not dense.running)

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test)


def test_an_error_within_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async with client.stream("POST", COMPLETIONS, json=PROMPT | {"stream": True}) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await dense.kill()  # for longer than the gateway waits
            text = "\n".join([line async for line in lines])
        *_, last = text.strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "unavailable")
        assert "[DONE]" not in text  # nobody must take this for a whole answer

    dense = FakeDense(lambda submit: [70] * 3)
    with_client(tmp_path, dense, test, connect_timeout_s=0.5)


def test_a_stream_that_waits_gets_its_status_in_bounded_time(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async with client.stream("POST", CHATS, json=CHAT | {"stream": True}) as response:
            assert response.status_code == 200
            first = await anext(response.aiter_lines())
            assert '"role":"assistant"' in first
        await until(lambda: not dense.running)  # and the client that left is noticed before any token

    dense = FakeDense(lambda submit: [])  # never a token
    with_client(tmp_path, dense, test, first_token_timeout_s=0.1)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_a_client_that_leaves_frees_its_requests(prompt: str | list[str], is_stream: bool, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": prompt, "max_tokens": 1000, "n": 2, "stream": is_stream}
        answer = asyncio.create_task(client.post(COMPLETIONS, json=body))
        expected = 2 * len(prompt)
        await until(lambda: len(dense.running) == expected)
        answer.cancel()
        await until(lambda: not dense.running)
        assert len(dense.cancelled_seq_ids) == expected

    dense = FakeDense(lambda submit: [5] * 10)  # then it hangs
    with_client(tmp_path, dense, test)


def test_a_second_prompt_that_is_refused_stops_the_first(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check_error(await client.post(COMPLETIONS, json={"prompt": [[5], [10**6]]}), 400, "prompt", "1000000")
        await until(lambda: not dense.running)

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test)


def test_health_is_503_with_a_reason_until_requests_can_run(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        assert (await client.get("/live")).json() == {"status": "ok"}
        assert (await client.get("/version")).json() == {"version": __version__}
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json()["status"] == "unavailable"
            assert "dense" in response.json()["reason"]
        check_error(await client.get("/v1/models"), 503, None, "dense")
        check_error(await client.post(COMPLETIONS, json=PROMPT), 503, None, "dense")
        dense = FakeDense(lambda submit: [5])
        await dense.start(gateway.dense_address)
        await gateway.wait_serving()
        for path in ("/health", "/ready", "/live"):
            response = await client.get(path)
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        [model] = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"], model["vocab_size"]) == (MODEL, 2048, 32_000)
        await dense.kill()
        await gateway.wait_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/live")).status_code == 200

    async def body() -> None:
        async with running_gateway(tmp_path, None) as gateway, async_client(gateway.http_address) as client:
            for _ in range(200):  # until it listens
                if Path(gateway.http_address.removeprefix("unix:")).exists():
                    break
                await asyncio.sleep(0.05)
            await test(client, gateway)

    run(body())


def test_tokens_of_texts_and_chats_and_back(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = (await client.post("/tokenize", json={"prompt": "Łódź 🙂", "return_token_strs": True})).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 2048
        body = {"tokens": answer["tokens"], "skip_special_tokens": True}
        assert (await client.post("/detokenize", json=body)).json() == {"prompt": "Łódź 🙂"}
        chat = (await client.post("/tokenize", json={"messages": USER})).json()
        completion = await client.post(CHATS, json=CHAT | {"max_tokens": 1})
        assert completion.json()["usage"]["prompt_tokens"] == chat["count"]

    with_client(tmp_path, FakeDense(lambda submit: [5]), test)


def test_the_document_names_every_field(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        document = (await client.get("/openapi.json")).json()
        fields = document["components"]["schemas"]["ChatRequest"]["properties"]
        assert {"messages", "max_completion_tokens", "logit_bias", "stream_options"} <= fields.keys()
        content = document["paths"][COMPLETIONS]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
        stream = events((await client.post(COMPLETIONS, json=PROMPT | {"stream": True, "max_tokens": 1})).text)
        assert len(stream) == 1

    with_client(tmp_path, FakeDense(lambda submit: [50]), test)


LONG_TEXT = "é" * 500_000


@pytest.mark.parametrize(
    "fields",
    [
        {"model": LONG_TEXT},
        {"user": LONG_TEXT},
        {"cache_salt": LONG_TEXT},
        {"logit_bias": {LONG_TEXT: 1}},
        {"logit_bias": {LONG_TEXT: "x"}},
        {"stream_options": {LONG_TEXT: LONG_TEXT}},
        {"temperature": LONG_TEXT},
        {"temperature": [[[[["x" * 60] * 6] * 6] * 6] * 6] * 6},
    ],
)
def test_little_of_what_a_client_sent_comes_back(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def test(client: httpx2.AsyncClient, _: RunningGateway) -> None:
        response = await client.post(COMPLETIONS, json={**PROMPT, **fields})
        assert response.status_code in (400, 404)
        assert len(response.content) < 2000
        assert len(json.dumps(dict(response.headers))) < 1000

    with_client(tmp_path, FakeDense(lambda _: []), test)


def test_answers_to_all_prompts_together_are_bounded(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, _: RunningGateway) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": ["a"] * 5, "n": 4})
        check_error(response, 400, "n", "5 prompts", "20 answers", "gateway.max_answers is 19")

    with_client(tmp_path, FakeDense(lambda _: []), test, max_answers=19)
