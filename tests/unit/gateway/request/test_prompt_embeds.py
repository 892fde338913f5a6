"""Prompts of embeddings in the gateway: what a dense worker is sent, what is refused, and how much memory they take."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
import torch

from services.common.config import EMBEDDED_MODEL, load_config
from services.common.errors import ConfigError
from services.common.model_config import load_model_config
from services.pb import gateway_pb2
from tests.support.adapters import make_adapter
from tests.support.clients.http_clients import async_client
from tests.support.prompt_vectors import make_prompt_tuning
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.torch_files import encoded, hostile_files
from tests.support.workers.fake_dense import FakeDense

HIDDEN_SIZE = load_model_config(EMBEDDED_MODEL).hidden_size
VOCAB_SIZE, MAX_MODEL_LEN = 1024, 64
VECTORS = torch.randn(6, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
COMPLETIONS = "/v1/completions"
Test = Callable[[httpx2.AsyncClient, RunningGateway, FakeDense], Awaitable[None]]


def with_gateway(tmp_path: Path, test: Test, **options: Any) -> None:
    async def body() -> None:
        limits = {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_MODEL_LEN}
        dense = FakeDense(lambda submit: [70] * submit.spec.max_tokens, **limits)
        settings = {"enable_prompt_embeds": True} | options
        async with (
            running_gateway(tmp_path, dense, **settings) as gateway,
            async_client(gateway.http_address) as client,
        ):
            await test(client, gateway, dense)

    run(body())


def body_of(embeds: str | list[str], **options: Any) -> dict[str, Any]:
    return {"prompt_embeds": embeds, "max_tokens": 2} | options


def message_of(vectors: torch.Tensor = VECTORS, **options: Any) -> gateway_pb2.GenerateRequest:
    embeds = {
        "values": vectors.numpy().tobytes(),
        "num_tokens": len(vectors),
        "hidden_size": vectors.shape[1],
        "dtype": str(vectors.dtype).removeprefix("torch."),
    }
    own = {name: options.pop(name) for name in list(options) if name in embeds}
    return gateway_pb2.GenerateRequest(prompt_embeds=gateway_pb2.PromptEmbeds(**embeds | own), max_tokens=2, **options)


def sent_table(dense: FakeDense, submit_index: int = -1) -> torch.Tensor:
    table = dense.submits[submit_index].spec.prompt_embeds
    values = b"".join(part.values for part in dense.table_parts if part.hash == table.hash)
    found = torch.frombuffer(bytearray(values), dtype=getattr(torch, table.dtype))
    return found.view(-1, table.hidden_size)[-table.num_rows :]  # it may have been sent before


def test_the_worker_gets_the_embeddings_and_their_token_ids(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, dense: FakeDense) -> None:
        api = openai.AsyncOpenAI(api_key="x", base_url="http://gateway/v1", http_client=client, max_retries=0)
        for vectors in (VECTORS, VECTORS.half(), VECTORS[1:3].contiguous(), VECTORS.t().contiguous().t()):
            for prompt in ("", None):
                extra = {"prompt_embeds": encoded(vectors)}
                answer = await api.completions.create(model="", prompt=prompt, max_tokens=2, extra_body=extra)
                assert answer.usage is not None and answer.usage.prompt_tokens == len(vectors)
                assert torch.equal(sent_table(dense), vectors) and sent_table(dense).dtype == vectors.dtype
                sent = list(dense.submits[-1].spec.prompt_token_ids)
                assert sent == list(range(VOCAB_SIZE, VOCAB_SIZE + len(vectors)))
        await gateway.stub.Generate(message_of(VECTORS[:2]))
        assert torch.equal(sent_table(dense), VECTORS[:2])
        # Several prompts, embeddings first, beside text.
        body = body_of([encoded(VECTORS), encoded(VECTORS[None, :3])], prompt=[[5, 6], [7]], n=2, stream=False)
        dense.submits.clear()
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(8))
        assert answer["usage"]["prompt_tokens"] == 6 + 3 + 2 + 1
        lengths = [len(submit.spec.prompt_token_ids) for submit in dense.submits]
        assert sorted(lengths) == [1, 1, 2, 2, 3, 3, 6, 6]
        assert [submit.spec.HasField("prompt_embeds") for submit in dense.submits] == [length > 2 for length in lengths]
        cut = await client.post(COMPLETIONS, json=body_of(encoded(VECTORS), truncate_prompt_tokens=2))
        sent = list(dense.submits[-1].spec.prompt_token_ids)
        assert cut.status_code == 200 and sent == [VOCAB_SIZE + 4, VOCAB_SIZE + 5]

    with_gateway(tmp_path, test)


def test_a_large_table_comes_in_parts(tmp_path: Path) -> None:
    long = torch.randn(3000, HIDDEN_SIZE)

    async def body() -> None:
        dense = FakeDense(lambda submit: [70] * submit.spec.max_tokens, vocab_size=VOCAB_SIZE, max_model_len=4096)
        async with running_gateway(tmp_path, dense, enable_prompt_embeds=True, max_message_bytes=2**24) as gateway:
            await gateway.stub.Generate(message_of(long))
            assert len(dense.table_parts) == -(-long.nbytes // 2**20) > 1
            assert torch.equal(sent_table(dense), long)

    run(body())


def test_it_is_off_by_default_and_not_for_tensorrt(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, dense: FakeDense) -> None:
        response = await client.post(COMPLETIONS, json=body_of(encoded(VECTORS)))
        assert response.status_code == 400 and "gateway.enable_prompt_embeds is not set" in response.text
        with pytest.raises(grpc.aio.AioRpcError, match=r"gateway\.enable_prompt_embeds is not set") as refused:
            await gateway.stub.Generate(message_of())
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        response = await client.post(COMPLETIONS, json={"max_tokens": 1})
        assert response.status_code == 400 and "prompt" in response.json()["error"]["message"]

    with_gateway(tmp_path, test, enable_prompt_embeds=False)
    with pytest.raises(ConfigError, match="TensorRT takes no embeddings"):
        load_config(None, ("gateway.enable_prompt_embeds=true", "dense.backend=tensorrt"))


def test_wrong_embeddings_get_a_400_that_names_them(tmp_path: Path) -> None:
    ones = torch.ones(2, HIDDEN_SIZE)
    make_prompt_tuning(tmp_path / "tuned", VECTORS)
    texts: list[tuple[Any, dict[str, Any], str]] = [
        ("!", {}, "prompt_embeds is not base64"),
        ("\u00e9", {}, "prompt_embeds is not base64"),
        ("QUJD", {}, "not a zip archive"),
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        (7, {}, "prompt_embeds"),
        ([encoded(ones), "QUJD"], {}, r"prompt_embeds[1] is no file of torch.save"),
        ([encoded(ones)] * 65, {}, "65 prompts, must be 1 to 64 (gateway.max_prompts)"),
        (encoded(ones[0]), {}, f"has the shape [{HIDDEN_SIZE}], must be [num_tokens, {HIDDEN_SIZE}]"),
        (encoded(ones[:, 1:]), {}, f"has the shape [2, {HIDDEN_SIZE - 1}]"),
        (encoded(ones[:0]), {}, f"has the shape [0, {HIDDEN_SIZE}]"),
        (encoded(torch.stack([ones, ones])), {}, f"has the shape [2, 2, {HIDDEN_SIZE}]"),
        (encoded(torch.tensor(1.0)), {}, "has the shape []"),
        (encoded(torch.ones(1, 1).expand(10**9, HIDDEN_SIZE)), {}, "maximum context length is 64 tokens"),
        (encoded(torch.ones(1, 1).expand(10**9, 10**6)), {}, "has the shape [1000000000, 1000000]"),
        (encoded(ones.repeat(MAX_MODEL_LEN, 1)), {}, "128 of prompt_embeds"),
        (encoded(ones * float("nan")), {}, "values that are not finite"),
        (encoded(ones.bfloat16() * float("inf")), {}, "values that are not finite"),
        (encoded(ones.double()), {}, "DoubleStorage"),
        (encoded(ones), {"echo": True}, "echo cannot be used with prompt_embeds"),
        (encoded(ones), {"prompt_logprobs": 1}, "prompt_logprobs cannot be used with prompt_embeds"),
        (encoded(ones), {"model": "tuned"}, "prompt_embeds cannot be used with the adapter 'tuned'"),
    ]
    hostile = list(hostile_files("/nowhere/x").values())[1:]  # the first is empty
    texts += [(base64.b64encode(data).decode(), {}, "prompt_embeds ") for data in hostile]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"values": b""}, "has 0 bytes, 6 rows"),
        ({"values": bytes(10**6)}, "has 1000000 bytes, 6 rows"),
        ({"num_tokens": 0}, "has the shape [0,"),
        ({"num_tokens": 2**32 - 1}, "maximum context length"),
        ({"num_tokens": 1}, "bytes, 1 rows"),
        ({"hidden_size": 2**31}, f"must be [num_tokens, {HIDDEN_SIZE}]"),
        ({"dtype": "int8"}, "dtype 'int8', supported: float32, float16, bfloat16"),
        ({"dtype": ""}, "dtype ''"),
        ({"dtype": "float16"}, "bytes, 6 rows"),
        ({"echo": True}, "echo cannot be used"),
        ({"prompt_logprobs": 0}, "prompt_logprobs cannot be used"),
        ({"vectors": VECTORS / 0}, "not finite"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, dense: FakeDense) -> None:
        for embeds, options, words in texts:
            response = await client.post(COMPLETIONS, json=body_of(embeds, **options))
            assert response.status_code == 400 and words in response.json()["error"]["message"], (words, response.text)
        for change, words in changes:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await gateway.stub.Generate(message_of(**change))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, words
            assert words in str(refused.value.details())
        assert not dense.submits
        assert (await client.post(COMPLETIONS, json=body_of(encoded(ones)))).status_code == 200

    modules = (f"tuned={tmp_path / 'tuned'}",)
    with_gateway(tmp_path, test, max_loras=1, lora_modules=modules, max_body_bytes=2**24)


def test_open_requests_have_limited_memory(tmp_path: Path) -> None:
    """Two requests that run hold most of it: their messages four times, and their vectors twice; then others may."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, dense: FakeDense) -> None:
        response = await client.post(COMPLETIONS, json=body_of(encoded(VECTORS.repeat(3, 1))))
        assert response.status_code == 400 and "gateway.max_held_bytes is" in response.text
        dense.script = lambda submit: [70]  # they wait for their second token
        calls = [gateway.stub.GenerateStream(message_of(request_id=f"r{i}")) for i in range(2)]
        for call in calls:
            assert (await call.read()).token_ids == [70]
        refused = await client.post(COMPLETIONS, json=body_of(encoded(VECTORS)))
        assert refused.status_code in (429, 503) and "gateway.max_held_bytes" in refused.text
        assert (await client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1})).status_code == 200
        for call in calls:
            call.cancel()
        dense.script = lambda submit: [70] * submit.spec.max_tokens
        while (await client.post(COMPLETIONS, json=body_of(encoded(VECTORS)))).status_code != 200:
            pass  # until the gateway has seen that its clients are gone; `run` limits it

    with_gateway(tmp_path, test, max_held_bytes=16 * VECTORS.nbytes + 2048, max_held_wait_s=0.1)


def test_embeddings_and_a_lora_adapter_go_together(tmp_path: Path) -> None:
    make_adapter(tmp_path / "sql", EMBEDDED_MODEL, rank=4, modules=("q_proj",))

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, dense: FakeDense) -> None:
        assert (await client.post(COMPLETIONS, json=body_of(encoded(VECTORS), model="sql"))).status_code == 200
        assert dense.submits[0].spec.adapter.name == "sql" and torch.equal(sent_table(dense), VECTORS)

    with_gateway(tmp_path, test, max_loras=1, lora_modules=(f"sql={tmp_path / 'sql'}",))
