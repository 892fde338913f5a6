"""The Ray Serve application on a cluster of two nodes: dead replicas, a dead node, scaling and an update, under load.

Hugging Face says what the answers must be. Whatever dies, an attempt gives the whole answer, or ends with an error that
a client can tell and try again: no answer is wrong, and none just ends too early.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.clients.environments import Environment
from tests.clients.test_clients import PROGRAMS
from tests.support.cluster import REPOSITORY, free_port
from tests.support.reference import reference_tokens

pytestmark = [
    pytest.mark.skipif(not Environment("ray").is_installed, reason="Ray is not installed: `make ray`"),
    pytest.mark.timeout(900),  # processes start many times, and the machine may be busy
]

START_TIMEOUT_S, CHANGE_TIMEOUT_S, ANSWER_TIMEOUT_S = 240.0, 240.0, 120.0
NUM_CLIENTS, NUM_TOKENS = 10, 48
PROMPTS = [f"{'Once upon a time. ' * repeats}San Francisco is a" for repeats in (0, 1, 4, 8)]
# Of Ray itself, for a busy machine.
PATIENCE = {"RAY_gcs_server_request_timeout_seconds": "120", "RAY_raylet_start_wait_time_s": "120"}
MARK = f"ray-{secrets.token_hex(4)}"  # in the command line of every process of these servers
SETTINGS = {"model.name": MARK, "launch.standby_dense": "off", "launch.standby_attention": "off"}
OPTIONS = {
    "command": [str(REPOSITORY / ".venv/bin/python"), "-m", "services.launch"],
    "settings": SETTINGS,
    "max_replicas": 3,
    "sequences_per_replica": 2,
    "upscale_delay_s": 1,
    "downscale_delay_s": 20,
    "look_back_s": 3,
    "ingress_replicas": 1,
}


class RayCluster:
    """The program `ray_cluster.py`, which runs the cluster and its application."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.log = log
        command = [Environment("ray").program("python"), str(PROGRAMS / "ray_cluster.py"), str(self.port)]
        self._directory = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # sockets need short names
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "RAY_TMPDIR": self._directory.name} | PATIENCE
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [*command, json.dumps(OPTIONS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                cwd=REPOSITORY,
            )
        self._read()

    def tell(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._read()

    def wait_running(self, number: int) -> None:
        deadline = time.monotonic() + CHANGE_TIMEOUT_S
        while (found := self.tell("status"))["running"] != number:
            assert time.monotonic() < deadline, f"{found}, not {number} replicas; see {self.log}"
            time.sleep(0.5)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(START_TIMEOUT_S)
        self._directory.cleanup()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it has ended:\n{self.log.read_text()[-4000:]}"
        return json.loads(line)


class Load:
    """Clients that stream answers one after the other. A broken one is asked for again at once."""

    def __init__(self, port: int, expected: dict[str, str]) -> None:
        self._port = port
        self._expected = expected
        self._stop = threading.Event()
        self.num_whole = 0
        self.broken: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_TIMEOUT_S)

    def wait_more(self, number: int) -> None:
        """Waits until so many further answers have come."""
        wait_until(lambda start=self.num_whole: self.num_whole >= start + number)

    def _run(self, index: int) -> None:
        turn = index
        while not self._stop.is_set():
            prompt = PROMPTS[turn % len(PROMPTS)]
            text, end = stream(self._port, prompt)
            if end == "done" and text == self._expected[prompt]:
                self.num_whole += 1
                turn += 1
            elif end != "done" and self._expected[prompt].startswith(text):
                self.broken[end] += 1
                time.sleep(0.5)
            else:
                self.wrong.append(f"{prompt!r}: {text!r}, {end}")


def stream(port: int, prompt: str) -> tuple[str, str]:
    """The text of an attempt, and how it ended: "done", or by an error that a client can try again after."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    body = {"model": MARK, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    text = ""
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return text, f"status {response.status}"
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return text, "done"
            event = json.loads(data)
            if "error" in event:
                return text, f"event {event['error']['code']}"
            text += event["choices"][0]["text"]
        return text, "nothing"
    except (OSError, http.client.HTTPException) as error:
        return text, type(error).__name__
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CHANGE_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def num_servers() -> int:
    """Launchers of this test that run, replicas' or orphans."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        found += "services.launch" in words and any(MARK in word for word in words)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    texts = {}
    for prompt in PROMPTS:
        token_ids = reference_tokens(EMBEDDED_MODEL, tokenizer(prompt)["input_ids"], NUM_TOKENS)
        texts[prompt] = tokenizer.decode(token_ids, skip_special_tokens=True)
    return texts


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path_factory.mktemp("ray") / "log")
    yield cluster
    cluster.close()
    wait_until(lambda: num_servers() == 0)  # no server outlives its replica


def call(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code that has all of the application's names, without a cluster."""
    command = [Environment("ray").program("python"), "-c", f"from deploy.ray.application import *\n{code}", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 3}, ["replicas", "Extra inputs are not permitted"]),
        ({"num_cpus": 0}, ["num_cpus", "greater than 0"]),
        ({"min_replicas": 3, "max_replicas": 2}, ["max_replicas (2) must be greater than", "min_replicas (3)"]),
    ],
)
def test_impossible_arguments_are_named(options: dict[str, Any], words: list[str]) -> None:
    ended = call("import sys; build(Options.model_validate_json(sys.argv[1]))", json.dumps(options))
    assert ended.returncode == 1 and all(word in ended.stderr for word in words), ended.stderr


def test_the_router_sees_the_beginning_of_whatever_is_asked() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    longer = [*chat, {"role": "assistant", "content": "Hello"}]
    chats = [{"messages": chat}, {"messages": longer}]
    bodies = [{"prompt": "Once"}, {"prompt": [1, 2, 3]}, *chats, {"input": "Once"}, [], {}]
    code = "import sys; print(json.dumps([prompt_of(json.dumps(each).encode()) for each in json.loads(sys.argv[1])]))"
    text, tokens, first, second, other, *nothing = json.loads(call(code, json.dumps(bodies)).stdout)
    assert (text, tokens, other, nothing) == ("Once", "[1, 2, 3]", "Once", ["", ""])
    assert second.startswith(first.removesuffix("]")), "a conversation that goes on begins as it did"


ENDLESS = """
from unittest.mock import Mock
num_read = 0

async def receive():
    global num_read
    num_read += 1
    return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

def answer(headers):
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    return asyncio.run(Ingress(Mock(), 10_000)(Request(scope, receive)))

endless, stated = answer([]), answer([(b"content-length", b"10001")])
print(endless.status_code, stated.status_code, num_read, json.loads(endless.body)["error"]["message"])
"""


def test_a_body_without_an_end_is_refused_and_not_read_on() -> None:
    ended = call(ENDLESS)
    assert ended.stdout == "413 413 11 the body has more than 10000 bytes, the limit (gateway.max_body_bytes)\n", ended


def test_every_route_reaches_a_server(cluster: RayCluster, expected: dict[str, str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=ANSWER_TIMEOUT_S)
    connection.request("GET", "/v1/models")
    [model] = json.load(connection.getresponse())["data"]
    assert model["id"] == MARK
    connection.request("POST", "/v1/completions", b"{", {"content-type": "application/json"})
    refused = connection.getresponse()
    assert refused.status == 400 and "error" in json.load(refused), "the server's own answer"
    body = {"model": MARK, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    assert json.load(connection.getresponse())["usage"]["completion_tokens"] > 0
    for prompt in PROMPTS:
        assert stream(cluster.port, prompt) == (expected[prompt], "done")


def test_deaths_updates_and_scaling_under_load(cluster: RayCluster, expected: dict[str, str]) -> None:
    with Load(cluster.port, expected) as load:
        cluster.wait_running(3)
        load.wait_more(12)
        assert not load.broken, "replicas that come break nothing"

        cluster.tell("kill")
        wait_until(lambda: bool(load.broken))
        assert load.broken.keys() <= {"event unavailable", "status 503"}
        cluster.wait_running(3)
        load.wait_more(12)

        before = load.broken.copy()
        cluster.tell(f"deploy {json.dumps(OPTIONS | {'settings': SETTINGS | {'gateway.max_n': 4}})}")
        cluster.wait_running(3)
        load.wait_more(12)
        assert load.broken == before, "an update breaks nothing"

        cluster.tell("remove")
        load.wait_more(24)
        assert cluster.tell("status")["running"] >= 1
    assert not load.wrong
    assert load.broken.keys() <= {"event unavailable", "status 503"}
    cluster.wait_running(1)
    wait_until(lambda: num_servers() == 1)
    for prompt in PROMPTS:
        assert stream(cluster.port, prompt) == (expected[prompt], "done")
