"""Calls that concern the other gateway processes, too: ends of their requests, adapters that all of them serve."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import httpx2
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.common.child_options import ChildOptions
from services.common.config import EMBEDDED_MODEL
from services.common.errors import InvalidRequest, PeerError
from services.gateway.adapters.adapters import Adapters
from services.gateway.link import gateway_peers
from services.gateway.link.gateway_peers import GatewayPeers
from services.lora.adapter_records import AdapterRecords
from services.pb import gateway_pb2, gateway_peers_pb2, gateway_peers_pb2_grpc, triton_pb2_grpc
from tests.support.adapters import make_adapter
from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_clients import async_client
from tests.support.clients.inference_messages import ENDLESS, STOP, message, output
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense

KEYS = {"ann": "ann-ann-ann-ann-ann", "bob": "bob-bob-bob-bob-bob"}
START_LIMIT_S = 30.0
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WAYS: list[Callable[[str], dict[str, str]]] = [
    lambda key: {"authorization": f"Bearer {key}"},
    lambda key: {"Authorization": f"bearer  {key}"},
    lambda key: {"x-api-key": key},
]
Gateways = list[RunningGateway]


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """A directory with the adapters a and b of the embedded model."""
    directory = tmp_path / "adapters"
    for seed, name in enumerate(("a", "b")):
        make_adapter(directory / name, EMBEDDED_MODEL, rank=4, modules=("q_proj",), seed=seed)
    return directory


def options_of(directory: Path, index: int, num_gateways: int) -> ChildOptions:
    addresses = [f"unix:{directory}/peer-{each}.sock" for each in range(num_gateways)]
    return ChildOptions(
        peer_address=addresses[index],
        peer_addresses=tuple(each for each in addresses if each != addresses[index]),
        change_lock=directory / "lock",
        process_index=index,
    )


@contextlib.asynccontextmanager
async def gateway_of(
    directory: Path, index: int, num_gateways: int, dense: FakeDense, **options: Any
) -> AsyncIterator[RunningGateway]:
    own = directory / str(index)
    own.mkdir(exist_ok=True)
    options |= {"options": options_of(directory, index, num_gateways)}
    async with running_gateway(own, dense, max_loras=1, **options) as gateway:
        yield gateway


def endless() -> FakeDense:
    return FakeDense(lambda submit: ids(" a") * 5000, step_s=0.001)


def with_gateways(
    directory: Path, test: Callable[[Gateways, list[FakeDense]], Awaitable[None]], num_gateways: int = 3, **options: Any
) -> None:
    """Runs `test` against gateways that are peers, each with a dense worker of its own."""

    async def body() -> None:
        async with contextlib.AsyncExitStack() as stack:
            workers = [endless() for _ in range(num_gateways)]
            gateways = [
                await stack.enter_async_context(gateway_of(directory, index, num_gateways, dense, **options))
                for index, dense in enumerate(workers)
            ]
            await test(gateways, workers)

    run(body())


def keys_file(directory: Path) -> Path:
    file = directory / "keys.toml"
    file.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
    return file


async def post(gateway: RunningGateway, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx2.Response:
    async with async_client(gateway.http_address) as client:
        return await client.post(path, json=body, headers=headers, timeout=60)


async def names_at(gateway: RunningGateway, headers: dict[str, str]) -> set[str]:
    async with async_client(gateway.http_address) as client:
        models = (await client.get("/v1/models", headers=headers)).json()["data"]
        return {each["id"] for each in models if each["parent"] is not None}


def bearer(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {KEYS[name]}")]


def test_each_gateway_tells_the_metrics_and_the_load_of_all(tmp_path: Path) -> None:
    async def scrape(gateway: RunningGateway, accept: str) -> dict[tuple[str, ...], float]:
        async with async_client(gateway.http_address) as client:
            answer = await client.get("/metrics", headers={"accept": accept})
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line.startswith("# TYPE ")]
        assert len(lines) == len(set(lines)), "each metric is described once"
        samples = [each for family in text_string_to_metric_families(answer.text) for each in family.samples]
        found = {(each.name, *sorted(map("=".join, each.labels.items()))): each.value for each in samples}
        assert len(found) == len(samples), "no two samples have one name and the same labels"
        return found

    async def load(gateway: RunningGateway) -> int:
        async with async_client(gateway.http_address) as client:
            return (await client.get("/load")).json()["server_load"]

    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        body = {"prompt": [5], "max_tokens": 3}
        for index in (0, 2, 2):
            assert (await post(gateways[index], "/v1/completions", body, {})).status_code == 200
        for gateway in gateways:
            for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
                found = await scrape(gateway, accept)
                for name, counts in (
                    ("twostroke_gateway_generated_tokens_total", (3, 0, 6)),
                    ("twostroke_gateway_time_to_first_token_seconds_count", (1, 0, 2)),
                ):
                    values = tuple(found[name, f"process={index}"] for index in range(3))
                    assert values == counts, name
                assert all("process=" in " ".join(key) for key in found)
        found = await scrape(gateways[1], "text/plain")
        [model] = {key[1] for key in found if key[0] == "vllm:generation_tokens_total"}
        for name, counts in (
            ("vllm:generation_tokens_total", (3, 0, 6)),
            ("vllm:time_to_first_token_seconds_count", (1, 0, 2)),
            ("vllm:request_generation_tokens_sum", (3, 0, 6)),
        ):
            assert tuple(found[name, model, f"process={index}"] for index in range(3)) == counts, name
        endless_body = {**body, "max_tokens": 4000, "stream": True}
        async with (
            async_client(gateways[1].http_address) as client,
            client.stream("POST", "/v1/completions", json=endless_body),
        ):
            assert [await load(gateway) for gateway in gateways] == [1, 1, 1]

    with_gateways(tmp_path, test, compat="vllm")


def test_a_gateway_that_does_not_answer_is_left_out_of_the_metrics(tmp_path: Path) -> None:
    async def body() -> None:
        async with gateway_of(tmp_path, 0, 2, endless()) as gateway, async_client(gateway.http_address) as client:
            text = (await client.get("/metrics")).text
            assert 'twostroke_gateway_connected{process="0"} 1.0' in text and 'process="1"' not in text
            assert (await client.get("/load")).json() == {"server_load": 0}

    run(body())


class HungPeer(gateway_peers_pb2_grpc.GatewayPeersServicer):
    """Answers nothing, and counts the calls by whether they ask for metrics."""

    def __init__(self) -> None:
        self.num_asked = {True: 0, False: 0}

    async def Measure(
        self, request: gateway_peers_pb2.MeasureRequest, context: grpc.aio.ServicerContext
    ) -> gateway_peers_pb2.MeasureResponse:
        self.num_asked[request.has_metrics] += 1
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("path", ["/load", "/metrics"])
def test_many_who_ask_at_once_cause_one_call_to_a_peer(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it hangs: anybody may ask, without a key."""
    monkeypatch.setattr(gateway_peers, "TIMEOUT_S", 3600.0)  # so that the first call is still running for the last one
    has_metrics = path == "/metrics"

    async def body() -> None:
        peer, server = HungPeer(), grpc.aio.server()
        gateway_peers_pb2_grpc.add_GatewayPeersServicer_to_server(peer, server)
        server.add_insecure_port(str(options_of(tmp_path, 1, 2).peer_address))
        await server.start()
        async with gateway_of(tmp_path, 0, 2, endless()) as gateway, async_client(gateway.http_address) as client:
            asking = [asyncio.create_task(client.get(path, timeout=60)) for _ in range(20)]
            await until(lambda: peer.num_asked[has_metrics] > 0)
            # Asked after the others, so with a call for each most of these have been made now.
            assert (await client.get("/version")).status_code == 200
            asking[0].cancel()  # which does not end the call for the others
            await server.stop(None)
            answers = await asyncio.gather(*asking[1:])
            assert {each.status_code for each in answers} == {200}
            assert peer.num_asked == {has_metrics: 1, not has_metrics: 0}

    run(body())


def test_metrics_and_other_work_in_threads_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async def body() -> None:
        async with gateway_of(tmp_path, 0, 1, endless()) as gateway, async_client(gateway.http_address) as client:
            release = threading.Event()
            busy = [asyncio.create_task(asyncio.to_thread(release.wait)) for _ in range(64)]  # more than threads
            try:
                assert (await client.get("/metrics", timeout=60)).status_code == 200
            finally:
                release.set()
                await asyncio.gather(*busy)

    run(body())


def test_an_adapter_is_loaded_by_all_gateways_whichever_way_the_key_is_given(tmp_path: Path, adapters: Path) -> None:
    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        for index, way in enumerate(WAYS):
            headers, asked = way(KEYS["ann"]), gateways[index]
            loaded = await post(asked, LOAD, {"lora_name": "x", "lora_path": "a"}, headers)
            assert loaded.status_code == 200, loaded.text
            assert [await names_at(each, headers) for each in gateways] == [{"x"}] * 3
            unloaded = await post(gateways[index - 1], UNLOAD, {"lora_name": "x"}, headers)
            assert unloaded.status_code == 200, unloaded.text
            assert [await names_at(each, headers) for each in gateways] == [set()] * 3

    with_gateways(tmp_path, test, api_keys_file=keys_file(tmp_path), lora_directory=adapters)


def test_without_room_to_note_the_change_an_error_says_so_and_no_gateway_loads_it(
    tmp_path: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        body = {"lora_name": "c", "lora_path": "a"}
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", fill)
            answer = await post(gateways[0], LOAD, body, {})
        error = answer.json()["error"]
        assert answer.status_code == 503, error
        expected = f"adapters cannot be changed now: {tmp_path / 'lock'}: No space left on device"
        assert error["message"] == expected
        assert [await names_at(each, {}) for each in gateways] == [set()] * 3
        assert (await post(gateways[0], LOAD, body, {})).status_code == 200

    with_gateways(tmp_path, test, lora_directory=adapters)


def test_an_adapter_that_one_gateway_cannot_load_is_loaded_by_none(tmp_path: Path, adapters: Path) -> None:
    """The files change between the first one's reading and the others'."""

    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        headers = WAYS[0](KEYS["ann"])
        assert (await post(gateways[0], LOAD, {"lora_name": "x", "lora_path": "a"}, headers)).status_code == 200
        message = gateway_peers_pb2.PeerAdapter(owner="ann", name="y", path="b", hash="0" * 64)
        peers = GatewayPeers([options_of(tmp_path, 1, 3).peer_address, f"unix:{tmp_path}/gone.sock"])  # type: ignore[list-item]
        with pytest.raises(Exception, match=r"'y' is not loaded.*peer-1\.sock \(Loading lora y failed: its files"):
            await peers.stage_adapter(message)
        assert [await names_at(each, headers) for each in gateways] == [{"x"}] * 3

    with_gateways(tmp_path, test, api_keys_file=keys_file(tmp_path), lora_directory=adapters)


@pytest.mark.parametrize("previous", [None, "a"])
def test_an_adapter_that_one_gateway_cannot_serve_is_served_by_none(
    tmp_path: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch, previous: str | None
) -> None:
    """The second of two peers fails when all have read it. What was served before is so again, file or not."""
    serve, num_calls = Adapters.serve, 0

    async def serve_once(self: Adapters, request: gateway_peers_pb2.PeerAdapter) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise InvalidRequest("its files are gone")
        await serve(self, request)

    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        body = {"lora_name": "x", "lora_path": "b", "load_inplace": True}
        expected = []
        if previous is not None:
            assert (await post(gateways[1], LOAD, body | {"lora_path": previous}, {})).status_code == 200
            shutil.rmtree(adapters / previous)  # so that only the processes have it
            expected = [("x", previous)]
        records = AdapterRecords(adapters)
        recorded = records.read()
        monkeypatch.setattr(Adapters, "serve", serve_once)
        refused = await post(gateways[0], LOAD, body, {})
        assert refused.status_code == 503 and "'x' is not loaded" in refused.text, refused.text
        assert "its files are gone" in refused.text and "taken back" not in refused.text
        assert await served(gateways) == [expected] * 3
        assert records.read() == recorded
        loaded = await post(gateways[2], LOAD, body, {})
        assert loaded.status_code == 200, loaded.text
        assert await served(gateways) == [[("x", "b")]] * 3

    with_gateways(tmp_path, test, lora_directory=adapters)


def test_a_gateway_keeps_nothing_of_an_adapter_that_another_one_could_not_read(tmp_path: Path, adapters: Path) -> None:
    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        [address] = {options_of(tmp_path, 0, 1).peer_address}
        loaded = await gateways[0].stub.LoadAdapter(gateway_pb2.LoadAdapterRequest(name="x", path="a"))
        adapter = gateway_peers_pb2.PeerAdapter(name="y", path="a", hash=loaded.adapter.hash)
        with pytest.raises(PeerError, match="'y' is not loaded"):
            await GatewayPeers([str(address), f"unix:{tmp_path}/gone.sock"]).stage_adapter(adapter)
        shutil.rmtree(adapters / "a")
        async with grpc.aio.insecure_channel(str(address)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):  # it would have to read the files again
                await gateway_peers_pb2_grpc.GatewayPeersStub(channel).ServeAdapter(adapter)
        assert await names_at(gateways[0], {}) == {"x"}

    with_gateways(tmp_path, test, num_gateways=1, lora_directory=adapters)


def test_while_a_gateway_is_down_nothing_is_loaded_and_when_it_starts_it_has_everything(
    tmp_path: Path, adapters: Path
) -> None:
    async def body() -> None:
        options = {"lora_directory": adapters}
        async with gateway_of(tmp_path, 0, 2, endless(), **options) as first:
            async with gateway_of(tmp_path, 1, 2, endless(), **options):
                assert (await post(first, LOAD, {"lora_name": "x", "lora_path": "a"}, {})).status_code == 200
                assert (await post(first, LOAD, {"lora_name": "y", "lora_path": "b"}, {})).status_code == 200
            body = {"lora_name": "x", "lora_path": "b", "load_inplace": True}
            refused = await post(first, LOAD, body, {})
            assert refused.status_code == 503 and "peer-1.sock" in refused.text
            refused = await post(first, LOAD, {"lora_name": "z", "lora_path": "a"}, {})
            assert refused.status_code == 503
            assert (await post(first, UNLOAD, {"lora_name": "y"}, {})).status_code == 200
            async with gateway_of(tmp_path, 1, 2, endless(), **options) as second:
                infos = [await each.stub.ModelInfo(gateway_pb2.ModelInfoRequest()) for each in (first, second)]
                assert [[(each.name, Path(each.path).name) for each in info.adapters] for info in infos] == [
                    [("x", "a")]
                ] * 2

    run(body())


def test_a_gateway_that_hangs_is_not_taken_for_one_that_is_down(
    tmp_path: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what others change without it; so they say that it may differ, and tell it with the next change."""

    async def body() -> None:
        options = {"lora_directory": adapters}
        address = options_of(tmp_path, 1, 2).peer_address
        assert address is not None
        path = Path(address.removeprefix("unix:"))
        async with gateway_of(tmp_path, 0, 2, endless(), **options) as first:
            async with gateway_of(tmp_path, 1, 2, endless(), **options):
                assert (await post(first, LOAD, {"lora_name": "x", "lora_path": "a"}, {})).status_code == 200
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as hanging:  # it takes connections, and says nothing
                hanging.bind(str(path))
                hanging.listen()
                refused = await post(first, UNLOAD, {"lora_name": "x"}, {})
                assert refused.status_code == 503 and "'x' is not forgotten in the gateway at" in refused.text
                monkeypatch.setattr(GatewayPeers, "stage_adapter", AsyncMock())  # it has read it, and hangs since
                refused = await post(first, LOAD, {"lora_name": "y", "lora_path": "b"}, {})
                assert refused.status_code == 503 and "not all gateways serve it" in refused.text
                monkeypatch.undo()
            path.unlink()
            async with gateway_of(tmp_path, 1, 2, endless(), **options) as second:
                assert (await post(second, LOAD, {"lora_name": "z", "lora_path": "b"}, {})).status_code == 200
                assert await served([first, second]) == [[("z", "b")]] * 2

    run(body())


async def served(gateways: Gateways) -> list[list[tuple[str, str]]]:
    """Names and directories of the adapters of each gateway."""
    infos = [await each.stub.ModelInfo(gateway_pb2.ModelInfoRequest()) for each in gateways]
    return [[(each.name, Path(each.path).name) for each in info.adapters] for info in infos]


@pytest.mark.parametrize("finisher", ["the next process in its place", "a peer with the next change"])
@pytest.mark.parametrize("change", ["load", "replace", "unload"])
def test_a_change_whose_process_dies_before_its_peers_know_is_finished(
    tmp_path: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch, change: str, finisher: str
) -> None:
    has_died = asyncio.Event()

    async def die(*_: object) -> None:
        has_died.set()
        raise asyncio.CancelledError

    async def body() -> None:
        options, expected = {"lora_directory": adapters}, [] if change == "unload" else [("x", "b")]
        async with contextlib.AsyncExitStack() as stack:
            peers = [
                await stack.enter_async_context(gateway_of(tmp_path, index, 3, endless(), **options))
                for index in (1, 2)
            ]
            async with gateway_of(tmp_path, 0, 3, endless(), **options) as first:
                if change != "load":
                    assert (await post(first, LOAD, {"lora_name": "x", "lora_path": "a"}, {})).status_code == 200
                before = await served(peers)
                monkeypatch.setattr(GatewayPeers, "serve_adapter", die)
                monkeypatch.setattr(GatewayPeers, "forget_adapter", die)
                if change == "unload":
                    call = first.stub.UnloadAdapter(gateway_pb2.UnloadAdapterRequest(name="x"))
                else:
                    call = first.stub.LoadAdapter(gateway_pb2.LoadAdapterRequest(name="x", path="b", replaces=True))
                await has_died.wait()
                call.cancel()
                monkeypatch.undo()
                assert await served(peers) == before != [expected] * 2, "they have not been told"
                if finisher == "a peer with the next change":
                    await peers[0].stub.LoadAdapter(gateway_pb2.LoadAdapterRequest(name="y", path="a"))
                    expected.append(("y", "a"))
                    assert await served([first, *peers]) == [expected] * 3
                    return
            async with gateway_of(tmp_path, 0, 3, endless(), **options) as again:
                assert await served([again, *peers]) == [expected] * 3

    run(body())


@pytest.mark.parametrize("asker", ["itself", "a peer, when it has died"])
def test_a_gateway_that_has_missed_a_change_is_told_with_the_next_one(
    tmp_path: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch, asker: str
) -> None:
    """It hangs while another one unloads an adapter, or finishes what a third one was doing when it died."""
    forget, num_hanging = Adapters.forget, 0

    def forget_unless_hanging(self: Adapters, owner: str, name: str) -> None:
        nonlocal num_hanging
        if num_hanging:
            num_hanging -= 1
            raise InvalidRequest("it hangs")
        forget(self, owner, name)

    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        nonlocal num_hanging
        monkeypatch.setattr(Adapters, "forget", forget_unless_hanging)
        assert (await post(gateways[0], LOAD, {"lora_name": "x", "lora_path": "a"}, {})).status_code == 200
        num_hanging = 1
        if asker == "itself":
            assert (await post(gateways[0], UNLOAD, {"lora_name": "x"}, {})).status_code == 503
            num_hanging = 1
            again = await post(gateways[0], UNLOAD, {"lora_name": "x"}, {})
            assert again.status_code == 503 and "has not reached all gateways yet" in again.text
        else:
            AdapterRecords(adapters).remove("", "x")
            (tmp_path / "lock").write_text(json.dumps(["", "x"]) + "\n")
            assert (await post(gateways[0], LOAD, {"lora_name": "y", "lora_path": "a"}, {})).status_code == 200
        assert any(("x", "a") in each for each in await served(gateways))
        if asker == "itself":
            again = await post(gateways[2], UNLOAD, {"lora_name": "x"}, {})
            assert again.status_code in (200, 404), "404 if it is not the one that hung"
        else:
            assert (await post(gateways[1], LOAD, {"lora_name": "z", "lora_path": "b"}, {})).status_code == 200
        assert not any(("x", "a") in each for each in await served(gateways))
        assert (tmp_path / "lock").read_text() == ""

    with_gateways(tmp_path, test, lora_directory=adapters)


def test_a_gateway_starts_while_another_one_changes_an_adapter(tmp_path: Path, adapters: Path) -> None:
    """That may take as long as its files take to read, or until a process that has stopped is killed."""

    async def body() -> None:
        with (tmp_path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write('["", "x"]\n')
            lock.flush()
            async with asyncio.timeout(START_LIMIT_S), gateway_of(tmp_path, 0, 1, endless(), lora_directory=adapters):
                pass
        assert (tmp_path / "lock").read_text() == '["", "x"]\n', "it is the other one that finishes it"

    run(body())


def test_loads_of_one_name_at_several_gateways_at_once_leave_one_adapter(tmp_path: Path, adapters: Path) -> None:
    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        for round_number in range(3):
            body = {"lora_name": "x", "load_inplace": round_number > 0}
            answers = await asyncio.gather(
                *(post(each, LOAD, body | {"lora_path": "ab"[i % 2]}, {}) for i, each in enumerate(gateways))
            )
            num_loaded = 1 if round_number == 0 else len(gateways)
            assert [each.status_code for each in answers].count(200) == num_loaded
            infos = [await each.stub.ModelInfo(gateway_pb2.ModelInfoRequest()) for each in gateways]
            assert len({each.adapters[0].hash for each in infos}) == 1

    with_gateways(tmp_path, test, lora_directory=adapters)


def test_a_gateway_that_starts_takes_the_changes_of_its_peers_meanwhile(tmp_path: Path, adapters: Path) -> None:
    """It has not staged what it is to serve; then it reads that itself."""

    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        [address] = {options_of(tmp_path, 0, 1).peer_address}
        async with grpc.aio.insecure_channel(str(address)) as channel:
            stub = gateway_peers_pb2_grpc.GatewayPeersStub(channel)
            loaded = (await gateways[0].stub.LoadAdapter(gateway_pb2.LoadAdapterRequest(name="x", path="a"))).adapter
            adapter = gateway_peers_pb2.PeerAdapter(name="y", path="a", hash=loaded.hash)
            await stub.ServeAdapter(adapter)
            assert await names_at(gateways[0], {}) == {"x", "y"}
            await stub.ForgetAdapter(gateway_peers_pb2.ForgetAdapterRequest(name="y"))
            await stub.ForgetAdapter(gateway_peers_pb2.ForgetAdapterRequest(name="y"))
            assert await names_at(gateways[0], {}) == {"x"}
            shutil.rmtree(adapters / "a")
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ServeAdapter(adapter)

    with_gateways(tmp_path, test, num_gateways=1, lora_directory=adapters)


def test_clients_do_not_reach_the_calls_of_peers(tmp_path: Path, adapters: Path) -> None:
    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        stub = gateway_peers_pb2_grpc.GatewayPeersStub(gateways[0].channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ForgetAdapter(gateway_peers_pb2.ForgetAdapterRequest(name="x"), metadata=bearer("ann"))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    with_gateways(tmp_path, test, num_gateways=1, api_keys_file=keys_file(tmp_path), lora_directory=adapters)


@pytest.mark.parametrize("way", WAYS)
def test_requests_are_ended_by_their_own_key_at_any_gateway(
    tmp_path: Path, way: Callable[[str], dict[str, str]]
) -> None:
    whole = {**ENDLESS, "streaming": np.array([[False]])}
    stop = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True, "id": "same"}

    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        first, second = gateways
        inference = triton_pb2_grpc.GRPCInferenceServiceStub(first.channel)
        named = message("tensorrt_llm", whole, id="same")
        calls = {name: inference.ModelInfer(named, metadata=bearer(name)) for name in KEYS}
        request = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1900, ignore_eos=True, request_id="mine")
        answer = first.stub.Generate(request, metadata=bearer("ann"))
        await until(lambda: len(workers[0].submits) == 3)
        abort = gateway_pb2.AbortRequest(request_id="mine")
        assert not (await second.stub.Abort(abort, metadata=bearer("bob"))).was_running
        assert (await second.stub.Abort(abort, metadata=bearer("ann"))).was_running
        assert (await answer).completions[0].finish.reason == gateway_pb2.FINISH_REASON_ABORT
        stopped = await post(second, "/v2/models/tensorrt_llm/generate", stop, way(KEYS["bob"]))
        assert stopped.status_code == 200, stopped.text
        assert output(await calls["bob"], "sequence_length")[0, 0] < 1900
        assert not calls["ann"].done()
        await triton_pb2_grpc.GRPCInferenceServiceStub(second.channel).ModelInfer(
            message("tensorrt_llm", STOP, id="same"), metadata=bearer("ann")
        )
        assert output(await calls["ann"], "sequence_length")[0, 0] < 1900

    with_gateways(tmp_path, test, num_gateways=2, api_keys_file=keys_file(tmp_path))


def test_all_requests_of_a_key_are_ended_whichever_gateway_runs_them(tmp_path: Path) -> None:
    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        request = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1900, ignore_eos=True)
        own = [each.stub.Generate(request, metadata=bearer("ann")) for each in gateways for _ in range(2)]
        other = gateways[0].stub.Generate(request, metadata=bearer("bob"))
        batch = []
        for name in ("batch-0", "batch-1"):
            named = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1900, ignore_eos=True, request_id=name)
            batch.append(gateways[0].stub.Generate(named, metadata=bearer("ann")))
        await until(lambda: sum(len(each.submits) for each in workers) == 7)
        answer = await post(gateways[1], "/abort_request", {"rid": "batch"}, WAYS[0](KEYS["ann"]))
        assert answer.status_code == 200, answer.text
        for each in batch:
            assert (await each).completions[0].finish.reason == gateway_pb2.FINISH_REASON_ABORT
        assert not any(each.done() for each in own)
        answer = await post(gateways[1], "/abort_request", {"abort_all": True}, WAYS[0](KEYS["ann"]))
        assert answer.status_code == 200, answer.text
        for each in own:
            assert (await each).completions[0].finish.reason == gateway_pb2.FINISH_REASON_ABORT
        assert not other.done()
        other.cancel()

    with_gateways(tmp_path, test, num_gateways=2, api_keys_file=keys_file(tmp_path))


def test_without_keys_only_the_address_of_a_request_aborts_it(tmp_path: Path) -> None:
    async def test(gateways: Gateways, workers: list[FakeDense]) -> None:
        first, second = gateways
        request = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1900, ignore_eos=True, request_id="same")
        from_one, from_two = ([("x-forwarded-for", f"10.0.0.{number}")] for number in (1, 2))
        answer = first.stub.Generate(request, metadata=from_one)
        other = first.stub.Generate(request, metadata=from_two)
        await until(lambda: len(workers[0].submits) == 2)
        abort = gateway_pb2.AbortRequest(request_id="same")
        assert not (await second.stub.Abort(abort)).was_running
        assert (await second.stub.Abort(abort, metadata=from_one)).was_running
        assert (await answer).completions[0].finish.reason == gateway_pb2.FINISH_REASON_ABORT
        assert not other.done()
        other.cancel()

    with_gateways(tmp_path, test, num_gateways=2, trusted_proxies=("unix",))
