"""Answers over HTTP whose connections break: the same POST again gets the rest of a stream, or the one whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_clients import async_client, connect, request_bytes, socket_path
from tests.support.examples import examples
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.resume.test_grpc_resume import KEYS, by_seed

CHAT = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 30}
COMPLETION = {"prompt": "Where?", "max_tokens": 30}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "chat with logprobs": ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "completion": ("/v1/completions", {**COMPLETION, "stop": [" city"], "echo": True}),
    "completions": ("/v1/completions", {**COMPLETION, "n": 3, "logprobs": 1}),
    "responses": ("/v1/responses", {"input": "Where?", "max_output_tokens": 30}),
    "messages": ("/v1/messages", {"model": "tiny-llama", **CHAT}),
    "cohere": ("/v2/chat", {"model": "tiny-llama", **CHAT}),
    "sglang": ("/generate", {"text": "Where?", "sampling_params": {"max_new_tokens": 30}}),
    "token ids": ("/inference/v1/generate", {"token_ids": [70, 71], "sampling_params": {"max_tokens": 30}}),
    "text generation": ("/generate_stream", {"inputs": "Where?", "parameters": {"max_new_tokens": 30}}),
    "llama.cpp": ("/completion", {"prompt": "Where?", "n_predict": 30, "n_probs": 1}),
}
WITHOUT_SEED = ("/v1/messages", "/v1/responses", "/generate", "/generate_stream", "/inference/v1/generate")
Test = Callable[[RunningGateway, FakeDense], Awaitable[None]]


def with_gateway(directory: Path, test: Test, script: Any = by_seed, step_s: float = 0.0, **options: Any) -> None:
    async def body() -> None:
        dense = FakeDense(script, step_s=step_s)
        async with running_gateway(directory, dense, **{"resume": True, **options}) as gateway:
            await test(gateway, dense)

    run(body())


@dataclass
class EventSource:
    """A reader of events as the HTML standard has it ("Interpreting an event stream"), over POST."""

    address: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    last_event_id: str = ""
    received: list[tuple[str, str]] = field(default_factory=list)  # name and data
    status: int = 0  # of the last connection

    async def connect(self, num_events: int | None = None) -> None:
        """Reads so many more events, or all; then cuts the connection."""
        headers = dict(self.headers)
        if self.last_event_id:
            headers["Last-Event-ID"] = self.last_event_id
        async with (
            async_client(self.address) as client,
            client.stream("POST", self.path, json=dict(self.body), headers=headers) as answer,
        ):
            self.status = answer.status_code
            assert self.status != 400, (await answer.aread()).decode()
            lines, count = {"id": "", "event": "", "data": ""}, 0
            if num_events == 0:
                return
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if line:
                    lines[name] = value
                    continue
                self.last_event_id = lines["id"] or self.last_event_id
                self.received.append((lines["event"], lines["data"]))
                lines, count = {"id": "", "event": "", "data": ""}, count + 1
                if count == num_events:
                    return

    @property
    def objects(self) -> list[Any]:
        """What the events say, without what is another run's own: ids and times."""
        return [(name, without_own(data)) for name, data in self.received]


OWN = ("id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at", "e2e_latency", "timings")


def without_own(data: str) -> Any:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(each) for key, each in value.items() if key not in OWN}
        return [strip(each) for each in value] if isinstance(value, list) else value

    return data if data == "[DONE]" else strip(json.loads(data))


def source(gateway: RunningGateway, kind: str, key: str | None = "k", seed: int = 7, **fields: Any) -> EventSource:
    path, body = STREAMS[kind]
    given = {"stream": True, **body, **fields}
    if path not in WITHOUT_SEED:
        given["seed"] = seed
    return EventSource(gateway.http_address, path, given, {} if key is None else {"Idempotency-Key": key})


@settings(max_examples=examples(30, 12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(STREAMS)), cuts=st.lists(st.integers(0, 15), min_size=1, max_size=6))
def test_a_stream_that_breaks_anywhere_is_resumed_exactly(tmp_path: Path, kind: str, cuts: list[int]) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        broken, whole, plain = source(gateway, kind), source(gateway, kind, "other"), source(gateway, kind, None)
        for cut in cuts:
            await broken.connect(cut)
        if broken.status != 204:
            await broken.connect()
        assert len(dense.submits) == whole.body.get("n", 1)
        await whole.connect()
        await plain.connect()
        assert broken.objects == whole.objects
        assert text_of(broken) == text_of(plain)

    # Without a seed of the request's own, as in two of the dialects, all runs have the same tokens here.
    with_gateway(tmp_path, test, lambda _: ids(" Łódź and 東京 🙂, the city\n\n and the rest of it") * 3)


def text_of(source: EventSource) -> dict[int, str]:
    """The text of each answer, by whatever name the dialect has for it."""
    texts: dict[int, str] = {}
    for _, data in source.received:
        each = {} if data == "[DONE]" else json.loads(data)
        for choice in each.get("choices", ()):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            piece += "".join(f"{token_id} " for token_id in choice.get("token_ids", ()))
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
        if "meta_info" in each:  # SGLang's, which has all of the text so far
            texts[0] = each["text"]
        elif "content" in each:  # llama.cpp's
            texts[0] = texts.get(0, "") + each["content"]
        elif "token" in each:  # Text Generation Inference's
            texts[0] = texts.get(0, "") + each["token"]["text"]
        delta = each.get("delta")
        if each.get("type") == "content-delta":  # Cohere's
            delta = delta["message"]["content"]["text"]
        if isinstance(delta, str) or (isinstance(delta, dict) and "text" in delta):
            texts[0] = texts.get(0, "") + (delta if isinstance(delta, str) else delta["text"])
    assert texts, "no dialect is without text"
    return texts


def test_ids_and_times_of_a_resumed_stream_are_those_of_its_beginning(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        broken = source(gateway, "chat")
        await broken.connect(4)
        await broken.connect()
        objects = [json.loads(data) for _, data in broken.received[:-1]]
        assert len({(each["id"], each["created"]) for each in objects}) == 1

    with_gateway(tmp_path, test)


def test_after_the_last_event_there_is_nothing_and_a_browser_stops(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        stream = source(gateway, "chat")
        await stream.connect()
        assert stream.received[-1] == ("", "[DONE]")
        count = len(stream.received)
        await stream.connect()
        assert (stream.status, len(stream.received)) == (204, count)

    with_gateway(tmp_path, test)


def test_a_stream_without_a_key_has_no_ids_and_ends_with_its_connection(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        plain = source(gateway, "chat", None)
        await plain.connect(4)
        assert not plain.last_event_id
        await until(lambda: len(dense.cancelled_seq_ids) == 1)

    with_gateway(tmp_path, test, lambda _: ids(" a") * 1000, step_s=0.002)


async def post(
    gateway: RunningGateway,
    key: str | None,
    body: Mapping[str, Any] = COMPLETION,
    path: str = "/v1/completions",
    **more: str,
) -> httpx2.Response:
    headers = {"Idempotency-Key": key} if key is not None else {}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    async with async_client(gateway.http_address) as client:
        return await client.post(path, json=dict(body), headers=headers, timeout=60)


def test_a_whole_answer_is_computed_once(tmp_path: Path) -> None:
    """Five POSTs at once, one of which leaves, and one after the end."""

    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        left = asyncio.create_task(post(gateway, "k"))
        await until(lambda: bool(dense.running))
        posts = [asyncio.create_task(post(gateway, "k")) for _ in range(4)]
        left.cancel()
        answers = [await each for each in posts] + [await post(gateway, "k")]
        assert [each.status_code for each in answers] == [200] * 5
        assert len({each.text for each in answers}) == 1
        assert len(dense.submits) == 1
        assert (await post(gateway, "other")).text != answers[0].text  # no seed was given
        assert len(dense.submits) == 2

    with_gateway(tmp_path, test, step_s=0.01)


def test_the_openai_package_retries_without_computing_twice(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        transport = httpx2.AsyncHTTPTransport(uds=socket_path(gateway.http_address))
        async with httpx2.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                base_url="http://gateway/v1", api_key="none", http_client=http, timeout=0.3, max_retries=8
            )
            answer = await client.chat.completions.create(
                model="tiny-llama", **CHAT, extra_headers={"Idempotency-Key": "one"}
            )
        assert answer.usage.completion_tokens == 30
        assert len(dense.submits) == 1  # though it gave up and tried again

    with_gateway(tmp_path, test, step_s=0.03)


def test_the_same_key_with_another_body_is_refused(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        assert (await post(gateway, "k")).status_code == 200
        for body, path in (({**COMPLETION, "max_tokens": 31}, "/v1/completions"), (CHAT, "/v1/chat/completions")):
            refused = await post(gateway, "k", body, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
        refused = await post(gateway, "k", {"model": "m", **CHAT}, "/v1/messages")
        assert (refused.status_code, refused.json()["type"]) == (422, "error")
        assert len(dense.submits) == 1

    with_gateway(tmp_path, test)


def test_keys_of_different_callers_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))

    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        ann, bob = (f"Bearer {key}" for key in KEYS.values())
        stream = source(gateway, "chat")
        stream.headers = {**stream.headers, "authorization": ann}
        await stream.connect(5)
        stream.headers = {**stream.headers, "authorization": bob}
        await stream.connect()
        assert stream.status == 404
        unknown = source(gateway, "chat", "never")
        unknown.last_event_id, unknown.headers = stream.last_event_id, {**unknown.headers, "authorization": bob}
        await unknown.connect()
        assert unknown.status == 404
        other = await post(gateway, "k", authorization=bob)  # another body under the same key
        assert other.status_code == 200

    with_gateway(tmp_path, test, api_keys_file=keys)


BAD_IDS = ["x", "0-00000000", "-1-00000000", "12", "2-0123abcd, 3-0123abcd", "1" * 30 + "-00000000", "5-0000000g", ""]


@pytest.mark.parametrize("last_event_id", [*BAD_IDS, "1-ffffffff", "999-00000000"])
def test_a_wrong_last_event_id_is_refused(tmp_path: Path, last_event_id: str) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        stream = source(gateway, "completion")
        await stream.connect()
        refused = await post(gateway, "k", stream.body, Last_Event_ID=last_event_id)
        assert refused.status_code == (410 if last_event_id == "1-ffffffff" else 400), refused.text
        assert len(dense.submits) == 1
        without_key = await post(gateway, None, stream.body, Last_Event_ID=stream.last_event_id)
        assert without_key.status_code == 400
        of_whole = await post(gateway, "whole")
        assert of_whole.status_code == 200

    with_gateway(tmp_path, test)


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "k" * 30_000])
def test_a_wrong_key_is_refused(tmp_path: Path, key: str) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        refused = await post(gateway, key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
        assert (await post(gateway, "x" * 255)).status_code == 200

    with_gateway(tmp_path, test)


def test_an_expired_stream_is_unknown(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        stream = source(gateway, "chat", max_tokens=1000)
        await stream.connect(4)
        await until(lambda: len(dense.cancelled_seq_ids) == 1)
        await stream.connect()
        assert stream.status == 404

    with_gateway(tmp_path, test, lambda _: ids(" a") * 1000, step_s=0.002, resume_timeout_s=0.05)


def test_the_later_of_two_connections_takes_the_stream_over(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        first, second = source(gateway, "chat"), source(gateway, "chat")
        reading = asyncio.create_task(first.connect())
        await until(lambda: len(first.received) == 5)
        second.last_event_id, second.received = first.last_event_id, list(first.received)
        await second.connect()
        await reading
        assert second.received[-1] == ("", "[DONE]")
        assert json.loads(first.received[-1][1])["error"]["code"] == "taken_over"
        whole = source(gateway, "chat", "other")
        await whole.connect()
        assert second.objects == whole.objects

    with_gateway(tmp_path, test, step_s=0.02)


def test_errors_are_not_kept(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        for _ in range(2):
            refused = await post(gateway, "k", {**COMPLETION, "n": 1000})
            assert refused.status_code == 400
        assert (await post(gateway, "k", {**COMPLETION, "n": 1})).status_code == 200

    with_gateway(tmp_path, test)


def test_what_cannot_be_the_same_again_is_refused(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        prompts = {**COMPLETION, "prompt": ["a", "b"]}
        refused = await post(gateway, "k", {**prompts, "stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert (await post(gateway, "k", prompts)).status_code == 200
        assert (await post(gateway, None, {**prompts, "stream": True})).status_code == 200

    with_gateway(tmp_path, test)


def test_a_key_that_would_mean_nothing_is_refused(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        for path in ("generate", "generate_stream", "infer", "versions/1/infer"):
            path = f"/v2/models/ensemble/{path}"
            refused = await post(gateway, "k", {"text_input": "Where?"}, path)
            assert (refused.status_code, "cannot be resumed" in refused.json()["error"]) == (400, True)
        plain = await post(gateway, None, {"text_input": "Where?", "max_tokens": 3}, "/v2/models/ensemble/generate")
        assert plain.status_code == 200
        harmless = await post(gateway, "k", {"prompt": "Where?"}, "/tokenize")
        assert harmless.status_code == 200

    with_gateway(tmp_path, test)


def test_without_the_option_the_key_means_nothing(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        for _ in range(2):
            assert (await post(gateway, "k")).status_code == 200
        assert len(dense.submits) == 2

    with_gateway(tmp_path, test, resume=False)


def test_twenty_clients_that_break_get_their_own_streams(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        async def one(number: int) -> None:
            broken = source(gateway, "chat", f"key {number}".replace(" ", "-"), seed=number)
            for cut in (1 + number % 5, number % 7, 3):
                await broken.connect(cut)
            await broken.connect()
            plain = source(gateway, "chat", None, seed=number)
            await plain.connect()
            assert text_of(broken) == text_of(plain)

        await asyncio.gather(*[one(number) for number in range(20)])

    with_gateway(tmp_path, test, step_s=0.002)


def test_refused_requests_leave_no_memory_counted(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        running = source(gateway, "chat", "running", max_tokens=1000)
        await running.connect(2)
        body = {**COMPLETION, "prompt": "a " * 500}
        for number in range(100):  # each counts as 4,000 bytes and more while it is here
            refused = await post(gateway, f"{number}", body)
            assert (refused.status_code, "gateway.max_resumable" in refused.text) == (429, True), refused.text

    limits = {"max_resumable": 1, "max_held_bytes": 400_000, "resume_timeout_s": 60}
    with_gateway(tmp_path, test, lambda _: ids(" a") * 1000, step_s=0.05, **limits)


def test_a_request_whose_client_leaves_goes_on_waiting_for_memory(tmp_path: Path) -> None:
    limits = {"max_held_bytes": 200_000, "max_held_wait_s": 60.0, "store_responses": True, "resume": True}
    dense = FakeDense(lambda _: ids(" a") * 16, max_model_len=100_000)

    async def test(gateway: RunningGateway) -> None:
        first = (await post(gateway, None, {"input": "Hi " * 7500, "max_output_tokens": 16}, "/v1/responses")).json()
        _, upload = await connect(gateway.http_address)
        upload.write(request_bytes("/v1/completions", b" " * 40_000)[:-10_000])  # counts as 120,000 bytes
        await asyncio.sleep(0.1)
        _, leaving = await connect(gateway.http_address)
        more = {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 16}  # needs 90,000 bytes
        leaving.write(request_bytes("/v1/responses", more, {"Idempotency-Key": "k"}))
        await asyncio.sleep(0.1)
        assert len(dense.submits) == 1  # it waits
        leaving.close()
        await asyncio.sleep(0.1)
        upload.close()
        await until(lambda: len(dense.submits) == 2)

    async def body() -> None:
        async with running_gateway(tmp_path, dense, **limits) as gateway:
            await test(gateway)

    run(body())


def test_one_client_leaves_room_for_others(tmp_path: Path) -> None:
    """Of 64 resumable requests the last eighth is kept for clients with few."""
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))

    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        ann, bob = (f"Bearer {key}" for key in KEYS.values())
        streams = [source(gateway, "chat", f"{number}", max_tokens=1000) for number in range(57)]
        for stream in streams:
            stream.headers = {**stream.headers, "authorization": ann}
            await stream.connect(1)
        assert [stream.status for stream in streams] == [200] * 56 + [429]
        other = source(gateway, "chat", "0", max_tokens=1000)
        other.headers = {**other.headers, "authorization": bob}
        await other.connect(1)
        assert other.status == 200

    limits = {"max_resumable": 64, "resume_timeout_s": 60}
    with_gateway(tmp_path, test, lambda _: ids(" a") * 1000, step_s=0.05, api_keys_file=keys, **limits)


def test_kept_answers_make_room_for_other_requests(tmp_path: Path) -> None:
    """Two hundred and forty answers of 600 bytes do not fit; nobody waits because of them."""

    async def test(gateway: RunningGateway, dense: FakeDense) -> None:
        for start in range(0, 240, 20):
            answers = await asyncio.gather(*[post(gateway, f"{start + i}") for i in range(20)])
            assert {each.status_code for each in answers} == {200}
        long = await post(gateway, None, {**COMPLETION, "prompt": "a " * 10_000})  # counts as 80,000 bytes
        assert "context_length_exceeded" in long.text

    with_gateway(tmp_path, test, lambda _: ids(" a") * 30, max_held_bytes=100_000, max_resumable=10_000)
