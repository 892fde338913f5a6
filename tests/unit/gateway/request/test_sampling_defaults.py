"""What requests sample with where they say nothing: what the checkpoint's generation_config.json says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.common.config import EMBEDDED_MODEL
from services.common.errors import ConfigError, ModelError
from services.gateway.request.sampling_defaults import override, read_sampling_defaults
from services.pb import sampling_pb2
from tests.support.clients.gateway_calls import EOS
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, MODEL, USER, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

# As Qwen3 has them, and more.
IN_FILE = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 1,
    "max_new_tokens": 5, "eos_token_id": 2, "transformers_version": "5.0",
}  # fmt: skip
CHAT = {"model": MODEL, "messages": USER, "max_tokens": 4}
LIKE_VLLM = [
    (COMPLETIONS, {"prompt": "a"}),
    (CHATS, CHAT),
    ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
    ("/v1/messages", CHAT),
    ("/v2/chat", CHAT),
]
WITH_OWN_DEFAULTS = [
    ("/generate", {"text": "a"}, (1.0, None, 1.0)),
    ("/completion", {"prompt": "a"}, (0.8, 40, 0.95)),
    ("/api/generate", {"model": MODEL, "prompt": "a", "stream": False}, (0.8, 40, 0.9)),
    ("/inference/v1/generate", {"token_ids": [5]}, (1.0, None, 1.0)),
]


def options_of(sampling: sampling_pb2.SamplingParams) -> tuple[Any, ...]:
    top_k = sampling.top_k if sampling.HasField("top_k") else None
    return pytest.approx(sampling.temperature), top_k, pytest.approx(sampling.top_p)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = shutil.copytree(EMBEDDED_MODEL, tmp_path / MODEL, ignore=shutil.ignore_patterns("*.safetensors"))
    (path / "generation_config.json").write_text(json.dumps(IN_FILE))
    return path


def test_requests_to_openais_apis_sample_as_the_model_says_unless_they_say_it(model: Path, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def sampled(path: str, body: dict[str, Any]) -> tuple[Any, ...]:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return options_of(dense.submits[-1].spec.sampling)

        for path, body in LIKE_VLLM:
            assert await sampled(path, body) == (0.6, 20, 0.95), path
            names = ("temperature", "k", "p") if path == "/v2/chat" else ("temperature", "top_k", "top_p")
            given = dict(zip(names, (0.25, -1, 1.0), strict=True))
            assert await sampled(path, body | given) == (0.25, None, 1.0), path
            given = dict(zip(names, (None, None, 0.5), strict=True))
            assert await sampled(path, body | given) == (0.6, 20, 0.5), path
        for path, body, options in WITH_OWN_DEFAULTS:
            assert await sampled(path, body) == options, path
        shown = (await client.post("/v1/responses", json={"input": "a", "top_p": 0.5})).json()
        assert (shown["temperature"], shown["top_p"]) == (0.6, 0.5)
        [rendered] = (await client.post(f"{COMPLETIONS}/render", json={"prompt": "a", "top_k": 3})).json()
        options = {"temperature": 0.6, "top_k": 3, "top_p": 0.95, "repetition_penalty": 1.0, "max_tokens": 16}
        assert rendered["sampling_params"] == options
        search = {"prompt": "a", "use_beam_search": True, "n": 2}
        [rendered] = (await client.post(f"{COMPLETIONS}/render", json=search)).json()
        assert rendered["sampling_params"] == {"use_beam_search": True, "n": 2, "max_tokens": 16}

    dense = FakeDense(lambda submit: [EOS])
    with_client(tmp_path, dense, test, model=model)


def test_they_need_not(model: Path, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body in LIKE_VLLM:
            assert (await client.post(path, json=body)).status_code == 200
            assert options_of(dense.submits[-1].spec.sampling) == (1.0, None, 1.0), path

    dense = FakeDense(lambda submit: [EOS])
    with_client(tmp_path, dense, test, model=model, sampling_defaults="none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"temperature": "hot"}', "temperature is 'hot', expected a number"),
        ('{"top_p": true}', "top_p is true, expected a number"),
        ('{"top_k": 2.5}', "top_k is 2.5, expected an integer"),
        ('{"top_p": 1.5}', "top_p is 1.5, must be"),
        ('{"top_k": 2147483648}', "top_k is 2147483648, at most 2147483647 allowed"),
        ('{"temperature": 1' + "0" * 400 + "}", r"temperature is 1000.*, at most 2147483647 allowed"),
        ('{"top_k": -3}', "top_k is -3, must be at least 1"),
    ],
)
def test_a_value_that_no_request_may_have_is_refused_at_the_start(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json in .*" + words):
        read_sampling_defaults(tmp_path)


@pytest.mark.parametrize("text", [None, "{}", '{"top_k": 0, "eos_token_id": 3}', '{"top_k": -1, "temperature": null}'])
def test_a_file_may_say_nothing(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert read_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(("defaults", "expected"), [("model", (0.6, None, 0.5)), ("none", (1.0, None, 0.5))])
def test_a_server_may_say_it_in_place_of_the_model(
    defaults: str, expected: tuple[Any, ...], model: Path, tmp_path: Path
) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body in LIKE_VLLM:
            assert (await client.post(path, json=body)).status_code == 200
            assert options_of(dense.submits[-1].spec.sampling) == expected, path

    dense = FakeDense(lambda submit: [EOS])
    entries = ("top_p=0.5", "top_k=-1")
    with_client(tmp_path, dense, test, model=model, sampling_defaults=defaults, sampling_overrides=entries)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["max_new_tokens=5"], "has 'max_new_tokens'; it may have temperature, top_k"),
        (["top_p=0.5", "top_p=0.6"], "has 'top_p' twice"),
        (["top_k=2.5"], "has top_k '2.5', expected an integer"),
        (["temperature=null"], "has temperature 'null', expected a number"),
        (["temperature=nan"], "temperature is nan, must be"),
        (["min_p=2"], "min_p is 2.0, must be"),
    ],
)
def test_a_server_may_not_say_what_no_request_may(entries: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match="gateway.sampling_overrides.* " + words):
        override({}, entries)
