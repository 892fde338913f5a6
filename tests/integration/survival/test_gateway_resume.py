"""Gateway processes are killed or stopped under resumable streams: each client gets the rest from another process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx2
import jsonschema
import pytest

from services.common.config import WatchdogSection
from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.support.cluster import Cluster, children_of, free_port, request, running_cluster
from tests.support.dense.vision_models import noise
from tests.support.models import TWO_LAYERS
from tests.support.process_memory import resident_bytes
from tests.support.served_vision import data_url, make_served_vision_model

NUM_CLIENTS = 4  # of each API
MAX_ATTEMPTS = 5  # to disturb streams before they end
MAX_TOKENS = 70
NUM_CROWD = 120
CROWD_TOKENS = 16
CROWD_PROMPTS = ("San Francisco is a", "Once upon a time", "The capital of France", "Count to ten")
NUM_KIND_TOKENS = 130  # of the answers of `KINDS`, which outlast the beginning of all of them
WAIT_S = 120.0
GATEWAY_TIMEOUT_S = 8.0
RETRIED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}

DAY = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "array", "items": DAY, "minItems": 40, "maxItems": 40}},
    "required": ["days"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Make a plan."}]
COMPLETION = {"prompt": "Once upon a time", "max_tokens": NUM_KIND_TOKENS}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "structured": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 900,
            "seed": 5,
            "response_format": {"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA}},
        },
    ),
    "sampled": ("/v1/completions", {**COMPLETION, "ignore_eos": True, "temperature": 1, "seed": 7}),
    "beams": (
        "/v1/completions",
        {**COMPLETION, "use_beam_search": True, "best_of": 3, "n": 2, "temperature": 0, "ignore_eos": True},
    ),
    "responses": (
        "/v1/responses",
        {"input": MESSAGES, "max_output_tokens": NUM_KIND_TOKENS, "temperature": 0},
    ),
    "reasoning": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 900,
            "seed": 6,
            "structured_outputs": {"regex": "<think>[a-z ]{150,200}</think>[a-z ]{150,200}"},
        },
    ),
    "call": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 900,
            "seed": 7,
            "tools": [{"type": "function", "function": {"name": "plan", "parameters": SCHEMA}}],
            "tool_choice": "required",
        },
    ),
    "echo": (
        "/v1/completions",
        {**COMPLETION, "ignore_eos": True, "temperature": 1, "seed": 8, "echo": True},
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "tiny-llama",
            "messages": MESSAGES,
            "max_tokens": 900,
            "temperature": 0,
            "tools": [{"name": "plan", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "plan"},
        },
    ),
}
LAST_EVENTS = ("response.completed", "response.incomplete", "message_stop")
# What another run has of its own: ids, times, how much of the prompt was cached, and the last digits of a sum.
OWN = {
    "id", "item_id", "created", "created_at", "completed_at", "prompt_tokens_details", "input_tokens_details",
    "beam_score",
}  # fmt: skip

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    overrides = {
        "gateway.address": f"127.0.0.1:{free_port()}",
        "gateway.http_address": f"127.0.0.1:{free_port()}",
        "gateway.resume": "true",
        "gateway.resume_timeout_s": "60",
        "gateway.reasoning_parser": "qwen3",
        "gateway.first_token_timeout_s": "0.02",  # of a search, whose events come at its end
        "launch.gateway_processes": "2",
        "launch.max_restarts": "20",
        "watchdog.gateway_timeout_s": str(GATEWAY_TIMEOUT_S),
    }
    directory = tmp_path_factory.mktemp("resume")
    settings = (TWO_LAYERS, *(f"{key}={value}" for key, value in overrides.items()))
    with running_cluster(directory, *settings, is_warm=True) as cluster:
        yield cluster


class HttpClient:
    """Reads the events of one stream, and connects again until it has all of them."""

    def __init__(
        self, cluster: Cluster, key: str | None, path: str, body: dict[str, Any], patience_s: float = WAIT_S
    ) -> None:
        """`patience_s`: how long it waits for the next bytes before it connects again."""
        self._address = cluster.http_address
        self._patience_s = patience_s
        self._path = path
        self._body = {**body, "stream": True}
        self._key = key
        self.datas: list[str] = []
        self.num_connections = 0

    def run(self) -> None:
        last_id, deadline = "", time.monotonic() + WAIT_S
        while not self.is_done:
            assert time.monotonic() < deadline, f"only {len(self.datas)} events"
            try:
                last_id = self._read(last_id)
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)

    def _read(self, last_id: str) -> str:
        host, _, port = self._address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=self._patience_s)
        headers = {"content-type": "application/json"}
        headers |= {} if self._key is None else {"Idempotency-Key": self._key}
        headers |= {"Last-Event-ID": last_id} if last_id else {}
        try:
            connection.request("POST", self._path, json.dumps(self._body), headers)
            answer = connection.getresponse()
            if answer.status == 503:  # a process that has just started refuses new requests
                time.sleep(float(answer.headers["retry-after"]))
                return last_id
            assert answer.status == 200, (self._key, answer.read())
            self.num_connections += 1
            event_id = ""
            while line := answer.readline().decode():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ").strip()
                elif line.startswith("data: "):
                    data = line.removeprefix("data: ").strip()
                    assert data == "[DONE]" or not json.loads(data).get("error"), data
                    self.datas.append(data)
                    last_id = event_id
        except (OSError, http.client.HTTPException):
            pass  # the caller connects again
        finally:
            connection.close()
        return last_id

    @property
    def is_done(self) -> bool:
        """Whether it has the last event."""
        last = self.datas[-1] if self.datas else "{}"
        return last == "[DONE]" or json.loads(last).get("type") in LAST_EVENTS

    @property
    def objects(self) -> list[Any]:
        """What the events say, without what is another run's own."""

        def strip(value: Any) -> Any:
            if isinstance(value, dict):
                if "cache_read_input_tokens" in value:  # Anthropic's other input tokens are without these
                    value = {**value}
                    value["input_tokens"] += value.pop("cache_read_input_tokens")
                return {key: strip(each) for key, each in value.items() if key not in OWN}
            return [strip(each) for each in value] if isinstance(value, list) else value

        return [strip(json.loads(data)) for data in self.datas if data != "[DONE]"]

    @property
    def text(self) -> str:
        """Of one completion."""
        return "".join(each["choices"][0]["text"] for each in self.objects)

    @property
    def answer(self) -> tuple[str, Any]:
        objects = [json.loads(data) for data in self.datas[:-1]]
        assert len({(each["id"], each["created"]) for each in objects}) == 1
        choices = [each["choices"][0] for each in objects]
        return "".join(each["delta"].get("content") or "" for each in choices), choices[-1]["finish_reason"]


def chat_client(cluster: Cluster, key: str | None, seed: int, patience_s: float = WAIT_S) -> HttpClient:
    chat = [{"role": "user", "content": f"Count to {seed}"}]
    body = {"messages": chat, "max_tokens": MAX_TOKENS, "seed": seed, "ignore_eos": True}
    return HttpClient(cluster, key, "/v1/chat/completions", body, patience_s)


class GrpcClient:
    """The same over gRPC, with a seed that only the server knows."""

    def __init__(self, cluster: Cluster, name: str, patience_s: float = WAIT_S) -> None:
        """`patience_s`: how long one call may take."""
        self._address = cluster.address
        self._patience_s = patience_s
        self.message = request("Once upon a", MAX_TOKENS, temperature=1.0, ignore_eos=True, request_id=name)
        self.message.resumable = True
        self.chunks: list[gateway_pb2.GenerateChunk] = []
        self.num_connections = 0

    def run(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.chunks or not self.chunks[-1].HasField("finish"):
            assert time.monotonic() < deadline, f"only {len(self.chunks)} chunks"
            with grpc.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                stub = gateway_pb2_grpc.GatewayStub(channel)
                if self.chunks:
                    wish = gateway_pb2.ResumeRequest(
                        request_id=self.message.request_id,
                        num_received=len(self.chunks),
                        digest=self.chunks[-1].digest,
                    )
                    call = stub.Resume(wish, timeout=self._patience_s)
                else:
                    call = stub.GenerateStream(self.message, timeout=self._patience_s)
                try:
                    for chunk in call:
                        self.chunks.append(chunk)
                    self.num_connections += 1
                except grpc.RpcError as error:
                    assert error.code() in RETRIED, error
                    self.num_connections += 1
                    time.sleep(0.05)

    def undisturbed(self) -> gateway_pb2.GenerateRequest:
        """An ordinary request for the same answer."""
        message = gateway_pb2.GenerateRequest()
        message.CopyFrom(self.message)
        message.resumable, message.request_id = False, ""
        message.sampling.seed = self.chunks[-1].finish.seed
        return message


def gateway_pids(cluster: Cluster) -> list[int]:
    pids = []
    for pid in children_of(cluster.process.pid):
        with contextlib.suppress(OSError):  # it has just ended
            if re.search(r"gateway-\d\.toml", Path(f"/proc/{pid}/cmdline").read_bytes().decode()):
                pids.append(pid)
    return sorted(pids)


def clients_of(cluster: Cluster, kind: str, patience_s: float = WAIT_S) -> tuple[list[HttpClient], list[GrpcClient]]:
    over_http = [chat_client(cluster, f"{kind}-{i}", i, patience_s) for i in range(NUM_CLIENTS)]
    return over_http, [GrpcClient(cluster, f"{kind}-{i}", patience_s) for i in range(NUM_CLIENTS)]


@contextlib.contextmanager
def running(over_http: list[HttpClient], over_grpc: list[GrpcClient]) -> Iterator[None]:
    """Runs the clients. The block begins when all have something; after it, waits until all have everything."""
    clients = [*over_http, *over_grpc]
    with ThreadPoolExecutor(len(clients)) as threads:
        runs = [threads.submit(client.run) for client in clients]
        deadline = time.monotonic() + WAIT_S
        while not all(len(each.datas) > 5 for each in over_http) or not all(len(e.chunks) > 5 for e in over_grpc):
            assert time.monotonic() < deadline, "the streams do not begin"
            time.sleep(0.01)
        yield
        for each in runs:
            each.result(WAIT_S)


def were_broken(over_http: list[HttpClient], over_grpc: list[GrpcClient]) -> bool:
    """Whether a stream of these clients was. On a busy machine all may end before the disturbance comes."""
    return any(each.num_connections > 1 for each in (*over_http, *over_grpc))


def check_answers(cluster: Cluster, over_http: list[HttpClient], over_grpc: list[GrpcClient]) -> None:
    """They are those of requests that nothing disturbs."""
    plain = [chat_client(cluster, None, seed) for seed in range(NUM_CLIENTS)]
    with ThreadPoolExecutor(2 * NUM_CLIENTS) as threads, grpc.insecure_channel(cluster.address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        runs = [threads.submit(each.run) for each in plain]
        expected = [threads.submit(generate, stub, each.undisturbed()) for each in over_grpc]
        for each in runs:
            each.result(WAIT_S)
        for client, answer in zip(over_grpc, expected, strict=True):
            [completion] = answer.result(WAIT_S).completions
            assert [token_id for chunk in client.chunks for token_id in chunk.token_ids] == completion.token_ids
            assert "".join(chunk.text for chunk in client.chunks) == completion.text
    assert [each.answer for each in over_http] == [each.answer for each in plain]


def generate(stub: gateway_pb2_grpc.GatewayStub, message: gateway_pb2.GenerateRequest) -> gateway_pb2.GenerateResponse:
    """The answer of a process that has its dense worker; one that has just started refuses new requests."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return stub.Generate(message, timeout=WAIT_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("num_gateways", "others"),
    [(1, ()), (1, ("dense_worker", "attn_worker")), (2, ())],
    ids=["alone", "with both workers", "both at once"],
)
def test_streams_survive_the_death_of_their_gateway(
    cluster: Cluster, num_gateways: int, others: tuple[str, ...]
) -> None:
    for attempt in range(MAX_ATTEMPTS):
        wait_gateways(cluster)
        over_http, over_grpc = clients_of(cluster, f"{num_gateways}-{len(others)}-{attempt}")
        with running(over_http, over_grpc):
            pids = [*gateway_pids(cluster)[:num_gateways], *(cluster.pid_of(role) for role in others)]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        check_answers(cluster, over_http, over_grpc)
        if were_broken(over_http, over_grpc):
            return
    pytest.fail(f"the killed process had no stream in {MAX_ATTEMPTS} attempts")


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> dict[str, HttpClient]:
    """The answers of all kinds without a disturbance."""
    clients = {kind: HttpClient(cluster, f"whole-{kind}", *KINDS[kind]) for kind in KINDS}
    with ThreadPoolExecutor(len(clients)) as threads:
        for run in [threads.submit(client.run) for client in clients.values()]:
            run.result(WAIT_S)
    message = [each["choices"][0]["delta"] for each in clients["reasoning"].objects]
    assert all(len("".join(each.get(key) or "" for each in message)) >= 150 for key in ("reasoning", "content"))
    for kind in ("call", "messages"):
        jsonschema.validate(json.loads("".join(call_arguments(clients[kind].objects))), SCHEMA)
    assert clients["echo"].text.startswith(COMPLETION["prompt"])
    jsonschema.validate(json.loads(clients["structured"].answer[0]), SCHEMA)
    return clients


def call_arguments(objects: list[Any]) -> Iterator[str]:
    """The pieces of the arguments of one call, over OpenAI's or Anthropic's API."""
    for each in objects:
        if "choices" in each:
            yield from (piece["function"]["arguments"] for piece in each["choices"][0]["delta"].get("tool_calls", ()))
        elif each["type"] == "content_block_delta":
            yield each["delta"]["partial_json"]


@pytest.mark.parametrize("num_gateways", [1, 2], ids=["one gateway", "all gateways"])
def test_streams_of_many_kinds_survive_the_death_of_gateways(
    cluster: Cluster, whole: dict[str, HttpClient], num_gateways: int
) -> None:
    """Event for event as without it. The answers of a search come only at its end."""
    text = whole["sampled"].text
    late = range(len(text) * 3 // 4, len(text))
    stop = next(text[i : i + 8] for i in late if text.index(text[i : i + 8]) == i)
    path, body = KINDS["sampled"]
    requests = {**KINDS, "stop": (path, {**body, "stop": [stop]})}
    unbroken = {*requests}
    for attempt in range(MAX_ATTEMPTS):
        wait_gateways(cluster)
        clients = {kind: HttpClient(cluster, f"{num_gateways}-{attempt}-{kind}", *requests[kind]) for kind in unbroken}
        with ThreadPoolExecutor(len(clients)) as threads:
            runs = [threads.submit(client.run) for client in clients.values()]
            wait_begun([*clients.values()])
            for pid in gateway_pids(cluster)[:num_gateways]:
                os.kill(pid, signal.SIGKILL)
            for run in runs:
                run.result(WAIT_S)
        for kind, client in clients.items():
            if kind == "stop":
                assert client.text == text[: text.index(stop)]
            else:
                assert client.objects == whole[kind].objects, kind
        unbroken -= {kind for kind, client in clients.items() if client.num_connections > 1}
        if not unbroken or (num_gateways == 1 and len(unbroken) < len(requests)):
            return
    pytest.fail(f"these streams ended before the kill in {MAX_ATTEMPTS} attempts: {unbroken}")


def test_a_chat_with_a_picture_survives_the_death_of_its_gateway(tmp_path: Path) -> None:
    """Its events are those of a request that nothing disturbs."""
    model = make_served_vision_model(tmp_path / "model")
    overrides = {
        "model.path": model,
        "gateway.address": f"127.0.0.1:{free_port()}",
        "gateway.http_address": f"127.0.0.1:{free_port()}",
        "gateway.resume": "true",
        "launch.gateway_processes": "2",
    }
    picture = {"type": "image_url", "image_url": {"url": data_url(noise(50, 37, 1))}}
    head = {"role": "user", "content": [{"type": "text", "text": "What?"}, picture]}
    body = {"messages": [head], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    directory = tmp_path / "cluster"
    directory.mkdir()
    settings = (f"{key}={value}" for key, value in overrides.items())
    with running_cluster(directory, *settings, is_warm=True) as cluster:
        whole = HttpClient(cluster, "whole", "/v1/chat/completions", body)
        whole.run()
        for attempt in range(MAX_ATTEMPTS):
            wait_gateways(cluster)
            client = HttpClient(cluster, f"picture-{attempt}", "/v1/chat/completions", body)
            with ThreadPoolExecutor(1) as threads:
                run = threads.submit(client.run)
                wait_begun([client])
                for pid in gateway_pids(cluster):
                    os.kill(pid, signal.SIGKILL)
                run.result(WAIT_S)
            assert client.objects == whole.objects
            if client.num_connections > 1:
                break
        else:
            pytest.fail(f"the stream ended before the kill in {MAX_ATTEMPTS} attempts")
        cluster.wait_idle()


class Crowd:
    """Many clients in one event loop, half of them over HTTP, each with a key of its own."""

    def __init__(self, cluster: Cluster, name: str, number: int) -> None:
        self._cluster = cluster
        self._keys = [f"{name}-{i}" for i in range(number)]
        self.texts = dict.fromkeys(self._keys, "")
        self.num_broken = 0

    def prompt(self, key: str) -> str:
        """Some share one."""
        return CROWD_PROMPTS[self._keys.index(key) // 2 % len(CROWD_PROMPTS)]

    async def run(self) -> None:
        """Returns when all have their answers."""
        url, limits = f"http://{self._cluster.http_address}", httpx2.Limits(max_connections=None)
        async with (
            httpx2.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as client,
            contextlib.AsyncExitStack() as channels,
            asyncio.timeout(WAIT_S),
        ):
            alone = [("grpc.use_local_subchannel_pool", 1)]
            stubs = [
                gateway_pb2_grpc.GatewayStub(
                    await channels.enter_async_context(grpc.aio.insecure_channel(self._cluster.address, options=alone))
                )
                for _ in range(8)
            ]
            over_http = [self._read(self._read_events(client, key)) for key in self._keys[::2]]
            over_grpc = [
                self._read(self._read_chunks(stubs[i % len(stubs)], key)) for i, key in enumerate(self._keys[1::2])
            ]
            await asyncio.gather(*over_http, *over_grpc)

    async def _read(self, attempts: AsyncIterator[bool]) -> None:
        """Tries again until an attempt has reached the end."""
        async for is_done in attempts:
            if is_done:
                return
            self.num_broken += 1
            await asyncio.sleep(0.1)
        raise AssertionError("attempts have no end")

    async def _read_events(self, client: httpx2.AsyncClient, key: str) -> AsyncIterator[bool]:
        body = {"prompt": self.prompt(key), "max_tokens": CROWD_TOKENS, "temperature": 0, "stream": True}
        headers, event_id, is_done = {"Idempotency-Key": key}, "", False
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                    assert answer.status_code in (200, 503), await answer.aread()
                    async for line in answer.aiter_lines():
                        if line.startswith("id: "):
                            event_id = line.removeprefix("id: ")
                        elif line == "data: [DONE]":
                            is_done = True
                        elif line.startswith("data: "):
                            self.texts[key] += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                            headers["Last-Event-ID"] = event_id
            yield is_done

    async def _read_chunks(self, stub: gateway_pb2_grpc.GatewayStub, key: str) -> AsyncIterator[bool]:
        message = request(self.prompt(key), CROWD_TOKENS, request_id=key)
        message.resumable = True
        wish, is_done = gateway_pb2.ResumeRequest(request_id=key), False
        while True:
            try:
                async for chunk in stub.Resume(wish) if wish.num_received else stub.GenerateStream(message):
                    self.texts[key] += chunk.text
                    wish.num_received += 1
                    wish.digest = chunk.digest
                    is_done = chunk.HasField("finish")
            except grpc.aio.AioRpcError as error:
                assert error.code() in RETRIED, error
            yield is_done


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_many_streams_at_once_survive_their_gateway_and_cost_little(cluster: Cluster) -> None:
    """Of memory and processor time of the launcher and of the other gateway, a few times what they take."""
    wait_gateways(cluster)
    with grpc.insecure_channel(cluster.address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        answers = {prompt: generate(stub, request(prompt, CROWD_TOKENS)) for prompt in CROWD_PROMPTS}
    expected = {prompt: answer.completions[0].text for prompt, answer in answers.items()}
    for attempt in range(MAX_ATTEMPTS):
        wait_gateways(cluster)
        crowd, gateways = Crowd(cluster, f"crowd-{attempt}", NUM_CROWD), gateway_pids(cluster)
        pids = (cluster.process.pid, gateways[1])
        before_bytes, before_s = [*map(resident_bytes, pids)], [*map(cpu_s, pids)]
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(asyncio.run, crowd.run())
            deadline = time.monotonic() + WAIT_S
            while sum(map(bool, crowd.texts.values())) < NUM_CROWD // 4:
                assert time.monotonic() < deadline, "the streams do not begin"
                time.sleep(0.01)
            os.kill(gateways[0], signal.SIGKILL)
            running.result(WAIT_S)
        assert crowd.texts == {key: expected[crowd.prompt(key)] for key in crowd.texts}
        growths = [resident_bytes(pid) - before for pid, before in zip(pids, before_bytes, strict=True)]
        times_s = [cpu_s(pid) - before for pid, before in zip(pids, before_s, strict=True)]
        assert growths[0] < NUM_CROWD * 20_000 and growths[1] < NUM_CROWD * 150_000, growths
        assert times_s[0] < NUM_CROWD * 0.003 and times_s[1] < NUM_CROWD * 0.02, times_s
        if crowd.num_broken:
            return
    pytest.fail(f"all streams ended before the kill in {MAX_ATTEMPTS} attempts")


def wait_begun(clients: list[HttpClient]) -> None:
    """Returns once the server has begun to answer all of them."""
    deadline = time.monotonic() + WAIT_S
    while not all(each.num_connections for each in clients):
        assert time.monotonic() < deadline, "the streams do not begin"
        time.sleep(0.002)


def wait_gateways(cluster: Cluster) -> None:
    """Returns once both processes listen. One that starts still grows, by 26 MB."""
    deadline = time.monotonic() + WAIT_S
    while sum(listens(pid, cluster.http_address) for pid in gateway_pids(cluster)) < 2:
        assert time.monotonic() < deadline, "the gateways do not start again"
        time.sleep(0.1)


def listens(pid: int, address: str) -> bool:
    """Whether a process has a socket that listens at the port of `address`."""
    port, listening = int(address.rpartition(":")[2]), "0A"  # state of the socket, as in Linux' tcp_states.h
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == listening and int(row[1].split(":")[1], 16) == port}
    with contextlib.suppress(OSError):  # it has just ended
        return any(os.readlink(file) in sockets for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.mark.parametrize("patience_s", [3.0, WAIT_S], ids=["impatient clients", "patient clients"])
def test_streams_leave_a_gateway_that_hangs(cluster: Cluster, patience_s: float) -> None:
    """Half of all new connections reach the stopped process, until a client gives up and tries again.

    A patient client's connection breaks when the launcher restarts the process. Otherwise, if the launcher has not done
    so by then, that wakes up again.
    """
    is_patient = patience_s > GATEWAY_TIMEOUT_S
    for attempt in range(MAX_ATTEMPTS):
        wait_gateways(cluster)
        log_size = cluster.log_file.stat().st_size
        over_http, over_grpc = clients_of(cluster, f"hung-{patience_s}-{attempt}", patience_s)
        with running(over_http, over_grpc):
            hung = gateway_pids(cluster)[0]
            os.kill(hung, signal.SIGSTOP)
        found = re.findall(r'role=gateway reason="no answer .* in (\S+) s"', cluster.log_file.read_text()[log_size:])
        assert all(float(silent_s) < WatchdogSection().stall_timeout_s for silent_s in found), "that is for workers"
        if not found:
            os.kill(hung, signal.SIGCONT)
        check_answers(cluster, over_http, over_grpc)
        cluster.wait_idle()
        if were_broken(over_http, over_grpc) and (found or not is_patient):
            return
    pytest.fail(f"the stopped process had no stream, or was not noticed in time, in {MAX_ATTEMPTS} attempts")
