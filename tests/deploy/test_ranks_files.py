"""The files for several GPUs of one machine: valid, confined, and with as many ranks as GPUs."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft202012Validator

from services.common.config import Config, load_config
from services.common.model_config import load_model_config
from services.common.rank import Rank
from services.common.several_ranks import check_ranks
from tests.deploy.compose_file import DEPLOY, interpolate, load_compose

FILE, DIRECTORY = "compose.ranks.yaml", DEPLOY / "kubernetes" / "ranks"
RENDER_TIMEOUT_S = 60.0


def config_of(file: Path, words: list[str]) -> Config:
    """What the process with these arguments reads, with the embedded model."""
    overrides = [after for word, after in pairwise(words) if word == "--set"]
    return load_config(file, [*overrides, f"model.path={DEPLOY}/models/tiny-llama"])


def check_addresses(config: Config) -> None:
    assert {str(config.gateway.address), str(config.gateway.http_address)} == {"0.0.0.0:50051", "0.0.0.0:8080"}
    for address in (config.dense.address, config.attention.address):
        assert str(address).startswith("127.0.0.1:"), "workers are reached from the container alone"


def test_the_compose_file_follows_the_specification() -> None:
    document = yaml.safe_load((DEPLOY / FILE).read_text())
    validator = Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
    assert [error.message for error in validator.iter_errors(document)] == []
    filled_in = yaml.safe_load(interpolate((DEPLOY / FILE).read_text(), {}))
    assert compose_spec.PyCompose.from_json(json.dumps(filled_in)).service_names() == ["server"]


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, Rank(0, 2)),
        ({"TWOSTROKE_GPUS": "4"}, Rank(0, 4)),
        ({"TWOSTROKE_GPUS": "3", "TWOSTROKE_SPLIT": "pipeline"}, Rank(0, 3, is_stage=True)),
    ],
)
def test_a_container_has_as_many_gpus_as_ranks(variables: dict[str, str], ranks: Rank) -> None:
    service = load_compose(FILE, variables)["services"]["server"]
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    config = config_of(DEPLOY / "config" / "ranks.toml", service["command"])
    assert int(device["count"]) == config.dense.num_ranks
    assert Rank.of(config.dense, 0) == ranks
    check_ranks(config, load_model_config(config.model.path))
    check_addresses(config)


def test_the_container_is_confined_and_bounded() -> None:
    model = load_compose(FILE)
    service = model["services"]["server"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "10001:10001"
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all("size=" in each for each in service["tmpfs"])
    assert all(each.startswith("127.0.0.1:") for each in service["ports"])
    config = config_of(DEPLOY / "config" / "ranks.toml", service["command"])
    assert service["healthcheck"]["test"][-1] == str(config.gateway.local_address)
    assert "$" not in json.dumps(model), "a variable without a default"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """What `kubectl apply -k` would send, by kind."""
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(command[0]) is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    result = subprocess.run(
        [*command, str(DIRECTORY)], capture_output=True, text=True, timeout=RENDER_TIMEOUT_S, check=True
    )
    return {each["kind"]: each for each in yaml.safe_load_all(result.stdout)}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_all_manifests_are_valid(manifests: dict[str, Any], version: str) -> None:
    assert manifests.keys() == {"ConfigMap", "Deployment", "Service", "NetworkPolicy"}
    for each in manifests.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_pod_has_as_many_gpus_as_ranks(manifests: dict[str, Any], tmp_path: Path) -> None:
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    file = tmp_path / "config.toml"
    file.write_text(manifests["ConfigMap"]["data"]["config.toml"])
    config = config_of(file, container["args"])
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.dense.num_ranks == 2
    check_addresses(config)
    ports = {each["containerPort"] for each in container["ports"]}
    assert ports == {each["port"] for each in manifests["NetworkPolicy"]["spec"]["ingress"][0]["ports"]}
    sections = (config.gateway, config.dense, config.attention, config.launch)
    metrics = {int(str(section.metrics_address).rpartition(":")[2]) for section in sections}
    assert ports == {50051, 8080, *metrics}
    for probe in ("startupProbe", "livenessProbe"):
        command = container[probe]["exec"]["command"]
        assert command[command.index("--address") + 1] == str(config.gateway.local_address)


def test_the_pod_is_confined_and_bounded(manifests: dict[str, Any]) -> None:
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]} and pod["securityContext"]["runAsNonRoot"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
    assert all("sizeLimit" in each["emptyDir"] for each in pod["volumes"] if "emptyDir" in each)
    labels = manifests["Deployment"]["spec"]["selector"]["matchLabels"]
    assert labels == manifests["Service"]["spec"]["selector"]
    assert labels == manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
