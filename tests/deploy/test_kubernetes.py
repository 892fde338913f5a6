"""The Kubernetes manifests are valid by Kubernetes' own schemas, and correct in what no schema can check."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.common.config import Config, load_config
from services.rpc.server import LIVENESS
from tests.deploy.dockerfile import read_stages
from tests.deploy.kustomize import (
    BASE,
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    Manifest,
    containers_of,
    manifests_of,
    rendered,
)

NEWEST = "1.37"
OLDEST = {name: "1.30" for name in ("base", *OVERLAYS)} | {"cuda": "1.34"}  # according to the headers of the files
SERVICES = ["attn-worker", "dense-worker", "gateway"]  # containers
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
    assert [each["kind"] for each in manifests] == ["Deployment", "Service", "NetworkPolicy"]
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


@pytest.mark.parametrize(
    "directory",
    [
        BASE,
        *(KUBERNETES / "overlays" / name for name in (*OVERLAYS, "attention")),
        KUBERNETES / "ranks",
        KUBERNETES / "attention-gpus",
        *(KUBERNETES / "components" / name for name in COMPONENTS),
    ],
)
def test_a_kustomization_names_what_exists_and_all_that_exists(directory: Path) -> None:
    content = kustomization(directory)
    patches = content.get("patches", [])
    named = {*content.get("resources", []), *content.get("components", []), *(patch["path"] for patch in patches)}
    named |= {file for generator in content.get("configMapGenerator", []) for file in generator["files"]}
    assert all((directory / name).exists() for name in named)
    assert {path.name for path in directory.iterdir()} == {name for name in named if "/" not in name} | {
        "kustomization.yaml"
    }


@pytest.mark.parametrize("name", ["cuda", "replicas"])
def test_a_patch_changes_only_containers_that_exist(name: str, base: Manifest) -> None:
    [patch] = manifests_of(KUBERNETES / "overlays" / name / "pod.yaml")
    known = {*containers_of(base), "mps"}  # mps.yaml adds it
    assert containers_of(patch).keys() <= known, "Kustomize would add a container without an image"
    assert patch["metadata"]["name"] == base["metadata"]["name"]


def test_services_and_policies_select_the_pods_and_nothing_else(overlay: dict[str, Manifest]) -> None:
    spec = overlay["Deployment/twostroke"]["spec"]
    assert spec["selector"]["matchLabels"] == POD == spec["template"]["metadata"]["labels"]
    selected = {
        "Service": lambda manifest: manifest["spec"]["selector"],
        "NetworkPolicy": lambda manifest: manifest["spec"]["podSelector"]["matchLabels"],
        "PodDisruptionBudget": lambda manifest: manifest["spec"]["selector"]["matchLabels"],
    }
    found = [selected[each["kind"]](each) for each in overlay.values() if each["kind"] in selected]
    assert len(found) >= 2 and all(labels == POD for labels in found)


def test_the_workers_are_reached_only_from_their_own_pod(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    if "NetworkPolicy/twostroke-replicas" in overlay:
        pytest.skip("other pods reach its dense workers: see the next test")
    containers = containers_of(overlay["Deployment/twostroke"])
    for name, container in containers.items():
        if name == "mps":
            continue
        config = read_config(overlay, container, tmp_path)
        addresses = {config.dense.address, config.attention.address, str(config.gateway.local_address)}
        assert all(address.startswith("unix:/run/twostroke/") for address in addresses)
        assert mounts(container)["/run/twostroke"] == "run" and len(addresses) == 3, name
    [policy] = [each["spec"] for each in overlay.values() if each["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and policy["egress"] == [], "the pod connects to nothing"
    [everybody] = policy["ingress"]
    ports = {port["name"]: port["containerPort"] for each in containers.values() for port in each.get("ports", ())}
    assert {each["port"] for each in everybody["ports"]} == set(ports.values())
    metrics = {"metrics", "dense-metrics", "dense-launch", "attn-metrics", "attn-launch"}
    assert set(ports) == {"grpc", "http"} | metrics


def test_replicas_use_mutual_tls_and_reach_nothing_else(tmp_path: Path) -> None:
    overlay = rendered("replicas")
    deployment = overlay["Deployment/twostroke"]
    for name, container in containers_of(deployment).items():
        config = read_config(overlay, container, tmp_path)
        assert config.attention.address.startswith("unix:"), "attention workers serve only their own pod"
        assert config.peers.tls_server_name == "twostroke-dense", name
        files = [config.peers.tls_certificate, config.peers.tls_key, config.peers.tls_ca]
        assert mounts(container)["/run/secrets/peers"] == "peers"
        assert all(str(file).startswith("/run/secrets/peers/") for file in files), name
    assert read_config(overlay, containers_of(deployment)["dense-worker"], tmp_path).dense.address == "0.0.0.0:50052"
    [peers] = [each for each in deployment["spec"]["template"]["spec"]["volumes"] if each["name"] == "peers"]
    assert not peers["secret"].get("optional"), "a pod must not start without its certificates"
    policy = overlay["NetworkPolicy/twostroke-replicas"]["spec"]
    [own] = policy["ingress"]
    replicas, dns = policy["egress"]
    assert own["from"] == replicas["to"] == [{"podSelector": {"matchLabels": POD}}]
    assert own["ports"] == replicas["ports"] == [{"port": 50052}]
    assert {(each["port"], each["protocol"]) for each in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert {"kubernetes.io/metadata.name": "kube-system"} in [
        each["namespaceSelector"]["matchLabels"] for each in dns["to"] if "namespaceSelector" in each
    ]


def test_a_secure_pod_has_its_secrets_or_does_not_start(tmp_path: Path) -> None:
    plain, secure = rendered("cpu"), rendered("secure")
    before, after = (containers_of(each["Deployment/twostroke"])["gateway"] for each in (plain, secure))
    config = read_config(secure, after, tmp_path).gateway
    volumes = {each["name"]: each for each in secure["Deployment/twostroke"]["spec"]["template"]["spec"]["volumes"]}
    for file in (config.api_keys_file, config.tls_certificate, config.tls_key):
        assert file is not None
        secret = volumes[mounts(after)[str(file.parent)]]["secret"]
        assert not secret.get("optional") and secret["defaultMode"] == 0o440, "only the pod's group may read it"
    assert after["readinessProbe"]["httpGet"] == before["readinessProbe"]["httpGet"] | {"scheme": "HTTPS"}
    assert after["livenessProbe"] == before["livenessProbe"], "it uses a socket, without TLS"
    assert before["args"] == after["args"][: len(before["args"])]
    workers = [
        {name: each for name, each in containers_of(overlay["Deployment/twostroke"]).items() if name != "gateway"}
        for overlay in (plain, secure)
    ]
    assert workers[0] == workers[1], "workers must not see the secrets of the gateway"


def test_no_volume_grows_without_a_bound(overlay: dict[str, Manifest]) -> None:
    for volume in overlay["Deployment/twostroke"]["spec"]["template"]["spec"]["volumes"]:
        if "emptyDir" in volume:
            assert "sizeLimit" in volume["emptyDir"], volume["name"]
        else:
            assert volume.keys() & {"configMap", "secret", "persistentVolumeClaim"}, volume["name"]
    for name, container in containers_of(overlay["Deployment/twostroke"]).items():
        assert container["resources"]["limits"]["memory"], name


def test_containers_start_workers_first_and_are_confined(overlay: dict[str, Manifest]) -> None:
    containers = containers_of(overlay["Deployment/twostroke"])
    assert [name for name in containers if name != "mps"] == SERVICES
    assert next(iter(containers)) in ("mps", "attn-worker"), "MPS must start before its clients"
    pod = overlay["Deployment/twostroke"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    for name, container in containers.items():
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        assert container["image"].rpartition(":")[2] in read_stages(), "the Dockerfile builds no such tag"
        assert name == "gateway" or container["restartPolicy"] == "Always", "workers must be sidecars"
        assert "startupProbe" in container and "livenessProbe" in container, name


def test_only_the_workers_mount_the_shared_memory(overlay: dict[str, Manifest]) -> None:
    deployment = overlay["Deployment/twostroke"]
    volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
    mounted = {name: mounts(container) for name, container in containers_of(deployment).items()}
    assert mounted["attn-worker"]["/dev/shm"] == mounted["dense-worker"]["/dev/shm"]
    assert volumes[mounted["dense-worker"]["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "/dev/shm" not in mounted["gateway"]
    assert {volume for each in mounted.values() for volume in each.values()} == set(volumes)


def test_configs_agree_with_ports_and_probes(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    for name in SERVICES:
        container = containers_of(overlay["Deployment/twostroke"])[name]
        config = read_config(overlay, container, tmp_path)
        own = {
            "attn-worker": [
                config.attention.address, config.attention.metrics_address, config.launch.metrics_address
            ],
            "dense-worker": [config.dense.address, config.dense.metrics_address, config.launch.metrics_address],
            "gateway": [config.gateway.address, config.gateway.http_address, config.gateway.metrics_address],
        }[name]
        tcp = [str(address) for address in own if not str(address).startswith("unix:")]
        assert all(address.startswith("0.0.0.0:") for address in tcp), "other pods connect to the pod's address"
        assert {port["containerPort"] for port in container["ports"]} == {int(each.split(":")[1]) for each in tcp}, name
        asked = config.gateway.local_address if name == "gateway" else own[0]
        for probe in ("startupProbe", "livenessProbe"):
            command = container[probe]["exec"]["command"]
            given = dict(pairwise(command))
            assert given["--address"] == str(asked).replace("0.0.0.0", "127.0.0.1"), name
            assert given["--service"] == LIVENESS, "a service without a peer must not be restarted"
            assert int(given["--timeout-ms"]) < 1000 * container[probe]["timeoutSeconds"]
            tls = [given.get(f"--tls-{flag}") for flag in ("client-cert", "client-key", "ca-cert", "server-name")]
            peers = config.peers
            expected = [peers.tls_certificate, peers.tls_key, peers.tls_ca, peers.tls_server_name]
            if name != "gateway":
                assert tls == [None if value is None else str(value) for value in expected], name
    [gateway] = [each for each in containers_of(overlay["Deployment/twostroke"]).values() if "readinessProbe" in each]
    assert gateway["name"] == "gateway", "only the gateway knows whether the pod is ready"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/ready"
    services = [each for each in overlay.values() if each["kind"] == "Service"]
    expected_ports = {50051, 8080, 50052} if "Service/twostroke-dense" in overlay else {50051, 8080}
    assert {port["port"] for each in services for port in each["spec"]["ports"]} == expected_ports


def test_a_launcher_in_the_container_of_each_worker_replaces_it_before_the_container_restarts(
    overlay: dict[str, Manifest], tmp_path: Path
) -> None:
    containers = containers_of(overlay["Deployment/twostroke"])
    for name, role in (("attn-worker", "attn_worker"), ("dense-worker", "dense_worker")):
        config = read_config(overlay, containers[name], tmp_path)
        assert containers[name]["args"][0] == "services.launch" and config.launch.services == (role,)
        assert (config.launch.standby_dense, config.launch.standby_attention) == ("auto", "auto")
        probe = containers[name]["livenessProbe"]
        # A hung worker is silent for as long, and then its successor starts.
        assert probe["periodSeconds"] * probe["failureThreshold"] > 2 * config.watchdog.stall_timeout_s
    path = config.attention.host_kv_path
    assert path is not None and path.parent == Path("/dev/shm") and not path.match("twostroke-*")
    assert config.attention.host_kv_bytes == 0


def test_the_gateway_drains_within_the_grace(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    deployment = overlay["Deployment/twostroke"]
    gateway = containers_of(deployment)["gateway"]
    config = read_config(overlay, gateway, tmp_path)
    wait_s = gateway["lifecycle"]["preStop"]["sleep"]["seconds"] + config.gateway.drain_timeout_s
    workers_s = 2 * 15.0  # as in compose.yaml
    assert wait_s + workers_s < deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


def test_replicas_balance_over_every_pod(tmp_path: Path) -> None:
    overlay = rendered("replicas")
    deployment = overlay["Deployment/twostroke"]
    containers = containers_of(deployment)
    config = read_config(overlay, containers["gateway"], tmp_path)
    [headless] = [each for each in overlay.values() if each.get("spec", {}).get("clusterIP") == "None"]
    [port] = headless["spec"]["ports"]
    assert config.dense.address == f"dns:///{headless['metadata']['name']}:{port['port']}"
    assert headless["spec"]["publishNotReadyAddresses"], "a gateway that is not ready must find a dense worker"
    assert config.gateway.num_dense_streams >= deployment["spec"]["replicas"] > 1


def test_gpu_containers_share_a_claim_and_one_mps(tmp_path: Path) -> None:
    overlay = rendered("cuda")
    pod = overlay["Deployment/twostroke"]["spec"]["template"]["spec"]
    assert pod["shareProcessNamespace"], "CUDA IPC needs a common process namespace"
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


def test_cpu_and_cuda_overlays_differ_only_in_device_and_limits(tmp_path: Path) -> None:
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
    """The names of volumes, by path."""
    return {each["mountPath"]: each["name"] for each in container["volumeMounts"]}


def read_config(overlay: dict[str, Manifest], container: Manifest, directory: Path) -> Config:
    """The config that the container would read, except for the model's path, which has to exist here."""
    [config_map] = [each for each in overlay.values() if each["kind"] == "ConfigMap"]
    args = container["args"]
    file = directory / "config.toml"
    file.write_text(config_map["data"][Path(args[args.index("--config") + 1]).name])
    overrides = [after for word, after in pairwise(args) if word == "--set"]
    return load_config(file, [*overrides, f"model.path={directory}"])
