"""Runs the commands of the images, compose files and pods without containers, so that errors in them are found."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from services.launch.mps import has_mps
from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.deploy.bare_services import BareServices
from tests.deploy.compose_file import COMPOSE_FILES, DEPLOY, config_file, load_compose, mount, seconds
from tests.deploy.dockerfile import Stage, read_stages
from tests.deploy.kustomize import BASE, Manifest, containers_of, manifests_of, rendered
from tests.support.certificates import Authority
from tests.support.cluster import (
    REPOSITORY,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    children_of,
    is_alive,
    request,
)

GRPC_ADDRESS = "0.0.0.0:50051"
HTTP_ADDRESS = "0.0.0.0:8080"
API_KEY = "a-key-of-sixteen-characters-and-more"
ANSWER = " city in Northern California that is known"
WORKERS = ("dense_worker", "attn_worker")
DOCKER_GRACE_S = 10.0  # the default of `docker stop`

Service = Mapping[str, Any]


@contextlib.contextmanager
def bare_services(directory: Path, paths: Mapping[str, Path]) -> Iterator[BareServices]:
    """Adds to `paths` the two directories that are writable in every container."""
    writable = {"/run/twostroke": directory / "run", "/var/cache/twostroke": directory / "cache"}
    for path in writable.values():
        path.mkdir()
    bare = BareServices(directory, writable | dict(paths))
    try:
        yield bare
    finally:
        bare.kill()


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_the_services_of_a_compose_file_serve_and_stop_within_their_grace(file: str, tmp_path: Path) -> None:
    if "cuda" in file and not has_mps():
        pytest.skip("no NVIDIA GPU with MPS")
    with running_compose(load_compose(file), tmp_path) as bare:
        info, text = ask(bare)
        assert (info.model, text) == ("model", ANSWER)


def test_workers_that_die_are_succeeded_by_the_standbys_in_their_containers(tmp_path: Path) -> None:
    with running_compose(load_compose("compose.yaml"), tmp_path) as bare:
        expected = "".join(chunk.text for chunk in stream(bare))
        for name in WORKERS:
            wait_logged(bare, name, "standby ready")
            launcher = bare.processes[name]
            [worker] = [pid for pid in children_of(launcher.pid) if '"standby":null' in command_line(pid)]
            text = ""
            for chunk in stream(bare):
                if not text:
                    os.kill(worker, signal.SIGKILL)
                text += chunk.text
            assert text == expected
            assert launcher.poll() is None and not is_alive(worker), "its container must not restart"
            assert bare.log_file(name).read_text().count("the standby takes over") == 1


def wait_logged(bare: BareServices, name: str, event: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while event not in bare.log_file(name).read_text():
        assert time.monotonic() < deadline, bare.log_file(name).read_text()
        time.sleep(0.1)


def stream(bare: BareServices) -> Iterator[gateway_pb2.GenerateChunk]:
    """A long answer."""
    with grpc.insecure_channel(bare.local(GRPC_ADDRESS)) as channel:
        message = request("San Francisco is a", 150, ignore_eos=True)
        yield from gateway_pb2_grpc.GatewayStub(channel).GenerateStream(message, timeout=REQUEST_TIMEOUT_S)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_a_compose_file_with_keys_and_tls_requires_a_key(tmp_path: Path) -> None:
    authority = put_secrets(tmp_path / "secrets")
    model = load_compose("compose.yaml", beside="compose.tls.yaml")
    with running_compose(model, tmp_path, {"/run/secrets": tmp_path / "secrets"}) as bare:
        assert_requires_a_key(bare, authority)


@contextlib.contextmanager
def running_compose(model: Service, directory: Path, paths: Mapping[str, Path] | None = None) -> Iterator[BareServices]:
    """Runs the services of a compose file, all healthy. At the end they must stop within their grace period."""
    services = {name: service for name, service in model["services"].items() if "build" in service}
    model_path = mount(services["gateway"], "/model")
    assert model_path is not None
    with bare_services(directory, {"/model": (DEPLOY / model_path).resolve(), **(paths or {})}) as bare:
        source, target = config_file(model, services["gateway"])
        bare.add_config(target, source)
        healthy_first = {
            needed
            for service in services.values()
            if isinstance(needs := service.get("depends_on"), dict)
            for needed, how in needs.items()
            if how["condition"] == "service_healthy"
        }
        order = start_order(services)
        for name in order:
            bare.start(name, command_of(services[name]), environment_of(services[name]))
            if name in healthy_first:
                wait_healthy(bare, name, services[name])
        for name in order:
            wait_healthy(bare, name, services[name])
        yield bare
        for name in reversed(order):
            grace_s = seconds(services[name]["stop_grace_period"])
            status = bare.stop(name, image_of(services[name]).last("STOPSIGNAL"), grace_s)
            if command_of(services[name])[0] == "python":
                assert status == 0, bare.log_file(name).read_text()


def test_an_image_without_arguments_serves_the_embedded_model(tmp_path: Path) -> None:
    image = read_stages()["cpu"]
    with bare_services(tmp_path, {}) as bare:
        bare.start("image", [*image.exec_form("ENTRYPOINT"), *image.exec_form("CMD")], environment_of({}, image))
        bare.wait_healthy("image", image.exec_form("HEALTHCHECK"), environment_of({}, image))
        info, text = ask(bare)
        assert (info.model, text) == ("tiny-llama", ANSWER)
        assert bare.stop("image", image.last("STOPSIGNAL"), DOCKER_GRACE_S) == 0


def test_the_containers_of_the_kubernetes_pod_serve(tmp_path: Path) -> None:
    [deployment] = manifests_of(BASE / "deployment.yaml")
    with running_pod(deployment, tmp_path) as bare:
        wait_ready(bare, httpx2.Client(timeout=REQUEST_TIMEOUT_S))
        info, text = ask(bare)
        assert (info.model, text) == ("tiny-llama", ANSWER)


def test_a_secure_kubernetes_pod_requires_a_key(tmp_path: Path) -> None:
    authority = put_secrets(tmp_path / "secrets")
    secrets = {f"/run/secrets/{name}": tmp_path / "secrets" for name in ("api-keys", "tls")}
    with running_pod(rendered("secure")["Deployment/twostroke"], tmp_path, secrets) as bare:
        assert_requires_a_key(bare, authority)


def test_pods_with_mutual_tls_serve(tmp_path: Path) -> None:
    put_secrets(tmp_path / "secrets", "twostroke-dense")
    # The name of all dense workers leads to the only one here.
    paths = {"/run/secrets/peers": tmp_path / "secrets", "dns:///twostroke-dense:50052": Path("ipv4:0.0.0.0:50052")}
    with running_pod(rendered("replicas")["Deployment/twostroke"], tmp_path, paths) as bare:
        wait_ready(bare, httpx2.Client(timeout=REQUEST_TIMEOUT_S))
        assert ask(bare)[1] == ANSWER
        with grpc.insecure_channel(bare.local("0.0.0.0:50052")) as channel, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=1.0)


@contextlib.contextmanager
def running_pod(
    deployment: Manifest, directory: Path, paths: Mapping[str, Path] | None = None
) -> Iterator[BareServices]:
    """Runs the containers of one pod; all probes succeed. At the end they must stop within the grace period."""
    image = read_stages()["cpu"]
    with bare_services(directory, {"/opt/twostroke": REPOSITORY, **(paths or {})}) as bare:
        bare.add_config("/etc/twostroke/config.toml", BASE / "config.toml")
        containers = containers_of(deployment)
        for name, container in containers.items():
            bare.start(name, [*image.exec_form("ENTRYPOINT"), *container["args"]], environment_of({}, image))
        for probe in ("startupProbe", "livenessProbe"):
            for name, container in containers.items():
                bare.wait_healthy(name, container[probe]["exec"]["command"], environment_of({}, image))
        yield bare
        grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for name in reversed(containers):
            assert bare.stop(name, image.last("STOPSIGNAL"), grace_s) == 0, bare.log_file(name).read_text()


def wait_ready(bare: BareServices, client: httpx2.Client, scheme: str = "http") -> None:
    """Waits until the readiness probe of the gateway succeeds."""
    [gateway] = manifests_of(BASE / "deployment.yaml")[0]["spec"]["template"]["spec"]["containers"]
    url = f"{scheme}://{bare.local(HTTP_ADDRESS)}{gateway['readinessProbe']['httpGet']['path']}"
    deadline = time.monotonic() + START_TIMEOUT_S
    while (answer := client.get(url)).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def put_secrets(directory: Path, *hosts: str) -> Authority:
    """Writes files with the names of the secrets. A new authority signs the certificate."""
    directory.mkdir()
    authority = Authority(directory, "tests")
    pair = authority.sign("server", *hosts)
    pair.certificate.rename(directory / "tls.crt")
    pair.key.rename(directory / "tls.key")
    (directory / "ca.crt").write_bytes(authority.file.read_bytes())
    (directory / "api-keys.toml").write_text(f'[[keys]]\nname = "team"\nkey = "{API_KEY}"\n')
    return authority


def assert_requires_a_key(bare: BareServices, authority: Authority) -> None:
    """Checks over gRPC and HTTP, both with TLS, that a request needs an API key."""
    address, chunks = bare.local(GRPC_ADDRESS), request("San Francisco is a", 7)
    trusted = grpc.ssl_channel_credentials(authority.file.read_bytes())
    with httpx2.Client(verify=ssl.create_default_context(cafile=authority.file), timeout=REQUEST_TIMEOUT_S) as client:
        wait_ready(bare, client, "https")
        url = f"https://{bare.local(HTTP_ADDRESS)}/v1/completions"
        body = {"model": "model", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
        assert client.post(url, json=body).status_code == 401
        models = client.get(url.replace("completions", "models"), headers={"authorization": f"Bearer {API_KEY}"})
        body["model"] = models.json()["data"][0]["id"]
        answer = client.post(url, json=body, headers={"authorization": f"Bearer {API_KEY}"})
        assert answer.json()["choices"][0]["text"] == ANSWER
    with grpc.secure_channel(address, trusted) as channel:
        gateway = gateway_pb2_grpc.GatewayStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(gateway.GenerateStream(chunks, timeout=REQUEST_TIMEOUT_S))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        key = (("authorization", f"Bearer {API_KEY}"),)
        answers = gateway.GenerateStream(chunks, timeout=REQUEST_TIMEOUT_S, metadata=key)
        assert "".join(chunk.text for chunk in answers) == ANSWER
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as plain:
        gateway_pb2_grpc.GatewayStub(channel).ModelInfo(gateway_pb2.ModelInfoRequest(), timeout=REQUEST_TIMEOUT_S)
    assert plain.value.code() is grpc.StatusCode.UNAVAILABLE


def ask(bare: BareServices) -> tuple[gateway_pb2.ModelInfoResponse, str]:
    """The served model, and its answer."""
    with grpc.insecure_channel(bare.local(GRPC_ADDRESS)) as channel:
        gateway = gateway_pb2_grpc.GatewayStub(channel)
        info = gateway.ModelInfo(gateway_pb2.ModelInfoRequest(), timeout=REQUEST_TIMEOUT_S)
        chunks = gateway.GenerateStream(request("San Francisco is a", 7), timeout=REQUEST_TIMEOUT_S)
        return info, "".join(chunk.text for chunk in chunks)


def image_of(service: Service) -> Stage:
    return read_stages()[service["build"]["target"]]


def command_of(service: Service) -> list[str]:
    return [*service.get("entrypoint", image_of(service).exec_form("ENTRYPOINT")), *service["command"]]


def environment_of(service: Service, image: Stage | None = None) -> dict[str, str]:
    """The environment of the image and the service, without the image's own paths."""
    inherited = (image or image_of(service)).environment()
    return {key: value for key, value in inherited.items() if key not in ("PATH", "HOME")} | service.get(
        "environment", {}
    )


def wait_healthy(bare: BareServices, name: str, service: Service) -> None:
    if not service["healthcheck"].get("disable"):
        bare.wait_healthy(name, service["healthcheck"]["test"][1:], environment_of(service))


def start_order(services: Mapping[str, Service]) -> list[str]:
    """The names of the services, each after those that it depends on."""
    order: list[str] = []

    def add(name: str) -> None:
        for needed in services[name].get("depends_on", []):
            add(needed)
        if name not in order:
            order.append(name)

    for name in services:
        add(name)
    return order
