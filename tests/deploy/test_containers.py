"""Containers that really run, by Docker Compose: processes die in them, and they die. `make containers` runs this."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from services.pb import gateway_pb2_grpc
from tests.deploy.compose_file import DEPLOY
from tests.support.certificates import Authority
from tests.support.cluster import RECONNECTING, REQUEST_TIMEOUT_S, START_TIMEOUT_S, free_port, request

ASKED_FOR = "TWOSTROKE_TEST_CONTAINERS"  # in the environment that `make containers` sets
PROJECT = "twostroke-test"
WORKERS = {"dense_worker": 9103, "attn_worker": 9104}  # with the ports of their launchers' metrics
API_KEY = "a-key-of-sixteen-characters-and-more"
NUM_STREAMS, MAX_TOKENS = 4, 800
FEW_TOKENS = 20  # of each stream before a kill
DOCKER_TIMEOUT_S = 60.0
# In a container: the process that its init has started is all that it runs.
KILL_MAIN = "kill -9 $(cat /proc/1/task/1/children)"

VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {  # further compose files, and variables
    "plain": ([], {}),
    "keys": (["compose.keys.yaml"], {}),
    "tls": (["compose.tls.yaml"], {}),
    "host tier": ([], {"TWOSTROKE_HOST_KV_BYTES": str(2**26)}),
}


class Stream:
    """One answer as it arrives."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.arrivals: list[float] = []


class Deployment:
    """The containers of `deploy/compose.yaml` and others beside it, in a project of their own."""

    def __init__(self, name: str, files: Sequence[str], variables: Mapping[str, str], secrets: Path) -> None:
        self.name = name
        self.port = free_port()
        self._command = ["docker", "compose", "--project-name", PROJECT]
        for file in ("compose.yaml", *files):
            self._command += ["--file", str(DEPLOY / file)]
        own = {
            "TWOSTROKE_GRPC_PORT": str(self.port),
            "TWOSTROKE_HTTP_PORT": str(free_port()),
            "TWOSTROKE_API_KEYS_FILE": f"{secrets}/api-keys.toml",
            "TWOSTROKE_TLS_CERTIFICATE": f"{secrets}/tls.crt",
            "TWOSTROKE_TLS_KEY": f"{secrets}/tls.key",
        }
        self._environment = os.environ | own | dict(variables)
        credentials = grpc.ssl_channel_credentials((secrets / "ca.crt").read_bytes())
        address = f"127.0.0.1:{self.port}"
        self._channel = (
            grpc.secure_channel(address, credentials, options=RECONNECTING)
            if "compose.tls.yaml" in files
            else grpc.insecure_channel(address, options=RECONNECTING)
        )
        self.gateway = gateway_pb2_grpc.GatewayStub(self._channel)
        self.metadata = (("authorization", f"Bearer {API_KEY}"),) if files else ()

    def compose(self, *arguments: str, timeout_s: float = DOCKER_TIMEOUT_S) -> str:
        command = [*self._command, *arguments]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def execute(self, service: str, *command: str) -> str:
        """Runs a command in a container."""
        return self.compose("exec", "-T", service, *command)

    def up(self) -> None:
        self.compose("up", "--detach", "--no-build", "--wait", timeout_s=START_TIMEOUT_S)

    def down(self) -> None:
        self._channel.close()
        self.compose("down", "--volumes", "--timeout", "20")

    def inspect(self, service: str) -> dict[str, Any]:
        """What Docker knows of a container."""
        done = docker("inspect", self.compose("ps", "--all", "--quiet", service).strip())
        [container] = json.loads(done.stdout)
        return container

    def life_of(self, service: str) -> tuple[str, str]:
        """Changes when a container is made or started again."""
        container = self.inspect(service)
        return container["Id"], container["State"]["StartedAt"]

    def is_healthy(self, service: str) -> bool:
        """Whether its health check has succeeded."""
        return self.inspect(service)["State"]["Health"]["Status"] == "healthy"

    def worker_of(self, service: str) -> int:
        """The process id, in its container, of a worker that has a standby which is ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            status = self.execute(service, "python", "-m", "services.launch", "ctl", "status")
            if re.search(rf"standby of {service}: process \d+ ready", status):
                return int(re.search(rf"^{service} process (\d+)", status, re.MULTILINE)[1])
            assert time.monotonic() < deadline, status
            time.sleep(0.2)

    def scrape(self, target: str) -> dict[str, float]:
        """The metrics at HOST:PORT, asked for in a container beside that one. A sample's labels belong to its name."""
        program = f"import urllib.request; print(urllib.request.urlopen('http://{target}/metrics').read().decode())"
        lines = self.execute("gateway", "python", "-c", program).splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in samples}

    def answers(self, while_they_run: Sequence[str] = ()) -> list[Stream]:
        """Streams of all prompts. `while_they_run` is a command of Docker Compose, which kills something."""
        streams = [Stream() for _ in range(NUM_STREAMS)]
        has_begun = threading.Barrier(NUM_STREAMS + 1)
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            running = [threads.submit(self._read, *each, has_begun) for each in enumerate(streams)]
            has_begun.wait(REQUEST_TIMEOUT_S)
            if while_they_run:
                self.compose(*while_they_run)
                assert all(len(stream.token_ids) < MAX_TOKENS for stream in streams), "a stream had ended before"
            for each in running:
                each.result()
        return streams

    def _read(self, number: int, stream: Stream, has_begun: threading.Barrier) -> None:
        message = request(f"Story number {number}:", MAX_TOKENS, ignore_eos=True)
        for chunk in self.gateway.GenerateStream(message, timeout=REQUEST_TIMEOUT_S, metadata=self.metadata):
            had = len(stream.token_ids)
            stream.token_ids += chunk.token_ids
            stream.arrivals.append(time.monotonic())
            if had < FEW_TOKENS <= len(stream.token_ids):
                has_begun.wait(REQUEST_TIMEOUT_S)


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=DOCKER_TIMEOUT_S, check=False)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The secrets of the gateway, which the containers' user may read."""
    directory = tmp_path_factory.mktemp("secrets")
    authority = Authority(directory, "tests")
    pair = authority.sign("server")
    pair.certificate.rename(directory / "tls.crt")
    pair.key.rename(directory / "tls.key")
    authority.file.rename(directory / "ca.crt")
    (directory / "api-keys.toml").write_text(f'[[keys]]\nname = "team"\nkey = "{API_KEY}"\n')
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


@pytest.fixture(scope="module", params=VARIANTS)
def deployment(
    request: pytest.FixtureRequest, secrets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Running containers. At the end all of them must stop with status 0."""
    if ASKED_FOR not in os.environ:
        pytest.skip("`make containers` runs it")
    if shutil.which("docker") is None or docker("compose", "version").returncode:
        pytest.skip("Docker with Compose is not installed")
    if docker("info").returncode:
        pytest.skip("no Docker engine answers")
    running = Deployment(request.param, *VARIANTS[request.param], secrets)
    try:
        running.up()
        yield running
        running.compose("stop", "--timeout", "20")
        ends = {name: running.inspect(name)["State"]["ExitCode"] for name in (*WORKERS, "gateway")}
        assert ends == dict.fromkeys(ends, 0)
    finally:
        logs = tmp_path_factory.mktemp("logs") / f"{running.name}.log"
        logs.write_text(running.compose("logs", "--no-color"))
        print(f"{running.name}: the logs of all containers are in {logs}")
        running.down()


@pytest.fixture(scope="module")
def undisturbed(deployment: Deployment) -> list[list[int]]:
    """The tokens of answers without kills."""
    return [stream.token_ids for stream in deployment.answers()]


def assert_went_on(streams: Sequence[Stream], undisturbed: Sequence[Sequence[int]], what: str) -> None:
    """Asserts that they have the tokens of undisturbed ones, and prints how long they were silent."""
    assert [stream.token_ids for stream in streams] == [*undisturbed]
    silences = [later - earlier for each in streams for earlier, later in pairwise(each.arrivals)]
    print(f"{what}: longest silence {max(silences):.2f} s")


@pytest.mark.parametrize("service", WORKERS)
def test_the_standby_succeeds_a_killed_worker_and_the_container_stays(
    deployment: Deployment, undisturbed: list[list[int]], service: str
) -> None:
    launcher = f"{service}:{WORKERS[service]}"
    counted = f'twostroke_launch_take_overs_total{{role="{service}"}}'
    before = deployment.scrape(launcher)[counted]
    process, life = deployment.worker_of(service), deployment.life_of(service)
    streams = deployment.answers(["exec", "-T", service, "sh", "-c", f"kill -9 {process}"])
    assert_went_on(streams, undisturbed, f"{deployment.name}: process of {service} killed")
    assert deployment.worker_of(service) != process
    assert deployment.life_of(service) == life
    metrics = deployment.scrape(launcher)
    assert metrics[counted] == before + 1
    assert metrics[f'twostroke_launch_standby_ready{{role="{service}"}}'] == 1


@pytest.mark.parametrize("service", WORKERS)
def test_docker_starts_a_container_again_whose_launcher_dies(
    deployment: Deployment, undisturbed: list[list[int]], service: str
) -> None:
    life = deployment.life_of(service)
    streams = deployment.answers(["exec", "-T", service, "sh", "-c", KILL_MAIN])
    assert_went_on(streams, undisturbed, f"{deployment.name}: launcher of {service} killed")
    assert deployment.life_of(service) != life


@pytest.mark.parametrize("service", WORKERS)
def test_streams_wait_for_a_container_that_was_killed_and_is_started(
    deployment: Deployment, undisturbed: list[list[int]], service: str
) -> None:
    """Docker itself starts no container again that its user has killed."""
    with ThreadPoolExecutor(1) as threads:
        streams = threads.submit(deployment.answers, ["kill", service])
        deadline = time.monotonic() + START_TIMEOUT_S
        while deployment.inspect(service)["State"]["Running"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        deployment.compose("start", service)
        assert_went_on(streams.result(), undisturbed, f"{deployment.name}: container of {service} killed and started")


def test_a_gateway_that_dies_serves_again(deployment: Deployment, undisturbed: list[list[int]]) -> None:
    life = deployment.life_of("gateway")
    with pytest.raises(grpc.RpcError):
        deployment.answers(["exec", "-T", "gateway", "sh", "-c", KILL_MAIN])
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (deployment.is_healthy("gateway") and deployment.life_of("gateway") != life):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [stream.token_ids for stream in deployment.answers()] == undisturbed


def test_prometheus_finds_every_target(deployment: Deployment) -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in jobs for each in job["static_configs"] for target in each["targets"]]
    assert len(targets) == 5
    for target in targets:
        assert any(name.startswith("twostroke_build_info") for name in deployment.scrape(target)), target


def test_a_request_without_a_key_is_refused_where_keys_are_required(deployment: Deployment) -> None:
    call = deployment.gateway.GenerateStream(request("San Francisco is a", 7), timeout=REQUEST_TIMEOUT_S)
    if not deployment.metadata:
        assert sum(len(chunk.token_ids) for chunk in call) == 7
        return
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_host_tier_outlives_the_attention_worker_and_its_container(
    deployment: Deployment, undisturbed: list[list[int]]
) -> None:
    if deployment.name != "host tier":
        assert deployment.scrape("attn_worker:9102")["twostroke_attention_host_kv_bytes"] == 0
        return
    process = deployment.worker_of("attn_worker")
    for kill in (f"kill -9 {process}", KILL_MAIN):
        streams = deployment.answers(["exec", "-T", "attn_worker", "sh", "-c", kill])
        assert_went_on(streams, undisturbed, f"{deployment.name}: attention worker killed by {kill!r}")
        metrics = deployment.scrape("attn_worker:9102")
        assert metrics["twostroke_attention_loaded_tokens_total"] > NUM_STREAMS * 16
