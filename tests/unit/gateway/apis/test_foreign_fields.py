"""Fields of other servers: those without an effect on the answer are ignored, all others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.pb import dense_pb2
from tests.support.clients.http_clients import async_client, events
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: Mapping[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2, "seed": 1},
    CHATS: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "seed": 1},
}
IGNORED: Mapping[str, Any] = {
    "metadata": {"team": "red", "trial": 7, "share": 0.5, "is_test": True, "note": None, "of": ["x"]},
    "prompt_cache_key": "chat-17",
    "reasoning_effort": "xhigh",
    "safety_identifier": "u" * 512,
    "service_tier": "flex",
    "store": True,
    "verbosity": "low",
    "session_id": "conversation-3",
    "stream_interval": 8,
    "user": "somebody",
}
TOO_MUCH: list[tuple[str, Any, str]] = [
    ("metadata", {str(i): "x" for i in range(17)}, "metadata"),
    ("metadata", "red", "metadata"),
    ("prompt_cache_key", "x" * 513, "prompt_cache_key"),
    ("reasoning_effort", 3, "reasoning_effort"),
    ("safety_identifier", "x" * 513, "safety_identifier"),
    ("service_tier", "x" * 513, "service_tier"),
    ("session_id", "x" * 513, "session_id"),
    ("store", "yes", "store"),
    ("verbosity", "x" * 513, "verbosity"),
]
# Documented fields of llama.cpp, SGLang, TGI and vLLM: a value that would change the answer, and neutral values.
CHANGING: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("mirostat", 2, (0,)),
    ("typical_p", 0.5, (1, 1.0)),
    ("dry_multiplier", 0.8, (0, 0.0)),
    ("xtc_probability", 0.5, (0.0,)),
    ("dynatemp_range", 0.5, (0.0,)),
    ("top_n_sigma", 2.0, (-1.0,)),
    ("repeat_penalty", 1.1, (1.0,)),
    ("n_probs", 3, (0,)),
    ("samplers", ["top_k"], ([],)),
    ("lora", [{"id": 0, "scale": 1}], ([],)),
    ("lora_path", "adapter", ("",)),
    ("session_params", {"id": "1"}, ({},)),
    ("custom_logit_processor", "code", ("",)),
    ("beam_width", 4, (0, 1)),
    ("input_ids", [1, 2], ()),
    ("return_cached_tokens_details", True, (False,)),
    ("return_meta_info", True, (False,)),
    ("return_routed_experts", True, (False,)),
    ("adapter_id", "adapter", ("",)),
    ("guideline", "Be kind", ("",)),
    ("truncate", 5, ()),
    ("watermark", True, (False,)),
    ("logits_processors", ["x"], ([],)),
    ("repetition_detection", {"max_pattern_size": 8}, ()),
    ("watermarking", True, (False,)),
    ("ec_transfer_params", {"a": 1}, ()),
]


def submitted(submit: dense_pb2.Submit) -> dense_pb2.Submit:
    """The message without the fields that differ in every request."""
    same = dense_pb2.Submit()
    same.CopyFrom(submit)
    for message, names in ((same, ("seq_id", "queue_timeout_ms")), (same.spec, ("request_id", "traceparent"))):
        for name in names:
            message.ClearField(name)
    return same


@pytest.mark.parametrize("path", BODIES)
def test_ignored_fields_change_nothing(path: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            body = BODIES[path]
            plain = (await client.post(path, json=body)).json()
            response = await client.post(path, json=body | IGNORED)
            assert response.status_code == 200, response.text
            assert response.json()["choices"] == plain["choices"]
            options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}}
            *_, last = events((await client.post(path, json=body | IGNORED | options)).text)
            assert last["usage"] == plain["usage"]
            first, *others = map(submitted, dense.submits)
            assert others == [first, first]
            for name, value, param in TOO_MUCH:
                response = await client.post(path, json=body | {name: value})
                assert response.status_code == 400, (name, value)
                assert response.json()["error"]["param"] == param

    dense = FakeDense(lambda submit: [70, 80])
    run(test())


def test_the_openapi_document_names_ignored_fields(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
        for model in ("CompletionRequest", "ChatRequest"):
            fields = schemas[model]["properties"]
            for name in IGNORED.keys() - {"user"} - ({"reasoning_effort"} if model == "ChatRequest" else set()):
                assert "ignored" in fields[name]["description"], name
        assert "ignored" in schemas["StreamOptions"]["properties"]["include_obfuscation"]["description"]

    async def body() -> None:
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            await test(client, gateway)

    dense = FakeDense(lambda submit: [70, 80])
    run(body())


def test_special_tokens_have_no_spaces_between_them_whatever_is_asked(tmp_path: Path) -> None:
    token_ids = [3, 4, 60, 5, 3]
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    options = {"skip_special_tokens": False, "max_tokens": len(token_ids), "ignore_eos": True}

    async def test() -> None:
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            for with_spaces in (True, False):
                own = {"spaces_between_special_tokens": with_spaces}
                body = BODIES[COMPLETIONS] | options | own | {"seed": 2**63 - 1}
                response = await client.post(COMPLETIONS, json=body)
                assert response.status_code == 200, response.text
                expected = tokenizer.decode(token_ids, skip_special_tokens=False, **own)
                assert response.json()["choices"][0]["text"] == expected
                assert "<|system|><|user|>" in expected

    dense = FakeDense(lambda submit: token_ids)
    run(test())


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_other_servers_that_would_change_the_answer_are_refused(path: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            for name, value, neutral in CHANGING:
                response = await client.post(path, json=BODIES[path] | {name: value})
                assert response.status_code == 400, name
                error = response.json()["error"]
                assert error["param"] == name
                assert "not supported" in error["message"]
                for each in (*neutral, None):
                    assert (await client.post(path, json=BODIES[path] | {name: each})).status_code == 200, (name, each)

    dense = FakeDense(lambda submit: [70, 80])
    run(test())


FOREIGN: list[tuple[str, dict[str, Any], str, Any]] = [
    (CHATS, BODIES[CHATS], "return_prompt_text", True),
    (CHATS, BODIES[CHATS], "media_io_kwargs", {"image": {"mode": "L"}}),
    ("/v1/responses", {"input": "Hi"}, "ec_transfer_params", {"a": 1}),
    ("/v1/responses", {"input": "Hi"}, "mm_processor_kwargs", {"a": 1}),
    ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": []}, "ec_transfer_params", {"a": 1}),
    (f"{COMPLETIONS}/render", {"prompt": "a"}, "return_token_offsets", True),
    (f"{CHATS}/render", {"messages": BODIES[CHATS]["messages"]}, "return_token_offsets", True),
    ("/v1/embeddings", {"input": "a"}, "padding", "max_length"),
    ("/pooling", {"input": "a"}, "media_io_kwargs", {"image": {"mode": "L"}}),
    ("/classify", {"input": "a"}, "mm_processor_kwargs", {"a": 1}),
]


def test_fields_of_one_route_that_would_change_its_answer_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            for path, body, name, value in FOREIGN:
                response = await client.post(path, json=body | {name: value})
                assert response.status_code == 400, (path, name)
                assert f"{name}: this field is not supported" in response.text, response.text

    dense = FakeDense(lambda submit: [70, 80])
    run(test())
