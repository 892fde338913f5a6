"""Adapters and API keys: whose an adapter is, who may name, replace and unload it, and how many a key may have."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.common.errors import CapacityError, InvalidRequest
from services.common.model_config import load_model_config
from services.gateway.access.access import Access, Caller
from services.gateway.adapters import adapter_list
from services.gateway.adapters import adapters as adapters_module
from services.gateway.adapters.adapters import MAX_CHANGES_OF_CLIENT, Adapters
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

KEYS = {name: f"key-of-the-client-{name}" for name in ("ann", "bob", "root")}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SHAPES = adapted_shapes(load_model_config(EMBEDDED_MODEL))
Test = Callable[["Clients", RunningGateway, list[dense_pb2.Submit]], Awaitable[None]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the adapters a, b and c of the embedded model."""
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "c")):
        make_adapter(directory / name, EMBEDDED_MODEL, rank=4, modules=("q_proj",), seed=seed)
    return directory


@pytest.fixture(autouse=True)
def no_records(adapters: Path) -> Iterator[None]:
    """Each test begins as the first gateway of its directory."""
    yield
    shutil.rmtree(adapters / RECORDS, ignore_errors=True)


def caller(name: str) -> Caller:
    """The caller with a key of this name."""
    return Access(None, f"{name}={KEYS[name]}").identify(f"Bearer {KEYS[name]}")


def access_of(*names: str) -> str:
    return "".join(f'[[keys]]\nname = "{name}"\nkey = "{KEYS[name]}"\n' for name in names)


class Clients:
    """Calls with the key of one of the clients."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def post(self, name: str, path: str, body: dict[str, Any]) -> httpx2.Response:
        return await self._client.post(path, json=body, headers={"x-api-key": KEYS[name]})

    async def load(self, name: str, adapter: str, path: str, **fields: Any) -> httpx2.Response:
        return await self.post(name, LOAD, {"lora_name": adapter, "lora_path": path, **fields})

    async def unload(self, name: str, adapter: str) -> httpx2.Response:
        return await self.post(name, UNLOAD, {"lora_name": adapter})

    async def ask(self, name: str, model: str) -> int:
        """The status of a completion."""
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        return (await self.post(name, "/v1/completions", body)).status_code

    async def models(self, name: str) -> dict[str, str]:
        """The names of the directories of the adapters that the key sees, by name."""
        models = (await self._client.get("/v1/models", headers={"x-api-key": KEYS[name]})).json()["data"]
        return {each["id"]: Path(each["root"]).name for each in models if each["parent"] is not None}

    async def retrieve(self, name: str, model: str) -> httpx2.Response:
        return await self._client.get(f"/v1/models/{model}", headers={"x-api-key": KEYS[name]})


def with_gateway(tmp_path: Path, test: Test, *, names: tuple[str, ...] = tuple(KEYS), **options: Any) -> None:
    """Runs `test` against a gateway with these keys; the list gets what its dense worker is sent."""
    file = tmp_path / "keys.toml"
    file.write_text(access_of(*names))

    async def body() -> None:
        submits: list[dense_pb2.Submit] = []

        def answer(submit: dense_pb2.Submit) -> list[int]:
            submits.append(submit)
            return [70] * submit.spec.max_tokens

        async with (
            running_gateway(tmp_path, FakeDense(answer), max_loras=2, api_keys_file=file, **options) as gateway,
            async_client(gateway.http_address) as client,
        ):
            await test(Clients(client), gateway, submits)

    run(body())


def hash_of(path: Path) -> str:
    return check_adapter(path, SHAPES, 64)


def test_two_keys_with_adapters_of_one_name_get_each_their_own(tmp_path: Path, adapters: Path) -> None:
    async def test(clients: Clients, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        for name, path in (("ann", "a"), ("bob", "b")):
            assert (await clients.load(name, "x", path)).status_code == 200
        for name, path in (("ann", "a"), ("bob", "b"), ("ann", "a")):
            assert await clients.ask(name, "x") == 200
            assert submits[-1].spec.adapter.hash == hash_of(adapters / path)
            assert await clients.models(name) == {"x": path}
            assert (await clients.retrieve(name, "x")).json()["root"] == str(adapters / path)
            info = await gateway.stub.ModelInfo(
                gateway_pb2.ModelInfoRequest(), metadata=[("authorization", f"Bearer {KEYS[name]}")]
            )
            assert [each.hash for each in info.adapters] == [hash_of(adapters / path)]
        assert submits[0].spec.cache_salt != submits[1].spec.cache_salt
        assert (await clients.load("ann", "x", "c", load_inplace=True)).status_code == 200
        assert await clients.ask("bob", "x") == 200 and submits[-1].spec.adapter.hash == hash_of(adapters / "b")
        assert (await clients.unload("ann", "x")).status_code == 200
        assert await clients.models("bob") == {"x": "b"} and await clients.models("ann") == {}

    with_gateway(tmp_path, test, lora_directory=adapters)


def test_an_adapter_of_another_key_is_unknown_everywhere(tmp_path: Path, adapters: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/messages/count_tokens": {"messages": chat["messages"]},
        "/v1/responses": {"input": "a", "max_output_tokens": 16},
        "/invocations": chat,
        "/completion": {"prompt": "a", "n_predict": 1},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [70]},
        "/apply-template": {"messages": chat["messages"]},
    }

    async def test(clients: Clients, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        assert (await clients.load("ann", "7", "a")).status_code == 200
        asked = [(path, body | {"model": "7"}) for path, body in bodies.items()]
        asked.append(("/generate", {"text": "a", "lora_path": "7", "sampling_params": {"max_new_tokens": 1}}))
        asked.append(("/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 1, "lora_task_id": 7}))
        for path, body in asked:
            own, other = [await clients.post(name, path, body) for name in ("ann", "bob")]
            assert (own.status_code, other.status_code) == (200, 404), (path, own.text, other.text)
        assert (await clients.retrieve("bob", "7")).status_code == 404
        assert await clients.models("bob") == {}
        assert (await clients.unload("bob", "7")).status_code == 404
        message = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1, model="7")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.stub.Generate(message, metadata=[("authorization", f"Bearer {KEYS['bob']}")])
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert all(each.spec.adapter.hash in ("", hash_of(adapters / "a")) for each in submits)
        assert (await clients.load("bob", "7", "b", load_inplace=True)).status_code == 200
        assert await clients.models("ann") == {"7": "a"}

    with_gateway(tmp_path, test, lora_directory=adapters)


def test_shared_adapters_are_used_by_all_and_changed_by_admins_alone(tmp_path: Path, adapters: Path) -> None:
    async def test(clients: Clients, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        refused = await clients.unload("ann", "s")
        assert refused.status_code == 403 and "gateway.adapter_admins" in refused.text
        assert (await clients.load("ann", "s", "b")).status_code == 200, "a name of her own"
        assert (await clients.load("root", "t", "c")).status_code == 200
        assert await clients.models("ann") == {"s": "b", "t": "c"}
        assert await clients.models("bob") == await clients.models("root") == {"s": "a", "t": "c"}
        assert (await clients.load("root", "s", "c", load_inplace=True)).status_code == 200
        assert (await clients.models("ann"))["s"] == "b" and (await clients.models("bob"))["s"] == "c"
        assert (await clients.unload("ann", "s")).status_code == 200
        assert (await clients.models("ann"))["s"] == "c"
        assert (await clients.unload("bob", "t")).status_code == 403
        assert (await clients.unload("root", "t")).status_code == 200
        assert await clients.models("bob") == {"s": "c"}

    modules = (f"s={adapters / 'a'}",)
    with_gateway(tmp_path, test, lora_directory=adapters, lora_modules=modules, adapter_admins=("root",))


def test_after_a_restart_each_key_has_its_own(tmp_path: Path, adapters: Path) -> None:
    async def load(clients: Clients, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        for name, path in (("ann", "a"), ("bob", "b"), ("root", "c")):
            assert (await clients.load(name, "x", path)).status_code == 200
        assert (await clients.load("bob", "y", "c")).status_code == 200
        assert (await clients.unload("bob", "y")).status_code == 200

    async def see(clients: Clients, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        assert await clients.models("ann") == {"x": "a"} and await clients.models("root") == {"x": "c"}
        if "bob" in names:
            assert await clients.models("bob") == {"x": "b"}
        else:
            assert (await clients.unload("root", "x")).status_code == 200

    with_gateway(tmp_path, load, lora_directory=adapters)
    for names in (("ann", "bob", "root"), ("ann", "root")):
        with_gateway(tmp_path, see, names=names, lora_directory=adapters)


def of_directory(directory: Path, **options: Any) -> Adapters:
    names, shapes = ModelNames(("model",), accepts_any=False, root="/model"), options.pop("shapes", SHAPES)
    return Adapters(names, shapes, options.pop("hidden_size", 64), 64, directory, GatewayPeers(), **options)


def test_without_keys_those_of_keys_are_not_served(adapters: Path) -> None:
    async def body() -> None:
        first = of_directory(adapters)
        await first.load(caller("ann"), "x", "a")
        second = of_directory(adapters)
        await second.load_recorded(())
        anybody = Caller(None, caller("ann").usage)
        assert dict(second.names_for(anybody).adapters) == {}
        assert dict(second.names_for(caller("ann")).adapters) == {}, "nobody could name it, and it would take room"
        third = of_directory(adapters, admins=("ann",))
        await third.load_recorded(("ann",))
        assert set(third.names_for(caller("bob")).adapters) == {"x"}, "an admin's adapters are shared"

    run(body())


def test_what_another_gateway_forgets_while_the_records_are_read_is_not_served(adapters: Path) -> None:
    async def body() -> None:
        first = of_directory(adapters)
        for name in ("x", "y"):
            await first.load(caller("ann"), name, "a")
        second = of_directory(adapters)
        second.forget("ann", "x")  # its record is gone only after the second gateway has seen it
        await second.load_recorded(("ann",))
        assert set(second.names_for(caller("ann")).adapters) == {"y"}

    run(body())


def test_one_key_cannot_take_the_room_of_others(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_list, "MAX_ADAPTERS", 64)
    monkeypatch.setattr(adapters_module, "check_adapter", lambda *arguments: "00")

    async def body() -> None:
        loaded = of_directory(adapters)
        num_loaded = 0
        with pytest.raises(InvalidRequest, match=r"56 of 56 loaded adapters.*limit of 64") as refused:
            for num_loaded in range(64):
                await loaded.load(caller("ann"), f"x{num_loaded}", "a")
        assert num_loaded == 56 and refused.value.param == "lora_name"
        await loaded.load(caller("ann"), "x0", "b", replaces=True)
        await loaded.load(caller("bob"), "x0", "a")
        for number in range(7):
            await loaded.load(Caller(None, caller("ann").usage), f"shared{number}", "a")
        with pytest.raises(InvalidRequest, match="64 adapters are loaded, which is the limit"):
            await loaded.load(caller("root"), "y", "a")

    run(body())


def test_one_key_cannot_take_the_memory_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_prompt_tuning(tmp_path / "a", torch.ones(4, 8))  # 128 bytes in float32
    monkeypatch.setattr(adapter_list, "MAX_VIRTUAL_TOKEN_BYTES", 1024)

    async def body() -> None:
        loaded = of_directory(tmp_path, shapes={}, hidden_size=8)
        for number in range(7):
            await loaded.load(caller("ann"), f"x{number}", "a")
        with pytest.raises(InvalidRequest, match=r"896 of 896 bytes of virtual tokens.*limit of 1024"):
            await loaded.load(caller("ann"), "y", "a")
        await loaded.load(caller("ann"), "x0", "a", replaces=True)
        await loaded.load(caller("bob"), "y", "a")
        await loaded.load(caller("bob"), "y", "a", replaces=True)
        with pytest.raises(InvalidRequest, match="would have 1152 bytes, at most 1024"):
            await loaded.load(caller("root"), "y", "a")

    run(body())


def test_simultaneous_loads_wait_for_each_other(tmp_path: Path, adapters: Path) -> None:
    async def test(clients: Clients, gateway: RunningGateway, submits: list[dense_pb2.Submit]) -> None:
        answers = await asyncio.gather(*(clients.load("ann", f"x{number}", "a") for number in range(20)))
        assert [each.status_code for each in answers] == [200] * 20
        assert len(await clients.models("ann")) == 20

    with_gateway(tmp_path, test, lora_directory=adapters)


def test_clients_take_turns_and_the_queue_is_bounded(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read = threading.Event()
    order: list[str] = []

    def read(path: Path, *arguments: Any) -> str:
        assert may_read.wait(30)
        order.append(path.name)
        return "00"

    monkeypatch.setattr(adapters_module, "check_adapter", read)

    async def body() -> None:
        loaded = of_directory(adapters)
        many = [
            asyncio.create_task(loaded.load(caller("ann"), f"x{number}", "a"))
            for number in range(MAX_CHANGES_OF_CLIENT)
        ]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match=f"{MAX_CHANGES_OF_CLIENT} loads of adapters of this client"):
            await loaded.load(caller("ann"), "y", "a")
        few = asyncio.create_task(loaded.load(caller("bob"), "y", "b"))
        await asyncio.sleep(0)
        may_read.set()
        await asyncio.gather(few, *many)
        assert order.index("b") <= 2 and len(order) == MAX_CHANGES_OF_CLIENT + 1
        await loaded.load(caller("ann"), "y", "a")

    try:
        run(body())
    finally:
        may_read.set()
