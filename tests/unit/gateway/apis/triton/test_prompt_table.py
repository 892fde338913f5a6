"""Tables of vectors in Triton's requests and over gRPC: what a dense worker is sent, and what is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.common.model_config import load_model_config
from services.pb import gateway_pb2, triton_pb2_grpc
from tests.support.adapters import make_adapter
from tests.support.clients.http_clients import async_client
from tests.support.clients.inference_messages import Request, int32, message, output, texts
from tests.support.prompt_vectors import embeds_of, make_prompt_tuning
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

HIDDEN_SIZE = load_model_config(EMBEDDED_MODEL).hidden_size
VOCAB_SIZE, MAX_MODEL_LEN, NUM_ROWS = 1024, 64, 6
ROWS = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)).half().float()
TOKENS = [5, VOCAB_SIZE + 4, 7, VOCAB_SIZE, VOCAB_SIZE + 4]
IN_FRONT = list(range(VOCAB_SIZE, VOCAB_SIZE + NUM_ROWS))
GENERATE = "/v2/models/tensorrt_llm/generate"
Stub = triton_pb2_grpc.GRPCInferenceServiceStub
Test = Callable[[RunningGateway, Stub, httpx2.AsyncClient, FakeDense], Awaitable[None]]


def with_gateway(tmp_path: Path, test: Test, **options: Any) -> None:
    async def body() -> None:
        limits = {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_MODEL_LEN}
        dense = FakeDense(lambda submit: [70] * submit.spec.max_tokens, **limits)
        settings = {"enable_prompt_embeds": True} | options
        async with (
            running_gateway(tmp_path, dense, **settings) as gateway,
            async_client(gateway.http_address) as client,
        ):
            await test(gateway, Stub(gateway.channel), client, dense)

    run(body())


def inputs(**changes: Any) -> dict[str, np.ndarray]:
    values = {
        "input_ids": int32(TOKENS),
        "input_lengths": int32([len(TOKENS)]),
        "request_output_len": int32([2]),
        "prompt_embedding_table": ROWS.numpy()[None],
        "prompt_vocab_size": int32([NUM_ROWS]),
    } | changes
    return {name: value for name, value in values.items() if value is not None}


def of_bfloat16(values: torch.Tensor) -> Request:
    """A request whose table has the bits of bfloat16."""
    request = message("tensorrt_llm", inputs(prompt_embedding_table=values.half().numpy()[None]))
    index = [each.name for each in request.inputs].index("prompt_embedding_table")
    request.inputs[index].datatype = "BF16"
    request.raw_input_contents[index] = values.bfloat16().view(torch.int16).numpy().tobytes()
    return request


def sent_table(dense: FakeDense) -> torch.Tensor:
    table = dense.submits[-1].spec.prompt_embeds
    assert table.first_token_id == VOCAB_SIZE
    values = b"".join(part.values for part in dense.table_parts if part.hash == table.hash)
    found = torch.frombuffer(bytearray(values), dtype=getattr(torch, table.dtype))
    return found.view(-1, table.hidden_size)[-table.num_rows :]


def test_the_worker_gets_the_table_and_the_ids(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, stub: Stub, client: httpx2.AsyncClient, dense: FakeDense) -> None:
        extra_ids = np.array([[0, 9, 0, 9, 9]], dtype=np.uint64)
        for changes in ({}, {"prompt_vocab_size": None}, {"prompt_table_extra_ids": extra_ids}):
            response = await stub.ModelInfer(message("tensorrt_llm", inputs(**changes)))
            assert output(response, "output_ids").tolist() == [[[*TOKENS, 70, 70]]]
            assert torch.equal(sent_table(dense), ROWS) and list(dense.submits[-1].spec.prompt_token_ids) == TOKENS
        await stub.ModelInfer(message("tensorrt_llm", inputs(prompt_embedding_table=ROWS.half().numpy()[None])))
        assert torch.equal(sent_table(dense), ROWS.half())
        await stub.ModelInfer(of_bfloat16(ROWS))
        assert torch.equal(sent_table(dense), ROWS.bfloat16())

        of_json = {name: values.ravel().tolist() for name, values in inputs().items()}
        for table in (ROWS[:2].tolist(), ROWS[None, :2].tolist()):
            body = of_json | {"input_ids": [5, VOCAB_SIZE + 1], "input_lengths": 2, "prompt_vocab_size": 2}
            response = await client.post(GENERATE, json=body | {"prompt_embedding_table": table})
            assert response.status_code == 200, response.text
            assert torch.equal(sent_table(dense), ROWS[:2])
        await client.post(GENERATE, json={"input_ids": [5], "input_lengths": 1, "request_output_len": 1})
        assert not dense.submits[-1].spec.HasField("prompt_embeds")

    with_gateway(tmp_path, test)


def test_with_a_text_or_chat_the_rows_stand_before_it(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, stub: Stub, client: httpx2.AsyncClient, dense: FakeDense) -> None:
        values = {"text_input": texts(["abc"]), "max_tokens": int32([2])}
        table = {"prompt_embedding_table": ROWS.numpy()[None], "prompt_table_extra_id": np.array([[7]], np.uint64)}
        for model in ("ensemble", "tensorrt_llm_bls"):
            plain = output(await stub.ModelInfer(message(model, values)), "text_output")
            of_text = list(dense.submits[-1].spec.prompt_token_ids)
            assert output(await stub.ModelInfer(message(model, values | table)), "text_output") == plain
            assert list(dense.submits[-1].spec.prompt_token_ids) == IN_FRONT + of_text
            assert torch.equal(sent_table(dense), ROWS)
        chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="abc")])
        request = gateway_pb2.GenerateRequest(chat=chat, max_tokens=2, prompt_embedding_table=embeds_of(ROWS))
        await gateway.stub.Generate(request)
        assert list(dense.submits[-1].spec.prompt_token_ids)[:NUM_ROWS] == IN_FRONT

    with_gateway(tmp_path, test)


def test_it_is_off_by_default(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, stub: Stub, client: httpx2.AsyncClient, dense: FakeDense) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=r"gateway\.enable_prompt_embeds is not set") as refused:
            await stub.ModelInfer(message("tensorrt_llm", inputs()))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and not dense.submits

    with_gateway(tmp_path, test, enable_prompt_embeds=False)


def test_a_wrong_table_is_refused_with_value_and_limit(tmp_path: Path) -> None:
    make_prompt_tuning(tmp_path / "1", ROWS)
    make_adapter(tmp_path / "2", EMBEDDED_MODEL, rank=4, modules=("q_proj",))
    of = {"infinite": ROWS / 0, "narrow": ROWS[:, 1:], "none": ROWS[:0], "many": ROWS.repeat(11, 1)}
    tables = {name: values.contiguous().numpy()[None] for name, values in of.items()}
    beyond = int32([5, VOCAB_SIZE + NUM_ROWS])
    wrong: list[tuple[dict[str, Any], list[str]]] = [
        ({"prompt_embedding_table": tables["infinite"]}, ["prompt_embedding_table", "not finite"]),
        ({"prompt_embedding_table": tables["narrow"], "prompt_vocab_size": None}, [f"[6, {HIDDEN_SIZE - 1}]"]),
        ({"prompt_embedding_table": tables["none"], "prompt_vocab_size": None}, [f"shape [0, {HIDDEN_SIZE}]"]),
        ({"prompt_embedding_table": tables["many"], "prompt_vocab_size": None}, ["66 of prompt_embedding_table", "64"]),
        ({"prompt_embedding_table": ROWS.numpy()}, [f"shape [6, {HIDDEN_SIZE}]", "[batch, any, any]"]),
        ({"prompt_embedding_table": ROWS.numpy()[None].astype(np.int32)}, ["INT32", "FP32 or FP16 or BF16"]),
        ({"prompt_embedding_table": np.stack([ROWS.numpy()] * 2)}, ["batch of 2", "have 1"]),
        ({"prompt_vocab_size": int32([7])}, ["prompt_vocab_size is 7", "has 6 rows"]),
        ({"prompt_embedding_table": None}, ["prompt_vocab_size needs a prompt_embedding_table"]),
        ({"prompt_embedding_table": None, "prompt_vocab_size": None}, ["[1] is 1028, out of vocabulary", "[0, 1024)"]),
        ({"prompt_table_extra_ids": np.ones((1, 4), np.uint64)}, ["has 4 numbers", "5 tokens"]),
        ({"input_ids": beyond, "input_lengths": int32([2])}, ["[1] is 1030", "the 6 rows", "[0, 1030)"]),
        ({"lora_task_id": np.array([[1]], np.uint64)}, ["prompt_embedding_table", "the adapter '1'"]),
    ]

    async def test(gateway: RunningGateway, stub: Stub, client: httpx2.AsyncClient, dense: FakeDense) -> None:
        for changes, words in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(message("tensorrt_llm", inputs(**changes)))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, changes.keys()
            assert all(word in str(refused.value.details()) for word in words), refused.value.details()
        body = {name: values.ravel().tolist() for name, values in inputs().items()}
        for table, words in (
            ([[1.0], [1.0, 2.0]], ["rows of 1 to 2 values"]),
            ([1.0, 2.0], ["the shape [1, 2]"]),
            ([["x"]], ["'x'", "FP32"]),
            ([[1e300] * HIDDEN_SIZE], ["not finite"]),
        ):
            changed = body | {"prompt_embedding_table": table, "prompt_vocab_size": None}
            response = await client.post(GENERATE, json=changed)
            assert response.status_code == 400 and all(word in response.text for word in words), response.text
        for fields, words in (
            ({"prompt_embeds": embeds_of(ROWS)}, "cannot be used with prompt_embeds"),
            ({"prompt": "abc", "prompt_logprobs": 1}, "prompt_logprobs cannot be used with prompt_embedding_table"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await gateway.stub.Generate(
                    gateway_pb2.GenerateRequest(max_tokens=2, prompt_embedding_table=embeds_of(ROWS), **fields)
                )
        assert not dense.submits
        await stub.ModelInfer(message("tensorrt_llm", inputs(lora_task_id=np.array([[2]], np.uint64))))
        assert dense.submits[-1].spec.adapter.name == "2" and torch.equal(sent_table(dense), ROWS)

    modules = tuple(f"{name}={tmp_path / name}" for name in ("1", "2"))
    with_gateway(tmp_path, test, max_loras=1, lora_modules=modules)


def test_open_requests_have_limited_memory(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway, stub: Stub, client: httpx2.AsyncClient, dense: FakeDense) -> None:
        double = inputs(prompt_embedding_table=ROWS.repeat(2, 1).numpy()[None], prompt_vocab_size=None)
        with pytest.raises(grpc.aio.AioRpcError, match=r"gateway\.max_held_bytes is"):
            await stub.ModelInfer(message("tensorrt_llm", double))
        dense.script = lambda submit: [70]  # it waits for its second token
        running = stub.ModelInfer(message("tensorrt_llm", inputs()))
        while not dense.submits:
            await gateway.stub.ModelInfo(gateway_pb2.ModelInfoRequest())
        with pytest.raises(grpc.aio.AioRpcError, match=r"gateway\.max_held_bytes") as refused:
            await stub.ModelInfer(message("tensorrt_llm", inputs()))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()

    with_gateway(tmp_path, test, max_held_bytes=7 * ROWS.nbytes + 2048, max_held_wait_s=0.1)
