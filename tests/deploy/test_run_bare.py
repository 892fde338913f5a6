"""What the images and compose files would run is run here without containers, so that it cannot rot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.mps import has_mps
from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.cluster import REPOSITORY, REQUEST_TIMEOUT_S, request
from tests.deploy.bare_services import BareServices
from tests.deploy.compose_file import COMPOSE_FILES, DEPLOY, config_file, load_compose, mount, seconds
from tests.deploy.dockerfile import Stage, read_stages
from tests.deploy.kustomize import BASE, Manifest, containers_of, manifests_of

GRPC_ADDRESS = "0.0.0.0:50051"
ANSWER = " city in Northern California that is known"
DOCKER_GRACE_S = 10.0  # of `docker stop`, unless it is told otherwise

Service = Mapping[str, Any]


@contextlib.contextmanager
def bare_services(directory: Path, paths: Mapping[str, Path]) -> Iterator[BareServices]:
    """`paths` beside the two that are writable in every container."""
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
    model = load_compose(file)
    services = {name: service for name, service in model["services"].items() if "build" in service}
    model_path = mount(services["gateway"], "/model")
    assert model_path is not None
    with bare_services(tmp_path, {"/model": (DEPLOY / model_path).resolve()}) as bare:
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
        info, text = ask(bare)
        assert (info.model, text) == ("model", ANSWER)
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
    image = read_stages()["cpu"]
    with bare_services(tmp_path, {"/opt/twostroke": REPOSITORY}) as bare:
        bare.add_config("/etc/twostroke/config.toml", BASE / "config.toml")
        containers = containers_of(deployment)
        for name, container in containers.items():
            bare.start(name, [*image.exec_form("ENTRYPOINT"), *container["args"]], environment_of({}, image))
        for probe in ("startupProbe", "readinessProbe"):
            for name, container in containers.items():
                bare.wait_healthy(name, grpc_probe(container[probe]), environment_of({}, image))
        info, text = ask(bare)
        assert (info.model, text) == ("tiny-llama", ANSWER)
        grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for name in reversed(containers):
            assert bare.stop(name, image.last("STOPSIGNAL"), grace_s) == 0, bare.log_file(name).read_text()


def grpc_probe(probe: Manifest) -> list[str]:
    """What asks the same as a kubelet's probe."""
    address, service = f"0.0.0.0:{probe['grpc']['port']}", probe["grpc"].get("service", "")
    return ["python", "-m", "services.probe", "--address", address, "--service", service]


def ask(bare: BareServices) -> tuple[gateway_pb2.ModelInfoResponse, str]:
    """What is served, and what it says."""
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
    """The image's, less what names places in it, and the service's own."""
    inherited = (image or image_of(service)).environment()
    return {key: value for key, value in inherited.items() if key not in ("PATH", "HOME")} | service.get(
        "environment", {}
    )


def wait_healthy(bare: BareServices, name: str, service: Service) -> None:
    if not service["healthcheck"].get("disable"):
        bare.wait_healthy(name, service["healthcheck"]["test"][1:], environment_of(service))


def start_order(services: Mapping[str, Service]) -> list[str]:
    """What a service depends on comes before it."""
    order: list[str] = []

    def add(name: str) -> None:
        for needed in services[name].get("depends_on", []):
            add(needed)
        if name not in order:
            order.append(name)

    for name in services:
        add(name)
    return order
