"""Refused requests get the right status and OpenAI's error object, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2

from services.gateway import __version__
from services.pb import dense_pb2
from tests.support.clients.http_clients import async_client, connect, events, request_bytes
from tests.support.clients.http_gateway import CHAT, CHATS, COMPLETIONS, MODEL, PROMPT, USER, check_error, with_client
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense


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


def test_unknown_paths_and_methods_are_refused(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check_error(await client.get("/v1/nothing"), 404, None)
        for host in ("gateway", "a/b"):  # without a valid one Starlette's URLs begin with the server's socket
            response = await client.get("/v1/nothing", headers={"host": host})
            assert response.json()["error"]["message"] == "this server has no GET /v1/nothing"
            response = await client.post("/v1/audio/transcriptions", headers={"host": host})
            assert response.json()["error"]["message"].endswith("it has no /v1/audio/transcriptions")
        check_error(await client.get(COMPLETIONS), 405, None, f"this server has no GET {COMPLETIONS}, but POST")
        for method, path, allowed in (
            ("GET", COMPLETIONS, {"POST"}),
            ("DELETE", "/ping", {"GET", "HEAD", "POST"}),
            ("POST", "/health", {"GET", "HEAD"}),
            ("PATCH", "/v2/models/ensemble/generate", {"POST"}),
        ):
            response = await client.request(method, path)
            assert response.status_code == 405
            assert set(response.headers["allow"].split(", ")) == allowed
        # No redirect, because it would lead to the host that the request names.
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
def test_a_request_beyond_its_keys_limits_is_not_worth_a_retry(body: dict[str, Any], tmp_path: Path) -> None:
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


def test_prompts_refused_by_a_rate_limit_do_not_count(tmp_path: Path) -> None:
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
        assert 10 < int(refused.headers["retry-after"]) <= 15  # after that time all four would be admitted
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
            await dense.kill()  # and it does not return while the gateway waits
            text = "\n".join([line async for line in lines])
        *_, last = text.strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "unavailable")
        assert "[DONE]" not in text  # so no client mistakes this for a whole answer

    dense = FakeDense(lambda submit: [70] * 3)
    with_client(tmp_path, dense, test, connect_timeout_s=1.5)


def test_a_waiting_stream_gets_its_status_in_bounded_time(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async with client.stream("POST", CHATS, json=CHAT | {"stream": True}) as response:
            assert response.status_code == 200
            first = await anext(response.aiter_lines())
            assert '"role":"assistant"' in first
        await until(lambda: not dense.running)  # the gateway notices the disconnect before any token

    dense = FakeDense(lambda submit: [])  # no tokens
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

    dense = FakeDense(lambda submit: [5] * 10)  # and then no more tokens
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_frees_its_request_also_if_another_one_waits_behind_it(
    tmp_path: Path, is_stream: bool
) -> None:
    async def body() -> None:
        dense = FakeDense(lambda submit: [5])  # and then no more tokens
        async with running_gateway(tmp_path, dense) as gateway:
            _, writer = await connect(gateway.http_address)
            fields = {"prompt": "a", "max_tokens": 50, "stream": is_stream}
            writer.write(2 * request_bytes(COMPLETIONS, fields))
            await until(lambda: len(dense.running) == 1)
            writer.close()
            await until(lambda: not dense.running)
            assert len(dense.submits) == 1, "the request behind it is not begun for a client that is gone"

    run(body())


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
            for _ in range(1000):  # until the gateway listens
                if Path(gateway.http_address.removeprefix("unix:")).exists():
                    break
                await asyncio.sleep(0.05)
            await test(client, gateway)

    run(body())


def test_texts_and_chats_are_tokenized_and_detokenized(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = (await client.post("/tokenize", json={"prompt": "Łódź 🙂", "return_token_strs": True})).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 2048
        body = {"tokens": answer["tokens"], "skip_special_tokens": True}
        assert (await client.post("/detokenize", json=body)).json()["prompt"] == "Łódź 🙂"
        chat = (await client.post("/tokenize", json={"messages": USER})).json()
        completion = await client.post(CHATS, json=CHAT | {"max_tokens": 1})
        assert completion.json()["usage"]["prompt_tokens"] == chat["count"]

    with_client(tmp_path, FakeDense(lambda submit: [5]), test)


def test_the_openapi_document_names_every_field(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))
        document = answers[0].json()
        assert all(answer.content == answers[0].content for answer in answers)
        schemas = document["components"]["schemas"]
        references = set(re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', answers[0].text))
        assert len(references) > 20 and references <= schemas.keys()
        wrong = document["paths"][COMPLETIONS]["post"]["responses"]
        assert "400" in wrong and "422" not in wrong
        fields = schemas["ChatRequest"]["properties"]
        assert {"messages", "max_completion_tokens", "logit_bias", "stream_options"} <= fields.keys()
        content = document["paths"][COMPLETIONS]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
        stream = events((await client.post(COMPLETIONS, json=PROMPT | {"stream": True, "max_tokens": 1})).text)
        assert len(stream) == 1

    with_client(tmp_path, FakeDense(lambda submit: [50]), test)


def test_the_total_number_of_answers_is_limited(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, _: RunningGateway) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": ["a"] * 5, "n": 4})
        check_error(response, 400, "n", "5 prompts", "20 answers", "gateway.max_answers is 19")

    with_client(tmp_path, FakeDense(lambda _: []), test, max_answers=19)


@pytest.mark.parametrize(("most", "limit"), [({}, "16 (gateway.max_n)"), ({"max_n": 40, "max_answers": 19}, "19")])
def test_a_request_for_too_many_answers_is_told_the_limit_that_it_can_keep_to(
    tmp_path: Path, most: dict[str, int], limit: str
) -> None:
    async def test(client: httpx2.AsyncClient, _: RunningGateway) -> None:
        for field in ("n", "best_of"):
            for count in (39, 300):
                response = await client.post(COMPLETIONS, json={"prompt": "a", field: count})
                check_error(response, 400, field, f"{field} is {count}", limit)

    with_client(tmp_path, FakeDense(lambda _: []), test, **most)


def test_as_many_batches_wait_as_the_queue_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read beside each other: each would get a part of the room, and all would be refused."""

    async def test(client: httpx2.AsyncClient, _: RunningGateway) -> None:
        body = PROMPT | {"prompt": ["a"] * 8, "max_tokens": 1, "n": 2}
        posts = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(10)]
        await until(lambda: sum(each.done() for each in posts) == 7)
        refused = [post.result() for post in posts if post.done()]
        assert all(each.status_code == 429 and "waiting answers; with 16 more" in each.text for each in refused)
        for post in posts:
            post.cancel()
        await asyncio.wait(posts)

    dense = FakeDense(lambda _: [5])
    monkeypatch.setattr(dense, "_step", lambda _: dense_pb2.StepOutput())  # no answer begins
    with_client(tmp_path, dense, test, max_num_waiting=64)
