"""Inference with API keys, from other gateway processes, and by clients that do not read."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx2
import numpy as np
import pytest

from services.pb import triton_pb2_grpc
from tests.support.clients.gateway_calls import ids, with_gateway
from tests.support.clients.http_clients import async_client
from tests.support.clients.inference_messages import ASK, ENDLESS, STOP, TOKENS, Request, int32, message, output
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense

KEYS = {"ann": "ann-ann-ann-ann-ann", "bob": "bob-bob-bob-bob-bob"}
GENERATE = "/v2/models/ensemble/generate"
WHOLE = {**ENDLESS, "streaming": np.array([[False]])}


def keys_file(directory: Path) -> Path:
    file = directory / "keys.toml"
    file.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
    return file


def metadata(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),)


def endless() -> FakeDense:
    return FakeDense(lambda submit: ids(" a") * 5000, step_s=0.001)


def test_models_need_a_key_and_probes_do_not(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        stub = triton_pb2_grpc.GRPCInferenceServiceStub(gateway.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(message("ensemble", ASK))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.ModelStreamInfer(iter([message("ensemble", ASK)])):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await stub.ModelInfer(message("ensemble", ASK), metadata=metadata("ann"))).outputs
        async with async_client(gateway.http_address) as client:
            for path in ("/v2", "/v2/health/live", "/v2/health/ready"):
                assert (await client.get(path)).status_code == 200
            refused = await client.post(GENERATE, json={"text_input": "a", "max_tokens": 1})
            assert refused.status_code == 401 and "API key" in refused.json()["error"]
            headers = dict(metadata("bob"))
            allowed = await client.post(GENERATE, json={"text_input": "a", "max_tokens": 1}, headers=headers)
            assert allowed.status_code == 200

    dense = FakeDense(lambda submit: TOKENS)
    with_gateway(tmp_path, dense, test, api_keys_file=keys_file(tmp_path))


def test_a_stop_ends_only_requests_of_the_same_key(tmp_path: Path) -> None:
    dense = endless()

    async def test(gateway: RunningGateway) -> None:
        stub = triton_pb2_grpc.GRPCInferenceServiceStub(gateway.channel)
        running = {
            name: stub.ModelInfer(message("tensorrt_llm", WHOLE, id="same"), metadata=metadata(name)) for name in KEYS
        }
        await until(lambda: len(dense.submits) == 2)
        await stub.ModelInfer(message("tensorrt_llm", STOP, id="same"), metadata=metadata("bob"))
        assert output(await running["bob"], "sequence_length")[0, 0] < 1900
        await until(lambda: len(dense.cancelled_seq_ids) == 1)  # the answer may come before
        assert not running["ann"].done()
        running["ann"].cancel()

    with_gateway(tmp_path, dense, test, api_keys_file=keys_file(tmp_path))


@pytest.mark.parametrize("is_http", [False, True], ids=["grpc", "http"])
def test_without_keys_a_stop_ends_only_requests_from_the_same_address(tmp_path: Path, is_http: bool) -> None:
    dense = endless()
    addresses = {"ann": "10.0.0.1", "bob": "10.0.0.2"}

    async def test(gateway: RunningGateway) -> None:
        stub = triton_pb2_grpc.GRPCInferenceServiceStub(gateway.channel)
        running = {
            name: stub.ModelInfer(
                message("tensorrt_llm", WHOLE, id="same"), metadata=[("x-forwarded-for", address)]
            )
            for name, address in addresses.items()
        }
        await until(lambda: len(dense.submits) == 2)
        if is_http:
            fields = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True, "id": "same"}
            async with async_client(gateway.http_address) as client:
                url, headers = "/v2/models/tensorrt_llm/generate", {"x-forwarded-for": addresses["bob"]}
                assert (await client.post(url, json=fields, headers=headers)).status_code == 200
        else:
            stop = message("tensorrt_llm", STOP, id="same")
            await stub.ModelInfer(stop, metadata=[("x-forwarded-for", addresses["bob"])])
        assert output(await running["bob"], "sequence_length")[0, 0] < 1900
        await until(lambda: len(dense.cancelled_seq_ids) == 1)
        assert not running["ann"].done()
        running["ann"].cancel()

    with_gateway(tmp_path, dense, test, trusted_proxies=("unix",))


def test_a_stream_that_nobody_reads_ends_with_its_requests(tmp_path: Path) -> None:
    dense = FakeDense(lambda submit: ids(" a") * 100_000, max_model_len=200_000)

    async def test(gateway: RunningGateway) -> None:
        async with grpc.aio.insecure_channel(
            gateway.address, [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
        ) as channel:
            inputs = {**ENDLESS, "request_output_len": int32([100_000])}

            async def requests() -> AsyncIterator[Request]:
                for _ in range(3):
                    yield message("tensorrt_llm", inputs)
                await asyncio.sleep(100)

            call = triton_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
            await call.read()
            await until(lambda: len(dense.cancelled_seq_ids) == 3)
            call.cancel()

    with_gateway(tmp_path, dense, test, slow_reader_timeout_s=0.5)


def test_a_compressed_body_is_bounded(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            body = b'{"text_input": "a", "max_tokens": 1}'

            async def post(content: bytes, encoding: str) -> httpx2.Response:
                return await client.post(GENERATE, content=content, headers={"content-encoding": encoding})

            assert (await post(gzip.compress(body), "gzip")).status_code == 200
            assert (await post(gzip.compress(b" " * 100_000_000), "gzip")).status_code == 413
            assert (await post(gzip.compress(body)[:-9], "gzip")).status_code == 400
            assert (await post(body, "gzip")).status_code == 400
            assert (await post(body, "br")).status_code == 415

    with_gateway(tmp_path, FakeDense(lambda submit: ids(" a b c")), test)
