"""The manifests of attention workers that scale: valid, the same by Helm, and the dense worker finds each pod."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from services.common.config import Config, load_config
from services.common.several_attention_workers import check_attention_workers
from tests.deploy.helm import CHART, RELEASE, chart, run_helm
from tests.deploy.kustomize import Manifest, containers_of, rendered
from tests.deploy.test_helm import OF_HELM, comparable
from tests.deploy.test_kubernetes import NEWEST, mounts, read_config

NAME = "twostroke-attention"
PODS = ("twostroke-attention-6d9f-x7k2p", "twostroke-attention-6d9f-q0qq1")
SCALED: dict[str, Any] = {"attentionPods": {"count": 2}}


@pytest.fixture(scope="module")
def overlay() -> dict[str, Manifest]:
    return rendered("attention")


def attention_container(manifests: dict[str, Manifest]) -> Manifest:
    [container] = containers_of(manifests[f"Deployment/{NAME}"]).values()
    return container


def config_of_pod(manifests: dict[str, Manifest], pod: str, directory: Path) -> Config:
    """What the launcher reads in the pod of this name: Kubernetes replaces variables in arguments."""
    container = attention_container(manifests)
    arguments = [each.replace("$(POD_NAME)", pod) for each in container["args"]]
    return read_config(manifests, container | {"args": arguments}, directory)


def words_of_shell(command: list[str], pod: str) -> str:
    shell, flag, line = command
    assert (shell, flag) == ("sh", "-c"), "Kubernetes replaces no variables in the commands of probes and hooks"
    return line.replace("$POD_NAME", pod)


@pytest.mark.parametrize("version", ["1.30", NEWEST])
def test_all_manifests_are_valid(overlay: dict[str, Manifest], version: str) -> None:
    assert {name for name in overlay if "attention" in name} == {f"Deployment/{NAME}", f"NetworkPolicy/{NAME}"}
    for manifest in overlay.values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_dense_worker_finds_the_socket_of_each_pod(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    containers = containers_of(overlay["Deployment/twostroke"])
    assert list(containers) == ["dense-worker", "gateway"], "no pod has an attention worker beside the set"
    dense = read_config(overlay, containers["dense-worker"], tmp_path)
    pods = [config_of_pod(overlay, pod, tmp_path) for pod in PODS]
    for config in (dense, *pods):
        check_attention_workers(config)
    [pattern] = dense.attention.addresses
    addresses = {config.attention.address for config in pods}
    assert len(addresses) == 2 and all(fnmatch.fnmatch(each, pattern) for each in addresses)
    assert all(config.launch.services == ("attn_worker",) for config in pods)
    assert not any(config.attention.host_kv_bytes for config in pods), "its file would outlive the pod"


def test_pods_meet_in_two_directories_of_one_nodes_memory(overlay: dict[str, Manifest]) -> None:
    attention = overlay[f"Deployment/{NAME}"]["spec"]["template"]["spec"]
    dense = overlay["Deployment/twostroke"]["spec"]["template"]["spec"]
    [needed] = attention["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert needed["topologyKey"] == "kubernetes.io/hostname"
    assert needed["labelSelector"]["matchLabels"] == overlay["Deployment/twostroke"]["spec"]["selector"]["matchLabels"]
    [liked] = dense["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = liked["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels == overlay[f"Deployment/{NAME}"]["spec"]["selector"]["matchLabels"]
    found = [
        {each["mountPath"]: (each["name"], each.get("subPathExpr")) for each in container["volumeMounts"]}
        for container in (attention_container(overlay), containers_of(overlay["Deployment/twostroke"])["dense-worker"])
    ]
    for path in ("/run/twostroke", "/dev/shm"):
        assert found[0][path] == found[1][path] and "$(POD_NAMESPACE)" in str(found[0][path]), path
    assert found[0]["/run/twostroke"][1] != found[0]["/dev/shm"][1]
    for pod in (attention, dense):
        volumes = {each["name"]: each for each in pod["volumes"]}
        for name in ("run", "shm"):
            assert volumes[name] == {"name": name, "hostPath": {"path": "/dev/shm", "type": "Directory"}}
    assert overlay["Deployment/twostroke"]["spec"]["strategy"] == {"type": "Recreate"}, "never two dense workers"


def test_probes_and_the_hook_name_the_pods_own_socket(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    container, pod = attention_container(overlay), PODS[0]
    config = config_of_pod(overlay, pod, tmp_path)
    for probe in ("startupProbe", "livenessProbe"):
        line = words_of_shell(container[probe]["exec"]["command"], pod)
        assert f'--address "{config.attention.address}"' in line
    hook = words_of_shell(container["lifecycle"]["preStop"]["exec"]["command"], pod)
    assert f'"{config.attention.address}" --dense {config.dense.address} ' in hook
    [drain_s] = re.findall(r"--timeout (\d+)$", hook)
    grace_s = overlay[f"Deployment/{NAME}"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(drain_s) + config.launch.stop_grace_s < grace_s


def test_the_pod_is_confined_and_reached_for_its_metrics_alone(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    pod = overlay[f"Deployment/{NAME}"]["spec"]["template"]["spec"]
    container = attention_container(overlay)
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]} and pod["securityContext"]["runAsNonRoot"]
    assert set(mounts(container).values()) == {each["name"] for each in pod["volumes"]}
    labels = overlay[f"Deployment/{NAME}"]["spec"]["selector"]["matchLabels"]
    assert labels != overlay["Service/twostroke"]["spec"]["selector"], "no client is sent there"
    policy = overlay[f"NetworkPolicy/{NAME}"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels and policy["egress"] == []
    ports = {each["containerPort"] for each in container["ports"]}
    config = config_of_pod(overlay, PODS[0], tmp_path)
    metrics = (config.attention.metrics_address, config.launch.metrics_address)
    assert ports == {int(str(each).rpartition(":")[2]) for each in metrics}
    assert ports == {each["port"] for each in policy["ingress"][0]["ports"]}


def without_names(value: Any) -> Any:
    """Without the labels that only Helm adds, also among those of selectors."""
    if isinstance(value, dict):
        return {key: without_names(each) for key, each in value.items() if key not in OF_HELM}
    return [without_names(each) for each in value] if isinstance(value, list) else value


def test_the_chart_gives_what_the_overlay_gives(overlay: dict[str, Manifest], tmp_path: Path) -> None:
    ours, theirs = (without_names(comparable(each)) for each in (chart(SCALED), overlay))
    assert ours == theirs
    configs = [config_of_pod(each, PODS[0], tmp_path) for each in (chart(SCALED), overlay)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_autoscalers_count_used_blocks_of_the_set(kind: str) -> None:
    scaling = {"kind": kind, "max": 5, "usedBlocks": 800}
    found = chart({"attentionPods": {"count": 2, "autoscaling": scaling}})
    assert "replicas" not in found[f"Deployment/{NAME}"]["spec"], "Helm would set it back at each upgrade"
    table = (CHART.parents[1] / "prometheus" / "metrics.md").read_text()
    assert "| `twostroke_attention_kv_blocks` | gauge | blocks | `state` |" in table
    if kind == "hpa":
        scaler = found[f"HorizontalPodAutoscaler/{NAME}"]
        kubernetes_validate.validate(scaler, NEWEST, strict=True)
        assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 5)
        pods = scaler["spec"]["metrics"][0]["pods"]
        selector = {"matchLabels": {"state": "used"}}
        assert pods["metric"] == {"name": "twostroke_attention_kv_blocks", "selector": selector}
        assert pods["target"] == {"type": "AverageValue", "averageValue": "800"}
    else:
        spec = found[f"ScaledObject/{NAME}"]["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 5)
        [trigger] = spec["triggers"]
        assert trigger["metadata"]["threshold"] == "800" and 'state="used"' in trigger["metadata"]["query"]
        [pattern] = re.findall(r'pod=~"([^"]+)"', trigger["metadata"]["query"])
        assert re.fullmatch(pattern, PODS[0]) and not re.fullmatch(pattern, "twostroke-7f9c4d-x7k2p")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (["device=cuda", "model.claim=m"], "CUDA shares memory only within a pod: take kubernetes/attention-gpus"),
        (["replicas=2"], "pods of attention workers belong to one dense worker: leave out replicas"),
        (["attentionPods.autoscaling.kind=keda"], "attentionPods.autoscaling needs usedBlocks, such as 80 %"),
        (["attentionPods.autoscaling.kind=hpa", "attentionPods.count=5"], "more than attentionPods.autoscaling.max 4"),
        (["attentionPods.autoscaling.kind=hpa", "attentionPods.count=0"], "needs attentionPods.count, the least"),
    ],
)
def test_what_the_set_cannot_do_is_refused_with_a_sentence(values: list[str], sentence: str) -> None:
    words = [word for value in ("attentionPods.count=2", *values) for word in ("--set", value)]
    result = run_helm("template", RELEASE, str(CHART), *words)
    assert result.returncode != 0 and sentence in result.stderr, result.stderr


def test_on_gpus_the_workers_are_in_one_container(tmp_path: Path) -> None:
    found = rendered("../attention-gpus")
    for manifest in found.values():
        kubernetes_validate.validate(manifest, NEWEST, strict=True)
    [container] = containers_of(found["Deployment/twostroke-ranks"]).values()
    [config_map] = [each for name, each in found.items() if name.startswith("ConfigMap/")]
    file = tmp_path / "config.toml"
    file.write_text(config_map["data"]["config.toml"])
    config = load_config(file, [f"model.path={tmp_path}"])
    check_attention_workers(config)
    num_gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert config.attention.devices == tuple(f"cuda:{index}" for index in range(num_gpus))
    assert config.attention.workers == num_gpus and config.dense.num_ranks == 1 and config.dense.device == "cuda:0"
