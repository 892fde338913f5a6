"""The Helm chart, rendered by Helm, gives what the overlays of Kustomize give, and refuses impossible values."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.helm import CHART, RELEASE, chart, run_helm
from tests.deploy.kustomize import Manifest, containers_of, rendered
from tests.deploy.test_kubernetes import NEWEST, read_config

# The values of the chart that give each overlay.
VALUES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {"device": "cuda", "model": {"claim": "twostroke-model"}},
    "replicas": {"replicas": 3, "peers": {"secret": "twostroke-peers"}},
    "secure": {"apiKeys": {"secret": "twostroke-api-keys"}, "tls": {"secret": "twostroke-tls"}},
}
AUTOSCALED = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
OF_HELM = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"}


def bare(value: Any) -> Any:
    """Without what only Helm adds, and with lists that have names in the order of these."""
    if isinstance(value, dict):
        kept = {key: bare(each) for key, each in value.items() if key not in OF_HELM}
        kept.pop("imagePullPolicy", None)
        if kept.get("annotations", {}).keys() == {"checksum/config"}:
            del kept["annotations"]
        return kept
    if isinstance(value, list):
        items = [bare(each) for each in value]
        if items and all(isinstance(each, dict) and "mountPath" in each for each in items):
            return sorted(items, key=lambda each: each["mountPath"])
        if items and all(isinstance(each, dict) and "containerPort" in each for each in items):
            return sorted(items, key=lambda each: each["containerPort"])
        return items
    return value


def comparable(manifests: dict[str, Manifest]) -> dict[str, Manifest]:
    found = {}
    for name, manifest in copy.deepcopy(manifests).items():
        if manifest["kind"] == "ConfigMap":
            continue  # compared as configs
        text = bare(manifest)
        if manifest["kind"] != "Deployment" or "labels" in text["metadata"]:
            text["metadata"].pop("labels", None)
        if manifest["kind"] == "Deployment":
            pod = text["spec"]["template"]["spec"]
            pod["volumes"] = {each["name"]: each for each in pod["volumes"]}
            pod["volumes"]["config"]["configMap"]["name"] = "config"  # Kustomize's ends with a hash
            for container in containers_of(text).values():
                container["args"] = split_settings(container["args"])
                claims = container["resources"].pop("claims", None)
                container["resources"]["claims"] = claims
        found[name] = text
    return found


def split_settings(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The settings may come in any order."""
    settings = [after for word, after in pairwise(arguments) if word == "--set"]
    return [word for word in arguments if word not in settings and word != "--set"], sorted(settings)


def test_the_chart_passes_helms_own_checks() -> None:
    for values in VALUES:
        checked = run_helm("lint", "--strict", str(CHART))
        assert checked.returncode == 0, f"{values}: {checked.stdout}{checked.stderr}"


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_gives_what_the_overlay_gives(name: str, tmp_path: Path) -> None:
    ours, theirs = chart(VALUES[name]), rendered(name)
    assert comparable(ours) == comparable(theirs)
    for container in ("attn-worker", "dense-worker", "gateway"):
        configs = [
            read_config(each, containers_of(each[f"Deployment/{RELEASE}"])[container], tmp_path)
            for each in (ours, theirs)
        ]
        assert configs[0] == configs[1], container


@pytest.mark.parametrize("values", [*VALUES.values(), {"autoscaling": {"kind": "hpa"}}])
def test_every_manifest_of_the_chart_is_valid(values: dict[str, Any]) -> None:
    for manifest in chart(values).values():
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def test_two_releases_do_not_select_each_others_pods() -> None:
    found = chart({"peers": {"secret": "peers"}})
    pod = {"app.kubernetes.io/name": "twostroke", "app.kubernetes.io/instance": RELEASE}
    assert found[f"Deployment/{RELEASE}"]["spec"]["template"]["metadata"]["labels"] == pod
    for manifest in found.values():
        spec = manifest.get("spec", {})
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if selector is not None:
                assert selector.get("matchLabels", selector) == pod, manifest["kind"]


def test_settings_reach_all_services_with_their_types(tmp_path: Path) -> None:
    settings = {
        "attention.host_kv_bytes": 536870912,
        "metrics.compat": "vllm",
        "attention.kv_cache_memory_fraction": 0.5,
        "gateway.resume": True,
        "gateway.served_model_names": ["one", "two"],
    }
    found = chart({"settings": settings})
    for name, container in containers_of(found[f"Deployment/{RELEASE}"]).items():
        config = read_config(found, container, tmp_path)
        assert config.attention.host_kv_bytes == 536870912 and config.metrics.compat == "vllm", name
        assert config.gateway.resume and config.gateway.served_model_names == ("one", "two")
        assert config.attention.kv_cache_memory_fraction == 0.5


def test_another_config_rolls_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = chart(values)[f"Deployment/{RELEASE}"]["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) != checksum({"model": {"path": "/elsewhere"}})


@pytest.mark.parametrize("kind", AUTOSCALED)
def test_autoscalers_look_at_a_metric_that_the_gateway_has(kind: str) -> None:
    found = chart({"autoscaling": {"kind": kind, "min": 2, "max": 5, "waiting": 3}})
    assert "replicas" not in found[f"Deployment/{RELEASE}"]["spec"], "Helm would set it back at each upgrade"
    spec = found[f"{AUTOSCALED[kind]}/{RELEASE}"]["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": RELEASE}
    [metric] = re.findall(r"twostroke_gateway_\w+", str(spec))
    table = (CHART.parents[1] / "prometheus" / "metrics.md").read_text()
    assert f"| `{metric}` | gauge |" in table
    if kind == "hpa":
        assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
        assert spec["metrics"][0]["pods"]["target"] == {"type": "AverageValue", "averageValue": "3"}
    else:
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 5)
        [trigger] = spec["triggers"]
        assert trigger["type"] == "prometheus" and trigger["metadata"]["threshold"] == "3"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (["device=gpu"], r"device.*: value must be one of 'cpu', 'cuda'"),
        (["device=cuda"], r"device cuda needs model\.claim, a PersistentVolumeClaim"),
        (["replica=2"], r"additional properties 'replica' not allowed"),
        (["peers.secret=s", "replicas=9"], r"peers\.streams is 4, less than the 9 pods that there may be"),
        (["autoscaling.kind=hpa", "autoscaling.min=5"], r"autoscaling\.min is 5, more than autoscaling\.max 4"),
    ],
)
def test_impossible_values_are_refused_with_a_sentence(values: list[str], sentence: str) -> None:
    result = run_helm("template", RELEASE, str(CHART), *(word for value in values for word in ("--set", value)))
    assert result.returncode != 0 and re.search(sentence, result.stderr), result.stderr
