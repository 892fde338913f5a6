"""LoRA adapters as models: which are listed, loaded and unloaded, and what a dense worker is told of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.common.errors import CapacityError, ConfigError, InvalidRequest
from services.common.model_config import load_model_config
from services.gateway.access.access import Caller
from services.gateway.access.rate_limits import RateLimits, Usage
from services.gateway.adapters import adapter_list
from services.gateway.adapters import adapters as adapters_module
from services.gateway.adapters.adapters import Adapters
from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.request.model_limits import ModelNames
from services.lora.adapter_records import DIRECTORY as RECORDS
from services.lora.checkpoint import check_adapter
from services.lora.shapes import adapted_shapes
from services.pb import dense_pb2, gateway_pb2
from tests.support.adapters import make_adapter
from tests.support.clients.http_clients import async_client
from tests.support.prompt_vectors import make_prompt_tuning
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
ANYBODY = Caller(None, Usage("", RateLimits()))
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the adapters a, b and 7 of the embedded model."""
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "7")):
        make_adapter(directory / name, EMBEDDED_MODEL, rank=4 + seed, modules=("q_proj", "down_proj"), seed=seed)
    return directory


@pytest.fixture(autouse=True)
def no_records(adapters: Path) -> Iterator[None]:
    """Each test begins as the first gateway of its directory."""
    yield
    shutil.rmtree(adapters / RECORDS, ignore_errors=True)


def with_gateway(
    tmp_path: Path, test: Callable[[httpx2.AsyncClient, RunningGateway, list[dense_pb2.Submit]], Awaitable[None]],
    **options: Any,
) -> None:  # fmt: skip
    """Runs `test` against a serving gateway; the list gets what its dense worker is sent."""

    async def body() -> None:
        submits: list[dense_pb2.Submit] = []

        def answer(submit: dense_pb2.Submit) -> list[int]:
            submits.append(submit)
            return [70] * submit.spec.max_tokens

        dense = FakeDense(answer)
        async with (
            running_gateway(tmp_path, dense, max_loras=2, **options) as gateway,
            async_client(gateway.http_address) as client,
        ):
            await test(client, gateway, submits)

    run(body())


def api_of(client: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none needed", base_url="http://gateway/v1", http_client=client, max_retries=0)


def test_configured_adapters_are_models_with_a_parent(tmp_path: Path, adapters: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        api = api_of(client)
        base, first, second = (await api.models.list()).data
        assert base.model_extra is not None and first.model_extra is not None
        assert base.model_extra["parent"] is None
        assert (first.id, first.model_extra["parent"], first.model_extra["root"]) == (
            "sql/one",
            base.id,
            str(adapters / "a"),
        )
        assert second.id == "b" and (await api.models.retrieve("sql/one")).id == "sql/one"
        for name in (base.id, first.id):
            answer = await api.completions.create(model=name, prompt="a", max_tokens=1)
            assert answer.model == name
        info = await gateway.stub.ModelInfo(gateway_pb2.ModelInfoRequest())
        assert [each.name for each in info.adapters] == ["sql/one", "b"]
        request = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1, model="sql/one")
        await gateway.stub.Generate(request)
        expected = check_adapter(adapters / "a", adapted_shapes(load_model_config(EMBEDDED_MODEL)), 64)
        assert not submits[0].spec.HasField("adapter")
        for submit in submits[1:]:
            found = submit.spec.adapter
            assert (found.name, found.path, found.hash) == ("sql/one", str(adapters / "a"), expected)

    with_gateway(tmp_path, test, lora_modules=(f"sql/one={adapters / 'a'}", f"b={adapters / 'b'}"))


def test_adapters_have_numbers_for_clients_of_llama_cpp(tmp_path: Path, adapters: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        assert (await client.get("/lora-adapters")).json() == [
            {"id": 0, "name": "a", "path": str(adapters / "a"), "scale": 0.0},
            {"id": 1, "name": "b", "path": str(adapters / "b"), "scale": 0.0},
        ]

        async def complete(scales: Any, **options: Any) -> httpx2.Response:
            return await client.post("/completion", json={"prompt": "a", "n_predict": 1, "lora": scales, **options})

        for scales, name in (
            (None, ""),
            ([], ""),
            ([{"id": 1, "scale": 1.0}], "b"),
            ([{"id": 0, "scale": 1}, {"id": 1, "scale": 0}], "a"),
            ([{"id": 0, "scale": 0.0}], ""),
        ):
            answer = await complete(scales)
            assert answer.status_code == 200, answer.text
            assert submits[-1].spec.adapter.name == name
            assert answer.json()["generation_settings"]["lora"] == (scales or [])
        for wrong, what in (
            ([{"id": 2, "scale": 1}], "lora[0].id is 2: there are 2 adapters"),
            ([{"id": 0, "scale": 0}, {"id": 1, "scale": 0.3}], "lora[1].scale is 0.3, must be 0 or 1"),
            ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], "lora has 2 adapters of scale 1"),
            ([{"id": 0}], "lora[0].scale"),
        ):
            answer = await complete(wrong)
            assert answer.status_code == 400 and what in answer.json()["error"]["message"]
        other = await complete([{"id": 0, "scale": 1}], model="b")
        assert other.status_code == 400 and "'b', which model names" in other.json()["error"]["message"]
        for scales, status in (([], 200), ([{"id": 1, "scale": 0}], 200), ([{"id": 1, "scale": 1}], 400), ({}, 400)):
            changed = await client.post("/lora-adapters", json=scales)
            assert changed.status_code == status, changed.text
            assert changed.json() == {"success": True} if status == 200 else changed.json()["error"]["code"] == 400

    with_gateway(tmp_path, test, lora_modules=(f"b={adapters / 'b'}", f"a={adapters / 'a'}"))


def test_an_unknown_adapter_is_an_unknown_model(tmp_path: Path, adapters: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: BODY,
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "a", "max_output_tokens": 16},
        "/tokenize": {"prompt": "a"},
    }

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        for path, body in bodies.items():
            assert (await client.post(path, json=body | {"model": "a"})).status_code == 200
            response = await client.post(path, json=body | {"model": "c"})
            assert response.status_code == 404 and "'c' is not served here" in response.text
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.stub.Generate(gateway_pb2.GenerateRequest(prompt="a", model="c"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    with_gateway(tmp_path, test, lora_modules=(f"a={adapters / 'a'}",))


def test_adapters_are_loaded_and_unloaded_while_requests_run(tmp_path: Path, adapters: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        api = api_of(client)
        for path in ("b", str(adapters / "b")):
            answer = await api.post("load_lora_adapter", cast_to=str, body={"lora_name": "x", "lora_path": path})
            assert answer == "Success: LoRA adapter 'x' added successfully."
            assert [model.id for model in (await api.models.list()).data][1:] == ["x"]
            with pytest.raises(openai.BadRequestError, match="'x' has already been loaded"):
                await api.post("load_lora_adapter", cast_to=str, body={"lora_name": "x", "lora_path": path})
            await api.completions.create(model="x", prompt="a", max_tokens=1)
            answer = await api.post("unload_lora_adapter", cast_to=str, body={"lora_name": "x"})
            assert answer == "Success: LoRA adapter 'x' removed successfully."
            with pytest.raises(openai.NotFoundError, match="'x' is not served here"):
                await api.completions.create(model="x", prompt="a", max_tokens=1)
            with pytest.raises(openai.NotFoundError, match="'x' cannot be found"):
                await api.post("unload_lora_adapter", cast_to=str, body={"lora_name": "x"})
        hashes = []
        for path in ("a", "b"):
            body = {"lora_name": "x", "lora_path": path, "load_inplace": True}
            assert (await client.post(LOAD, json=body)).status_code == 200
            assert (await client.post(COMPLETIONS, json=BODY | {"model": "x"})).status_code == 200
            hashes.append(submits[-1].spec.adapter.hash)
        assert hashes[0] != hashes[1] == submits[0].spec.adapter.hash
        loaded = await gateway.stub.LoadAdapter(gateway_pb2.LoadAdapterRequest(name="y", path="a"))
        assert loaded.adapter.hash == hashes[0]
        await gateway.stub.UnloadAdapter(gateway_pb2.UnloadAdapterRequest(name="y"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.stub.UnloadAdapter(gateway_pb2.UnloadAdapterRequest(name="y"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    with_gateway(tmp_path, test, lora_directory=adapters)


def test_loading_is_off_without_a_directory(tmp_path: Path, adapters: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        for path, body in ((LOAD, {"lora_name": "x", "lora_path": str(adapters / "a")}), (UNLOAD, {"lora_name": "a"})):
            response = await client.post(path, json=body)
            assert response.status_code == 404 and "gateway.lora_directory is not set" in response.text
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.stub.LoadAdapter(gateway_pb2.LoadAdapterRequest(name="x", path=str(adapters / "a")))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED

    with_gateway(tmp_path, test, lora_modules=(f"a={adapters / 'a'}",))


def test_wrong_loads_get_a_400_and_change_nothing(tmp_path: Path, adapters: Path) -> None:
    directory = tmp_path / "inside"
    shutil.copytree(adapters, directory)
    (directory / "link").symlink_to(adapters / "a")
    (directory / "linked").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / "linked" / name).symlink_to(adapters / "a" / name)
    os.mkfifo(directory / "b" / "pipe")
    (directory / "b" / "adapter_config.json").unlink()
    os.rename(directory / "b" / "pipe", directory / "b" / "adapter_config.json")
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({}, 400, "must be provided"),
        ({"lora_name": "x"}, 400, "must be provided"),
        ({"lora_path": "a"}, 400, "must be provided"),
        ({"lora_name": "", "lora_path": ""}, 400, "must be provided"),
        ({"lora_name": 7, "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": "a"}, 400, "257 characters, at most 256"),
        ({"lora_name": "tiny-llama", "lora_path": "a"}, 400, "name of the served model"),
        ({"lora_name": "x", "lora_path": str(adapters / "a")}, 400, "not below gateway.lora_directory"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "not below gateway.lora_directory"),
        ({"lora_name": "x", "lora_path": "."}, 400, "not below gateway.lora_directory"),
        ({"lora_name": "x", "lora_path": "../adapters/a"}, 400, "has '..'"),
        ({"lora_name": "x", "lora_path": f"{directory}/a/../../x"}, 400, "has '..'"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "symbolic link"),
        ({"lora_name": "x", "lora_path": "link/a"}, 400, "symbolic link"),
        ({"lora_name": "x", "lora_path": "linked"}, 400, "symbolic link"),
        ({"lora_name": "x", "lora_path": "b"}, 400, "not a regular file"),
        ({"lora_name": "x", "lora_path": "a\0"}, 400, "NUL"),
        ({"lora_name": "x", "lora_path": "y" * 300}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "y" * 2000}, 400, "2000 characters, at most 1024"),
        ({"lora_name": "x", "lora_path": "nothing"}, 404, "No adapter found"),
        ({"lora_name": "x", "lora_path": "a/adapter_config.json"}, 404, "No adapter found"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        for body, status, words in cases:
            response = await client.post(LOAD, json=body)
            assert (response.status_code, words in response.text) == (status, True), (body, response.text)
        assert len((await client.get("/v1/models")).json()["data"]) == 1
        assert (await client.post(LOAD, json={"lora_name": "x", "lora_path": "a"})).status_code == 200

    with_gateway(tmp_path, test, lora_directory=directory, served_model_names=("tiny-llama",))


def test_several_loads_of_one_name_give_one_adapter(tmp_path: Path, adapters: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        bodies = [{"lora_name": "x", "lora_path": "a"}] * 5
        responses = await asyncio.gather(*(client.post(LOAD, json=body) for body in bodies))
        assert sorted(each.status_code for each in responses) == [200, 400, 400, 400, 400]

    with_gateway(tmp_path, test, lora_directory=adapters)


def test_a_load_whose_client_has_gone_away_counts_until_its_thread_ends(
    tmp_path: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread reads on. If others began meanwhile, clients that go away could occupy all threads."""
    is_reading, may_end = threading.Event(), threading.Event()

    def read_slowly(*arguments: Any) -> str:
        is_reading.set()
        assert may_end.wait(30)
        return "00"

    async def body() -> None:
        monkeypatch.setattr(adapters_module, "MAX_CHANGES", 1)
        monkeypatch.setattr(adapters_module, "check_adapter", read_slowly)
        names = ModelNames(("model",), accepts_any=False, root="/model")
        loaded = Adapters(names, {}, 64, 64, adapters, GatewayPeers())
        tasks_before = asyncio.all_tasks()
        first = asyncio.create_task(loaded.load(ANYBODY, "a", "a"))
        assert await asyncio.to_thread(is_reading.wait, 30)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(CapacityError, match="1 loads of adapters wait, which is the limit"):
            await asyncio.wait_for(loaded.load(ANYBODY, "b", "b"), 5)
        may_end.set()
        await asyncio.wait(asyncio.all_tasks() - tasks_before, timeout=30)
        assert (await loaded.load(ANYBODY, "b", "b")).name == "b"
        assert set(loaded.names_for(ANYBODY).adapters) == {"a", "b"}

    try:
        run(body())
    finally:
        may_end.set()


def test_virtual_tokens_of_all_adapters_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        make_prompt_tuning(tmp_path / name, torch.ones(4, 8))  # 128 bytes in float32
    monkeypatch.setattr(adapter_list, "MAX_VIRTUAL_TOKEN_BYTES", 256)
    message = "virtual tokens of all adapters would have 384 bytes, at most 256 allowed"

    async def body() -> None:
        names = ModelNames(("model",), accepts_any=False, root="/model")
        loaded = Adapters(names, {}, 8, 64, tmp_path, GatewayPeers())
        await loaded.load(ANYBODY, "a", "a")
        await loaded.load(ANYBODY, "b", "b")
        with pytest.raises(InvalidRequest, match=message):
            await loaded.load(ANYBODY, "c", "c")
        await loaded.load(ANYBODY, "b", "c", replaces=True)
        await loaded.unload(ANYBODY, "a")
        await loaded.load(ANYBODY, "c", "c")
        assert set(loaded.names_for(ANYBODY).adapters) == {"b", "c"}

    run(body())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("x=/nowhere", "adapter_config.json cannot be read: No such file"),
        ("tiny-llama={a}", "is a name of the served model"),
        ("a={a}", "has already been loaded"),
    ],
)
def test_a_wrong_configured_adapter_is_an_error_at_start(
    tmp_path: Path, adapters: Path, module: str, words: str
) -> None:
    async def body() -> None:
        modules = (f"a={adapters / 'a'}", module.format(a=adapters / "a"))
        async with running_gateway(tmp_path, None, max_loras=1, lora_modules=modules) as gateway:
            with pytest.raises(ConfigError, match=words):
                await gateway.service

    run(body())


def test_clients_of_triton_name_an_adapter_by_its_number(tmp_path: Path, adapters: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        url, body = "/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 1}
        assert (await client.post(url, json=body | {"lora_task_id": 7})).status_code == 200
        assert (await client.post(url, json=body)).status_code == 200
        assert [submit.spec.adapter.name for submit in submits] == ["7", ""]
        response = await client.post(url, json=body | {"lora_task_id": 8})
        assert response.status_code == 404 and "lora_task_id is 8" in response.text

    with_gateway(tmp_path, test, lora_modules=(f"7={adapters / '7'}",), accept_any_model_name=True)
