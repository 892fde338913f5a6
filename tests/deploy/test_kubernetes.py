"""The Kubernetes manifests: valid by Kubernetes' own schemas, and right in what no schema can tell."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.common.config import Config, load_config
from services.common.server import LIVENESS
from tests.deploy.dockerfile import read_stages
from tests.deploy.kustomize import BASE, KUBERNETES, OVERLAYS, Manifest, containers_of, manifests_of, rendered

NEWEST = "1.37"
OLDEST = {"base": "1.30", "cpu": "1.30", "replicas": "1.30", "cuda": "1.34"}  # as the files' headers say
SERVICES = {"attn-worker": "attention", "dense-worker": "dense", "gateway": "gateway"}  # containers' config sections
POD = {"app.kubernetes.io/name": "twostroke"}


@pytest.fixture
def base() -> Manifest:
    [deployment] = manifests_of(BASE / "deployment.yaml")
    return deployment


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> dict[str, Manifest]:
    return rendered(request.param)


def validate(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST["base"], NEWEST])
def test_every_manifest_of_the_base_is_valid_by_itself(version: str) -> None:
    files = [BASE / name for name in kustomization(BASE)["resources"]]
    manifests = [each for file in files for each in manifests_of(file)]
    assert [each["kind"] for each in manifests] == ["Deployment", "Service", "Service", "NetworkPolicy"]
    for manifest in manifests:
        validate(manifest, version)


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_manifest_of_an_overlay_is_valid(name: str) -> None:
    manifests = rendered(name)
    for version in (OLDEST[name], NEWEST):
        for manifest in manifests.values():
            validate(manifest, version)


def test_the_schema_would_find_a_mistake(base: Manifest) -> None:
    base["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        validate(base, NEWEST)


@pytest.mark.parametrize("directory", [BASE, *(KUBERNETES / "overlays" / name for name in OVERLAYS)])
def test_a_kustomization_names_what_exists_and_all_that_exists(directory: Path) -> None:
    content = kustomization(directory)
    patches = content.get("patches", [])
    named = {*content["resources"], *(patch["path"] for patch in patches)}
    named |= {file for generator in content.get("configMapGenerator", []) for file in generator["files"]}
    assert all((directory / name).exists() for name in named)
    assert {path.name for path in directory.iterdir()} == {name for name in named if "/" not in name} | {
        "kustomization.yaml"
    }


@pytest.mark.parametrize("name", ["cuda", "replicas"])
def test_a_patch_changes_containers_that_there_are(name: str, base: Manifest) -> None:
    [patch] = manifests_of(KUBERNETES / "overlays" / name / "pod.yaml")
    known = {*containers_of(base), "mps"}  # mps.yaml adds it
    assert containers_of(patch).keys() <= known, "Kustomize would add a container without an image"
    assert patch["metadata"]["name"] == base["metadata"]["name"]


def test_services_and_policies_select_the_pods_and_nothing_else(base: Manifest) -> None:
    assert base["spec"]["selector"]["matchLabels"] == POD == base["spec"]["template"]["metadata"]["labels"]
    client, dense = manifests_of(BASE / "services.yaml")
    assert client["spec"]["selector"] == POD == dense["spec"]["selector"]
    assert dense["spec"]["clusterIP"] == "None", "its name has to resolve to every pod"
    [policy] = manifests_of(BASE / "network-policy.yaml")
    assert policy["spec"]["podSelector"]["matchLabels"] == POD
    [budget] = manifests_of(KUBERNETES / "overlays" / "replicas" / "disruption-budget.yaml")
    assert budget["spec"]["selector"]["matchLabels"] == POD


def test_the_attention_worker_is_reached_from_its_own_pod_alone(base: Manifest) -> None:
    [policy] = manifests_of(BASE / "network-policy.yaml")
    everybody, own = policy["spec"]["ingress"]
    assert "from" not in everybody and own["from"] == [{"podSelector": {"matchLabels": POD}}]
    ports = {port["name"]: port["containerPort"] for each in containers_of(base).values() for port in each["ports"]}
    assert {each["port"] for each in everybody["ports"]} == {
        ports[name] for name in ("grpc", "http", "dense-metrics", "attn-metrics")
    }
    assert {each["port"] for each in own["ports"]} == {ports["dense"]}
    assert set(ports) - {"grpc", "http", "dense-metrics", "attn-metrics", "dense"} == {"attention"}


def test_containers_start_workers_first_and_are_confined(overlay: dict[str, Manifest]) -> None:
    containers = containers_of(overlay["Deployment/twostroke"])
    assert [name for name in containers if name != "mps"] == list(SERVICES)
    assert next(iter(containers)) in ("mps", "attn-worker"), "MPS comes before its clients"
    pod = overlay["Deployment/twostroke"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    for name, container in containers.items():
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        assert container["image"].rpartition(":")[2] in read_stages(), "a tag that the Dockerfile builds"
        assert name == "gateway" or container["restartPolicy"] == "Always", "a sidecar, restarted on its own"
        assert "startupProbe" in container and "livenessProbe" in container, name


def test_the_workers_share_memory_and_the_gateway_has_none(overlay: dict[str, Manifest]) -> None:
    deployment = overlay["Deployment/twostroke"]
    volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
    mounted = {name: mounts(container) for name, container in containers_of(deployment).items()}
    assert mounted["attn-worker"]["/dev/shm"] == mounted["dense-worker"]["/dev/shm"]
    assert volumes[mounted["dense-worker"]["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "/dev/shm" not in mounted["gateway"]
    assert {volume for each in mounted.values() for volume in each.values()} == set(volumes)


def test_configs_agree_with_ports_and_probes(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    for name, section_name in SERVICES.items():
        container = containers_of(overlay["Deployment/twostroke"])[name]
        config = read_config(overlay, container, tmp_path)
        section = getattr(config, section_name)
        ports = {port["containerPort"] for port in container["ports"]}
        assert section.address.startswith("0.0.0.0:"), "probes and other pods come to the pod's address"
        port = int(section.address.rpartition(":")[2])
        addresses = [section.address, section.http_address if name == "gateway" else section.metrics_address]
        assert ports == {int(address.rpartition(":")[2]) for address in addresses}, name
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["grpc"] == {"port": port, "service": LIVENESS}, "to be without a peer is no death"
        if "readinessProbe" in container:
            assert container["readinessProbe"]["grpc"]["port"] == port
    services = [each for each in overlay.values() if each["kind"] == "Service"]
    assert {port["port"] for each in services for port in each["spec"]["ports"]} == {50051, 8080, 50052}


def test_the_gateway_drains_within_the_grace(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    deployment = overlay["Deployment/twostroke"]
    gateway = containers_of(deployment)["gateway"]
    config = read_config(overlay, gateway, tmp_path)
    wait_s = gateway["lifecycle"]["preStop"]["sleep"]["seconds"] + config.gateway.drain_timeout_s
    workers_s = 2 * 15.0  # as compose.yaml gives them
    assert wait_s + workers_s < deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


def test_replicas_balance_over_every_pod(tmp_path: Path) -> None:
    overlay = rendered("replicas")
    deployment = overlay["Deployment/twostroke"]
    containers = containers_of(deployment)
    config = read_config(overlay, containers["gateway"], tmp_path)
    [headless] = [each for each in overlay.values() if each.get("spec", {}).get("clusterIP") == "None"]
    [port] = headless["spec"]["ports"]
    assert config.dense.address == f"dns:///{headless['metadata']['name']}:{port['port']}"
    assert headless["spec"]["publishNotReadyAddresses"], "a gateway that is not ready has to find a dense worker"
    assert config.gateway.num_dense_streams >= deployment["spec"]["replicas"] > 1
    assert [name for name, each in containers.items() if "readinessProbe" in each] == ["gateway"]


def test_gpu_containers_share_a_claim_and_one_mps(tmp_path: Path) -> None:
    overlay = rendered("cuda")
    pod = overlay["Deployment/twostroke"]["spec"]["template"]["spec"]
    assert pod["shareProcessNamespace"], "CUDA IPC needs to see the other process"
    [claim] = pod["resourceClaims"]
    assert f"ResourceClaimTemplate/{claim['resourceClaimTemplateName']}" in overlay
    containers = containers_of(overlay["Deployment/twostroke"])
    mps = containers["mps"]["args"]
    for name in ("mps", "attn-worker", "dense-worker"):
        container = containers[name]
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert container["resources"]["claims"] == [{"name": claim["name"]}], name
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == mps[mps.index("--directory") + 1] + "/pipe"
        assert mounts(container)["/run/twostroke"] == "run", name
    assert "claims" not in containers["gateway"]["resources"], "the gateway needs no GPU"
    config = read_config(overlay, containers["dense-worker"], tmp_path)
    assert config.dense.device == config.attention.device == "cuda"


def test_overlays_configure_what_the_base_does_and_their_device_alone(tmp_path: Path) -> None:
    def sections(name: str) -> dict[str, Any]:
        overlay = rendered(name)
        config = read_config(overlay, containers_of(overlay["Deployment/twostroke"])["gateway"], tmp_path)
        return {field: getattr(config, field).model_dump() for field in type(config).model_fields}

    cpu, cuda = sections("cpu"), sections("cuda")
    different = {
        f"{section}.{key}" for section, values in cpu.items() for key in values if values[key] != cuda[section][key]
    }
    assert different == {
        "dense.device",
        "attention.device",
        "scheduler.max_num_seqs",
        "scheduler.max_num_batched_tokens",
    }


def kustomization(directory: Path) -> dict[str, Any]:
    return yaml.safe_load((directory / "kustomization.yaml").read_text())


def mounts(container: Manifest) -> dict[str, str]:
    """Volumes by path."""
    return {each["mountPath"]: each["name"] for each in container["volumeMounts"]}


def read_config(overlay: dict[str, Manifest], container: Manifest, directory: Path) -> Config:
    """As the container itself would read it, but for the model's path, which has to exist."""
    [config_map] = [each for each in overlay.values() if each["kind"] == "ConfigMap"]
    args = container["args"]
    file = directory / "config.toml"
    file.write_text(config_map["data"][Path(args[args.index("--config") + 1]).name])
    overrides = [after for word, after in pairwise(args) if word == "--set"]
    return load_config(file, [*overrides, f"model.path={directory}"])
