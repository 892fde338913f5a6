"""Log-probabilities over HTTP: of answers and of prompts, in each of OpenAI's formats."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.gateway.resources.heavy_work import HeavyWork
from services.pb import dense_pb2, gateway_pb2
from tests.support.clients.gateway_calls import EOS, REFERENCE, ids, text_of
from tests.support.clients.http_clients import events
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, USER, say, with_client
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense, fake_logprob


@pytest.mark.parametrize("options", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_an_answer_aborted_before_its_prompt_was_computed_has_no_prompt_logprobs(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        await dense.kill()
        body = {"prompt": [70, 80, 90], **options}
        answer = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "to-abort"}))
        while not (await gateway.stub.Abort(gateway_pb2.AbortRequest(request_id="to-abort"))).was_running:
            pass  # the request has not arrived yet
        [choice] = (await answer).json()["choices"]
        assert choice["finish_reason"] == "abort"
        if "echo" in options:
            assert choice["logprobs"]["token_logprobs"] == [None, None, None]
        else:
            assert choice["prompt_logprobs"] is None

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("num_logprobs", [21, -1])
def test_too_many_logprobs_with_echo_are_an_error_that_names_what_was_sent(tmp_path: Path, num_logprobs: int) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": [70, 80, 90], "echo": True, "logprobs": num_logprobs}
        response = await client.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "logprobs")
        assert error["message"].startswith("logprobs is ")
        assert error["message"].endswith("with echo it must be from 0 to 20")

    with_client(tmp_path, FakeDense(say(" one")), test)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_streamed_echo_of_several_answers_shows_the_prompt_with_each(tmp_path: Path, num_prompts: int) -> None:
    prompt_ids, token_ids = ids("Tell me about cities"), ids(" Łódź, 東京 🙂 cities")

    def script(submit: dense_pb2.Submit) -> list[int]:
        return token_ids

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": [prompt_ids] * num_prompts, "max_tokens": len(token_ids), "logprobs": 2, "echo": True, "n": 3}
        response = await client.post("/v1/completions", json={**body, "stream": True})
        pieces: dict[int, list[dict[str, Any]]] = {}
        for event in events(response.text):
            pieces.setdefault(event["choices"][0]["index"], []).append(event["choices"][0])
        assert sorted(pieces) == list(range(3 * num_prompts))
        for choices in pieces.values():
            logprobs = [value for each in choices if each["logprobs"] for value in each["logprobs"]["token_logprobs"]]
            assert logprobs == [None, *map(fake_logprob, [*prompt_ids[1:], *token_ids])]
            offsets = [value for each in choices if each["logprobs"] for value in each["logprobs"]["text_offset"]]
            assert offsets[0] == 0 and offsets == sorted(offsets)
            assert "".join(each["text"] for each in choices) == text_of([*prompt_ids, *token_ids])
            assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["length"]

    with_client(tmp_path, FakeDense(script), test)


def test_prompt_logprobs_of_a_streamed_echo_are_shown_once(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": [70, 80, 90], "max_tokens": 2, "n": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
        response = await client.post("/v1/completions", json={**body, "stream": True})
        choices = [event["choices"][0] for event in events(response.text)]
        assert [each["index"] for each in choices if each.get("prompt_logprobs")] == [0]

    with_client(tmp_path, FakeDense(lambda submit: [100, 101]), test)


@pytest.mark.parametrize("num_logprobs", [0, 3])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_every_token_of_a_prompt_comes_first_with_its_rank(tmp_path: Path, path: str, num_logprobs: int) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        prompt = {"prompt": [70, 80, 90]} if path == COMPLETIONS else {"messages": USER}
        answer = (await client.post(path, json={**prompt, "max_tokens": 1, "prompt_logprobs": num_logprobs})).json()
        whole = answer["choices"][0] if path == COMPLETIONS else answer
        first, *entries = whole["prompt_logprobs"]
        [submit] = dense.submits
        assert first is None
        for token_id, entry in zip(submit.spec.prompt_token_ids[1:], entries, strict=True):
            own = {"logprob": fake_logprob(token_id), "rank": token_id + 1}
            assert next(iter(entry)) == str(token_id)
            found = {name: value for name, value in entry[str(token_id)].items() if name != "decoded_token"}
            # The worker of this test says that its token is the last of the most likely ones.
            assert found == (own if not num_logprobs else own | {"rank": num_logprobs})
            assert len(entry) == max(1, num_logprobs)

    dense = FakeDense(lambda submit: [100])
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
            if echo:  # the worker of this test says that a token is the last of the most likely ones
                of_prompt = list(zip(merged["tokens"], merged["top_logprobs"], strict=True))[1 : len(prompt_ids)]
                assert [next(iter(top)) for _, top in of_prompt] == [token for token, _ in of_prompt]

    with_client(tmp_path, FakeDense(lambda submit: token_ids), test)


def test_chat_logprobs_have_bytes_and_the_most_likely_tokens(tmp_path: Path) -> None:
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


def test_prompt_logprobs_are_keyed_by_token_id(tmp_path: Path) -> None:
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
@pytest.mark.parametrize("output", [EOS, 99])  # the token that the model would generate
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
        assert [submit.spec.max_tokens for submit in dense.submits] == [1] * 3
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
            for i, each in zip(submit.spec.prompt_token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
        ]
        assert logprobs == [fake_logprob(i) for i in submit.spec.prompt_token_ids[1:]]

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)


def test_best_of_returns_the_most_likely_answers(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": 2, "n": 2, "best_of": 3, "return_token_ids": True, "seed": 10}
        choices = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert [(choice["index"], choice["token_ids"]) for choice in choices] == [(0, [40, 40]), (1, [50, 50])]
        assert all(choice["logprobs"] is None for choice in choices)

    dense = FakeDense(lambda submit: {10: [60, 60], 11: [40, 40], 12: [50, 50]}[submit.spec.sampling.seed])
    with_client(tmp_path, dense, test)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_an_answer_with_many_logprobs_is_sent_while_it_is_made(tmp_path: Path, is_streamed: bool) -> None:
    """It has several megabytes, which never exist at once."""
    body = {"prompt": [100 + i % 800 for i in range(1500)], "prompt_logprobs": 20, "max_tokens": 1}
    num_bytes = 0

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        nonlocal num_bytes
        tracemalloc.start()
        async with client.stream("POST", COMPLETIONS, json=body | {"stream": is_streamed}) as response:
            assert response.status_code == 200
            async for piece in response.aiter_raw():
                num_bytes += len(piece)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert num_bytes > 1_500_000 and peak < num_bytes, peak

    with_client(tmp_path, FakeDense(say(" one")), test)


@pytest.mark.parametrize(("path", "options"), [(COMPLETIONS, {"logprobs": 2}), (CHATS, {"top_logprobs": 2})])
def test_lists_of_likely_tokens_are_written_in_turns_and_tokens_that_come_meanwhile_together(
    tmp_path: Path, path: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists of many streams are work for which the plain tokens of others do not wait."""
    token_ids = ids(" one two three four five six")
    may_work = asyncio.Event()

    async def turn(work: HeavyWork) -> None:
        await may_work.wait()

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        monkeypatch.setattr(HeavyWork, "turn", turn)
        body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER, "logprobs": True}
        body |= {"max_tokens": len(token_ids), "stream": True}
        with_lists = asyncio.create_task(client.post(path, json={**body, **options}))
        await until(lambda: len(dense.submits) == 1)
        plain = body | ({} if path == COMPLETIONS else {"logprobs": False})
        found = [choice for each in events((await client.post(path, json=plain)).text) for choice in each["choices"]]
        texts = [each["text"] if path == COMPLETIONS else each["delta"].get("content") or "" for each in found]
        assert "".join(texts) == " one two three four five six"
        await until(lambda: not dense.running)
        assert not with_lists.done()
        may_work.set()
        chunks = [each["choices"][0]["logprobs"] for each in events((await with_lists).text) if each["choices"]]
        of_chunks = [each["tokens" if path == COMPLETIONS else "content"] for each in chunks if each]
        assert sum(map(len, of_chunks)) == len(token_ids)
        assert len(of_chunks) < len(token_ids)

    dense = FakeDense(lambda submit: token_ids)
    with_client(tmp_path, dense, test)
