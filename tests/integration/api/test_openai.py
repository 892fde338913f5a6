"""The real `openai` client against a real cluster, curl for the bytes on the wire, and gRPC for comparison."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.clients.http_clients import async_client, client, events, socket_path
from tests.support.cluster import Cluster, request, running_cluster
from tests.support.models import TWO_LAYERS
from tests.support.reference import random_prompts, reference_logprobs

MODEL = EMBEDDED_MODEL.name
PROMPT = "San Francisco is a"
MAX_ROUNDS = 8  # on a busy machine a long answer may end before the next line of a test runs
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "penalties": {"temperature": 0.7, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
}
EXTENSIONS = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 4}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("openai"), TWO_LAYERS, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with client(cluster.http_address) as transport:
        yield openai.OpenAI(
            api_key="none needed", base_url="http://gateway/v1", http_client=transport, max_retries=0
        )


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served layers as a checkpoint of their own."""
    path = tmp_path_factory.mktemp("two_layers")
    for file in EMBEDDED_MODEL.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 2}
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_idle()


def async_api(cluster: Cluster) -> openai.AsyncOpenAI:
    transport = async_client(cluster.http_address)
    return openai.AsyncOpenAI(
        api_key="none needed", base_url="http://gateway/v1", http_client=transport, max_retries=0
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_completions_equal_those_of_grpc(cluster: Cluster, api: openai.OpenAI, name: str) -> None:
    expected = cluster.generate(PROMPT, 24, **OPTIONS[name], **EXTENSIONS)
    extra = {**EXTENSIONS, "return_token_ids": True}
    whole = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, extra_body=extra, **OPTIONS[name])
    [choice] = whole.choices
    assert choice.model_extra["token_ids"] == expected.token_ids
    assert choice.text == expected.text
    assert whole.usage.completion_tokens == expected.finish.usage.num_output_tokens
    assert whole.usage.prompt_tokens == expected.finish.usage.num_prompt_tokens
    assert choice.finish_reason == {1: "stop", 2: "length"}[expected.finish.reason]
    chunks = list(
        api.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, extra_body=extra, stream=True, **OPTIONS[name]
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    token_ids = [i for chunk in chunks for i in chunk.choices[0].model_extra.get("token_ids", ())]
    assert token_ids == expected.token_ids
    ids = api.completions.create(
        model=MODEL,
        prompt=cluster.gateway.Tokenize(gateway_pb2.TokenizeRequest(text=PROMPT)).token_ids[:],
        max_tokens=24,
        extra_body=extra,
        **OPTIONS[name],
    )
    assert ids.choices[0].text == expected.text


@pytest.mark.parametrize("name", OPTIONS)
def test_chats_equal_those_of_grpc(cluster: Cluster, api: openai.OpenAI, name: str) -> None:
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(**message) for message in USER])
    message = gateway_pb2.GenerateRequest(chat=chat, max_tokens=24, sampling=OPTIONS[name])
    expected = cluster.gateway.Generate(message, timeout=60).completions[0]
    whole = api.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=24, **OPTIONS[name])
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens == len(expected.token_ids)
    stream = api.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        **OPTIONS[name],
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.token_ids)
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_fields_of_openai_without_effect_here_are_accepted(api: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": USER, "max_tokens": 8, "temperature": 0}
    expected = api.chat.completions.create(**options).choices[0].message.content
    taken: Any = {
        "metadata": {"team": "red"},
        "prompt_cache_key": "chat-17",
        "reasoning_effort": "high",
        "safety_identifier": "somebody",
        "service_tier": "flex",
        "store": True,
        "user": "somebody",
        "verbosity": "high",
    }
    assert api.chat.completions.create(**options, **taken).choices[0].message.content == expected
    stream_options: Any = {"include_usage": True, "include_obfuscation": False}
    stream = api.chat.completions.create(**options, **taken, stream=True, stream_options=stream_options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == expected


def test_every_chunk_has_the_counts_so_far_and_the_last_the_finish_reason(cluster: Cluster, api: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    options: Any = {"model": MODEL, "max_tokens": 20, "temperature": 0, "stream": True, "extra_body": extra}
    options["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}  # as guidellm always sends
    prompt_ids = list(cluster.gateway.Tokenize(gateway_pb2.TokenizeRequest(text=PROMPT)).token_ids)
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(**message) for message in USER])
    chat_ids = list(cluster.gateway.Tokenize(gateway_pb2.TokenizeRequest(chat=chat)).token_ids)
    *chunks, last = api.completions.create(prompt=PROMPT, **options)
    assert chunks[0].choices[0].model_extra["prompt_token_ids"] == prompt_ids
    _check_counts(chunks, last, len(prompt_ids))
    *chunks, last = api.chat.completions.create(messages=USER, **options)
    assert chunks[0].model_extra["prompt_token_ids"] == chat_ids
    assert chunks[-1].choices[0].delta.content is None
    _check_counts(chunks, last, len(chat_ids))


def _check_counts(chunks: list[Any], last: Any, num_prompt_tokens: int) -> None:
    num_tokens = 0
    for chunk in chunks:
        num_tokens += len(chunk.choices[0].model_extra.get("token_ids", ()))
        assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (num_prompt_tokens, num_tokens)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert (last.choices, last.usage.completion_tokens) == ([], num_tokens)


def test_a_truncated_prompt_gets_the_answer_of_its_last_tokens(api: openai.OpenAI) -> None:
    prompt = list(range(300, 400))
    options: Any = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    whole = api.completions.create(prompt=prompt, extra_body={"truncate_prompt_tokens": 30}, **options)
    assert whole.choices[0].text == api.completions.create(prompt=prompt[-30:], **options).choices[0].text
    assert whole.usage.prompt_tokens == 30


def test_n_answers_equal_those_of_n_consecutive_seeds(cluster: Cluster, api: openai.OpenAI) -> None:
    expected = [cluster.generate(PROMPT, 12, temperature=1.0, seed=50 + i).text for i in range(3)]
    options: Any = {"model": MODEL, "prompt": [PROMPT, PROMPT], "max_tokens": 12, "temperature": 1, "seed": 50, "n": 3}
    whole = api.completions.create(**options)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(expected * 2))
    texts = dict.fromkeys(range(6), "")
    for chunk in api.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == expected * 2


def test_logprobs_of_both_kinds_agree_with_grpc(cluster: Cluster, api: openai.OpenAI) -> None:
    message = gateway_pb2.GenerateRequest(prompt=PROMPT, max_tokens=8, logprobs=3, sampling={"temperature": 0})
    expected = cluster.gateway.Generate(message, timeout=60).completions[0]
    logprobs = [token.logprob for token in expected.logprobs]
    choice = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=3, temperature=0).choices[0]
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[token] == max(top.values()) == logprob  # greedy
    echo = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=3, temperature=0, echo=True)
    assert echo.choices[0].text == PROMPT + choice.text
    assert echo.choices[0].logprobs.token_logprobs[0] is None
    assert echo.choices[0].logprobs.token_logprobs[-8:] == pytest.approx(logprobs, abs=1e-4)
    chat = api.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=8, logprobs=True, top_logprobs=2, temperature=0
    )
    entries = chat.choices[0].logprobs.content
    assert bytes(value for entry in entries for value in entry.bytes).decode().startswith(
        chat.choices[0].message.content
    )
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token


@pytest.mark.parametrize("is_stream", [False, True])
def test_prompt_logprobs_equal_hugging_face(
    cluster: Cluster, api: openai.OpenAI, is_stream: bool, two_layers: Path
) -> None:
    prompts = [random_prompts(1, 90, seed)[0] for seed in range(3)]  # longer than the other prompts
    expected = [reference_logprobs(two_layers, prompt) for prompt in prompts]
    options: Any = {"model": MODEL, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 2}
    if is_stream:
        chunks = list(api.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        usage = chunks[-1].usage
        choices = {chunk.choices[0].index: chunk.choices[0] for chunk in chunks[:-1]}
        assert len(choices) == len(chunks) - 1 == 3
    else:
        whole = api.completions.create(**options)
        usage, choices = whole.usage, {choice.index: choice for choice in whole.choices}
    assert (usage.completion_tokens, usage.prompt_tokens) == (0, sum(map(len, prompts)))
    for index, logprobs in enumerate(expected):
        first, *others = choices[index].logprobs.token_logprobs
        assert first is None
        assert others == pytest.approx(logprobs, abs=1e-4)
        assert choices[index].finish_reason == "length"
    for prompt, logprobs in zip(prompts, expected, strict=True):
        message = request(prompt, 0, prompt_logprobs=0)
        if is_stream:
            [answer] = cluster.gateway.GenerateStream(message, timeout=60)
        else:
            response = cluster.gateway.Generate(message, timeout=60)
            [answer] = response.completions
        echo = answer.prompt if is_stream else response.prompt
        assert [each.logprob for each in echo.logprobs] == pytest.approx(logprobs, abs=1e-4)
        assert (answer.text, list(answer.token_ids)) == ("", [])
        assert answer.finish.reason == gateway_pb2.FINISH_REASON_LENGTH
        assert answer.finish.usage.num_output_tokens == 0
        timings = answer.finish.timings
        assert (timings.first_token_ms, timings.per_token_ms) == (0, 0)
        assert timings.total_ms > 0


def test_stop_strings_and_stop_tokens(cluster: Cluster, api: openai.OpenAI) -> None:
    free = cluster.generate(PROMPT, 20)
    stop = free.text[10:14]
    choice = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stop=stop).choices[0]
    assert choice.text == free.text[: free.text.index(stop)]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)
    token_id = free.token_ids[5]
    extra = {"stop_token_ids": [token_id], "return_token_ids": True}
    choice = api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, extra_body=extra
    ).choices[0]
    assert choice.model_extra["token_ids"] == free.token_ids[: free.token_ids.index(token_id) + 1]
    assert choice.model_extra["stop_reason"] == token_id


def test_errors_are_the_clients_own_exceptions(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        api.completions.create(model=MODEL, prompt=PROMPT, temperature=1000)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_request")
    assert wrong.value.request_id
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="gpt-5", messages=USER)
    with pytest.raises(openai.BadRequestError) as unsupported:
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        other: Any = {"type": "function", "function": {"name": "g"}}
        api.chat.completions.create(model=MODEL, messages=USER, tools=tools, tool_choice=other)
    assert unsupported.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError):  # the stream is refused before it begins
        api.completions.create(model=MODEL, prompt=PROMPT, temperature=1000, stream=True)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 2048 tok") as too_long:
            api.completions.create(model=MODEL, prompt=[5] * 2048, max_tokens=1, stream=stream)
        assert (too_long.value.param, too_long.value.code) == ("prompt", "context_length_exceeded")


def test_max_tokens_beyond_the_context_ends_with_the_context(cluster: Cluster, api: openai.OpenAI) -> None:
    whole = api.completions.create(model=MODEL, prompt=[5] * 2030, max_tokens=10**6, extra_body={"ignore_eos": True})
    assert (whole.choices[0].finish_reason, whole.usage.total_tokens) == ("length", 2048)
    answer = cluster.generate([5] * 2030, 10**6, ignore_eos=True)
    assert (answer.finish.reason, len(answer.token_ids)) == (gateway_pb2.FINISH_REASON_LENGTH, 18)


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).owned_by == "twostroke"


def test_a_closed_stream_frees_its_request(cluster: Cluster, api: openai.OpenAI) -> None:
    def ends_early() -> bool:
        before, extra = cluster.wait_idle().num_computed_tokens, {"ignore_eos": True}
        stream = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1500, stream=True, extra_body=extra)
        next(iter(stream))
        is_running = cluster.attention_status().num_sequences == 1
        stream.close()
        return is_running and cluster.wait_idle().num_computed_tokens - before < 1500

    assert any(ends_early() for _ in range(MAX_ROUNDS)), "it ran to its end"


def test_asynchronous_streams_run_beside_a_cancelled_one(cluster: Cluster) -> None:
    prompts = [PROMPT, "The capital of France is", "Water boils at", "Tokyo is"]
    expected = [cluster.generate(prompt, 16).text for prompt in prompts]

    async def text(api: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await api.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def cancelled(api: openai.AsyncOpenAI) -> None:
        task = asyncio.create_task(
            api.chat.completions.create(
                model=MODEL, messages=USER, max_tokens=1500, extra_body={"ignore_eos": True}
            )
        )
        await asyncio.sleep(0.3)
        task.cancel()

    async def test() -> None:
        async with async_api(cluster) as api:
            texts = await asyncio.gather(*(text(api, prompt) for prompt in prompts), cancelled(api))
            assert texts[:-1] == expected

    asyncio.run(asyncio.wait_for(test(), 60))


def test_an_abort_over_grpc_ends_the_stream(cluster: Cluster) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    for _ in range(MAX_ROUNDS):
        with (
            client(cluster.http_address) as http,
            http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "stop-me"}) as response,
        ):
            lines = response.iter_lines()
            first = next(lines)
            abort = cluster.gateway.Abort(gateway_pb2.AbortRequest(request_id="stop-me"))
            chunks = events("\n".join([first, *lines, "", ""]).strip() + "\n\n")
        if abort.was_running:
            break
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"


CURL = shutil.which("curl")


def curl(cluster: Cluster, path: str, body: dict[str, Any]) -> tuple[str, dict[str, str], str]:
    """The status line, headers and body, unchanged."""
    assert CURL is not None
    command = [CURL, "-isS", "--no-buffer", "--max-time", "60", "--unix-socket", socket_path(cluster.http_address)]
    command += ["-H", "content-type: application/json", "-H", "x-request-id: curl-1", "-d", json.dumps(body)]
    output = subprocess.run([*command, f"http://gateway{path}"], capture_output=True, check=True).stdout.decode()
    head, _, text = output.partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), text


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
def test_the_bytes_that_curl_sees(cluster: Cluster) -> None:
    expected = cluster.generate(PROMPT, 4).text
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": True}
    status, headers, text = curl(cluster, "/v1/completions", body)
    assert status == "HTTP/1.1 200 OK"
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-request-id"] == "curl-1"
    assert re.fullmatch(r"(data: \{[^\n]*\}\n\n)+data: \[DONE\]\n\n", text)
    assert "".join(chunk["choices"][0]["text"] for chunk in events(text)) == expected
    status, headers, text = curl(cluster, "/v1/completions", body | {"stream": False})
    assert status == "HTTP/1.1 200 OK"
    assert (headers["content-type"], headers["content-length"]) == ("application/json", str(len(text.encode())))
    assert json.loads(text)["choices"][0]["text"] == expected
    status, headers, text = curl(cluster, "/v1/completions", body | {"n": -1})
    assert status == "HTTP/1.1 400 Bad Request"
    assert headers["x-request-id"] == "curl-1"
    assert json.loads(text)["error"]["param"] == "n"


def test_http_and_grpc_stay_equal_in_a_crowd(cluster: Cluster) -> None:
    expected = [cluster.generate(PROMPT, 10 + i, temperature=0.8, seed=i).text for i in range(12)]

    async def test() -> None:
        async with async_client(cluster.http_address) as http:
            bodies = [
                {"prompt": PROMPT, "max_tokens": 10 + i, "temperature": 0.8, "seed": i, "stream": i % 2 == 0}
                for i in range(12)
            ]
            responses = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
            assert list(map(_text, responses)) == expected

    asyncio.run(asyncio.wait_for(test(), 60))


def _text(response: httpx2.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        return "".join(chunk["choices"][0]["text"] for chunk in events(response.text))
    return response.json()["choices"][0]["text"]
