"""Requests of different API keys are separate, and a key's limits also cover tokenize and detokenize."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx2
import pytest

from services.pb import gateway_pb2
from tests.support.clients.gateway_calls import request, with_gateway
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense

KEYS = {"ann": "ann-ann-ann-ann-ann", "bob": "bob-bob-bob-bob-bob"}


def keys_file(directory: Path, more: str = "") -> Path:
    file = directory / "keys.toml"
    file.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n{more}\n' for name, key in KEYS.items()))
    return file


def bearer(name: str) -> str:
    return f"Bearer {KEYS[name]}"


def metadata(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", bearer(name)),)


def test_two_callers_may_give_their_requests_the_same_name(tmp_path: Path) -> None:
    dense = FakeDense(lambda submit: [5] * 3)  # and then nothing more

    async def test(gateway: RunningGateway) -> None:
        def start(name: str) -> asyncio.Task[gateway_pb2.GenerateResponse]:
            message = request(request_id="the-same", max_tokens=50)
            return asyncio.ensure_future(gateway.stub.Generate(message, metadata=metadata(name)))

        async def abort(name: str) -> bool:
            message = gateway_pb2.AbortRequest(request_id="the-same")
            return (await gateway.stub.Abort(message, metadata=metadata(name))).was_running

        ann = start("ann")
        await until(lambda: len(dense.running) == 1)
        assert not await abort("bob")
        bob = start("bob")
        await until(lambda: len(dense.running) == 2)
        async with async_client(gateway.http_address) as client:
            headers = {"authorization": bearer("bob"), "x-request-id": "the-same"}
            again = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert again.status_code == 400 and "'the-same' is in use" in again.json()["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError, match="'the-same' is in use"):
            await start("ann")
        assert await abort("bob")
        assert (await bob).completions[0].finish.reason == gateway_pb2.FINISH_REASON_ABORT
        await until(lambda: len(dense.running) == 1)
        assert not ann.done()
        assert not await abort("bob")
        assert await abort("ann")
        assert (await ann).completions[0].finish.reason == gateway_pb2.FINISH_REASON_ABORT

    with_gateway(tmp_path, dense, test, api_keys_file=keys_file(tmp_path))


def test_limits_of_a_key_cover_tokenize_and_detokenize(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        stub, headers = gateway.stub, {"authorization": bearer("ann")}
        async with async_client(gateway.http_address) as client:

            async def post(path: str, body: dict[str, object]) -> httpx2.Response:
                return await client.post(path, json=body, headers=headers)

            assert (await post("/tokenize", {"prompt": "a"})).status_code == 200
            assert (await post("/detokenize", {"tokens": [5]})).status_code == 200
            await stub.Tokenize(gateway_pb2.TokenizeRequest(text="a"), metadata=metadata("ann"))
            await stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=[5]), metadata=metadata("ann"))
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
                refused = await post(path, body)
                assert refused.status_code == 429 and "4 requests a minute" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) >= 1
            assert (await post("/v1/completions", {"prompt": "a"})).status_code == 429
        for call in (
            stub.Tokenize(gateway_pb2.TokenizeRequest(text="a"), metadata=metadata("ann")),
            stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=[5]), metadata=metadata("ann")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="4 requests a minute") as refusal:
                await call
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.Tokenize(gateway_pb2.TokenizeRequest(text="a"), metadata=metadata("bob"))

    dense = FakeDense(lambda submit: [5])
    with_gateway(tmp_path, dense, test, api_keys_file=keys_file(tmp_path, "requests_per_minute = 4"))


def test_each_text_of_a_list_counts_as_one_request(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:

            async def status(name: str, path: str, body: dict[str, object]) -> int:
                return (await client.post(path, json=body, headers={"authorization": bearer(name)})).status_code

            assert await status("ann", "/tokenize", {"prompt": ["a", "b", "c"]}) == 200
            assert await status("ann", "/tokenize", {"prompt": ["a", "b"]}) == 429
            assert await status("ann", "/tokenize", {"prompt": "a"}) == 200
            assert await status("bob", "/detokenize", {"tokens": [[5], [6], [7]]}) == 200
            assert await status("bob", "/detokenize", {"tokens": [[5], [6]]}) == 429
            assert await status("bob", "/detokenize", {"tokens": [5]}) == 200

    dense = FakeDense(lambda submit: [5])
    with_gateway(tmp_path, dense, test, api_keys_file=keys_file(tmp_path, "requests_per_minute = 4"))
