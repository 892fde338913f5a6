"""The compose files are valid and tidy, and correct in what no schema can check."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft202012Validator
from yamllint import linter
from yamllint.config import YamlLintConfig

from services.common.config import Config, load_config
from services.gateway.http.envelope import HostCheck
from services.gateway.resources.open_files import RESERVE, share_files
from tests.deploy.compose_file import (
    COMPOSE_FILES,
    DEPLOY,
    LOCKS,
    config_file,
    interpolate,
    load_compose,
    mount,
    seconds,
)
from tests.deploy.dockerfile import read_stages

ALL_FILES = [*COMPOSE_FILES, *LOCKS, "compose.observe.yaml"]
OWN = ["gateway", "dense_worker", "attn_worker"]
GPU_SERVICES = ["mps", "attn_worker", "dense_worker"]


@pytest.fixture(params=COMPOSE_FILES)
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load_compose(request.param)


@pytest.fixture
def cuda() -> dict[str, Any]:
    return load_compose("compose.cuda.yaml")


@pytest.mark.parametrize("file", ALL_FILES)
def test_a_file_follows_the_specification(file: str) -> None:
    document = yaml.safe_load((DEPLOY / file).read_text())
    validator = Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
    assert [error.message for error in validator.iter_errors(document)] == []
    # The schema checks only the structure; this parser also checks units, durations, ports and mounts.
    filled_in = yaml.safe_load(interpolate((DEPLOY / file).read_text(), {}))
    assert set(compose_spec.PyCompose.from_json(json.dumps(filled_in)).service_names()) == document["services"].keys()


def test_the_schema_would_find_a_mistake() -> None:
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    document["services"]["gateway"]["stop_grace_perid"] = "1s"
    assert list(Draft202012Validator(get_builtin_schema("vendor.compose-spec")).iter_errors(document))


@pytest.mark.parametrize("pattern", ["*.yaml", "kubernetes/**/*.yaml"])
def test_yamllint_has_no_complaint(pattern: str) -> None:
    config = YamlLintConfig(file=str(Path(__file__).with_name("yamllint.yaml")))
    for path in DEPLOY.glob(pattern):
        assert [str(problem) for problem in linter.run(path.read_text(), config)] == [], path


def test_no_variable_is_required_and_everything_mentioned_exists(model: dict[str, Any]) -> None:
    assert "$" not in json.dumps(model), "a variable without a default"
    for service in model["services"].values():
        assert set(service.get("depends_on", [])) <= model["services"].keys()
        for volume in service.get("volumes", []):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            if "profiles" not in service:
                assert source in model["volumes"] or (DEPLOY / source).exists(), source
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
            assert service["build"]["target"] in read_stages()
            assert service["image"].endswith(service["build"]["target"])
    for config in model["configs"].values():
        assert (DEPLOY / config["file"]).is_file()


def test_the_model_is_the_embedded_one_unless_another_is_named() -> None:
    for variables, expected in (({}, "./models/tiny-llama"), ({"TWOSTROKE_MODEL": "/data/qwen"}, "/data/qwen")):
        for file in COMPOSE_FILES:
            services = load_compose(file, variables)["services"]
            assert {mount(services[name], "/model") for name in OWN} == {expected}


def test_every_service_is_confined_restarted_and_watched(model: dict[str, Any]) -> None:
    for name, service in model["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["user"].split(":")[0]) > 0, name
        assert service["restart"] == "unless-stopped", name
        assert "stop_grace_period" in service and "healthcheck" in service, name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "the default must publish ports only on this machine"
        assert compose_bytes(service["mem_limit"]) <= 16 * 2**30 and 0 < int(service["pids_limit"]) <= 1024, name


def test_a_container_may_open_the_files_it_needs_but_no_more_than_a_modest_host_allows(
    model: dict[str, Any], tmp_path: Path
) -> None:
    limits = {name: int(model["services"][name]["ulimits"]["nofile"]) for name in OWN}
    gateway = read_config(model, model["services"]["gateway"], tmp_path).gateway
    connections = (gateway.max_connections, gateway.max_grpc_connections)
    assert share_files(limits["gateway"] - RESERVE - gateway.num_dense_streams, *connections) == connections
    # Docker starts no container with a higher limit than its own hard limit, which some hosts keep below 65536.
    assert max(limits.values()) <= 16384


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_a_variable_sets_the_limit_of_open_files(file: str) -> None:
    services = load_compose(file, {"TWOSTROKE_NOFILE": "4000"})["services"]
    assert {int(each["ulimits"]["nofile"]) for each in services.values() if "ulimits" in each} == {4000}


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_only_the_gateway_is_published_to_other_machines(file: str) -> None:
    model = load_compose(file, {"TWOSTROKE_BIND": "0.0.0.0"})
    published = {
        (name, port.rpartition(":")[2])
        for name, service in model["services"].items()
        for port in service.get("ports", [])
        if not port.startswith("127.0.0.1:")
    }
    assert published == {("gateway", "50051"), ("gateway", "8080")}, "only the gateway may be published"
    grafana = model["services"]["grafana"]["environment"]
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    moved = load_compose(file, {"TWOSTROKE_OBSERVE_BIND": "10.0.0.1"})["services"]
    assert {moved[name]["ports"][0].split(":")[0] for name in ("prometheus", "grafana")} == {"10.0.0.1"}


@pytest.mark.parametrize("beside", [None, *LOCKS])
@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_a_gateway_that_is_published_locally_serves_only_local_names(
    file: str, beside: str | None, tmp_path: Path
) -> None:
    """The gateway cannot see from inside its container that its port is published only at a loopback address."""

    def served(host: str, **variables: str) -> bool:
        model = load_compose(file, variables, beside)
        section = read_config(model, model["services"]["gateway"], tmp_path).gateway
        return HostCheck(section).refuse([(b"host", host.encode())]) is None

    for host in ("127.0.0.1:8080", "localhost:8080", "[::1]:8080", "gateway:8080"):
        assert served(host), "the gateway must serve its local names"
    assert not served("evil.example:8080")
    for address in ("0.0.0.0", "192.168.1.5"):
        assert served("llm.example", TWOSTROKE_BIND=address) and served(address, TWOSTROKE_BIND=address)
    named = {"TWOSTROKE_HOSTS": '["llm.example"]'}
    assert served("llm.example", **named) and served("localhost", **named)
    for address in ({}, {"TWOSTROKE_BIND": "0.0.0.0"}):
        assert not served("evil.example", **named, **address)


def test_only_services_with_clients_are_on_an_external_network(model: dict[str, Any]) -> None:
    assert model["networks"] == {"inside": {"internal": True}}
    outside = {name for name, each in model["services"].items() if "default" in each.get("networks", ["default"])}
    assert outside == {"gateway", "prometheus", "grafana"}
    assert "inside" in model["services"]["prometheus"]["networks"], "Prometheus must reach the workers"


def test_no_volume_grows_without_a_bound() -> None:
    for name, volume in load_compose("compose.yaml")["volumes"].items():
        if name not in ("prometheus", "grafana"):
            assert "size=" in volume["driver_opts"]["o"], name
    for file in COMPOSE_FILES:
        services = load_compose(file)["services"]
        assert any(word.startswith("--storage.tsdb.retention.size=") for word in services["prometheus"]["command"])
        for service in services.values():
            assert all("size=" in mount for mount in service.get("tmpfs", []))


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_secrets_change_nothing_else_in_the_config_of_the_gateway(file: str, lock: str, tmp_path: Path) -> None:
    plain, locked = load_compose(file), load_compose(file, beside=lock)
    gateway = locked["services"]["gateway"]
    mounted = {each["target"]: each["source"] for each in gateway["secrets"]}
    assert set(mounted.values()) == locked["secrets"].keys()
    assert all(secret["file"].startswith("./secrets/") for secret in locked["secrets"].values())
    before, after = (read_config(each, each["services"]["gateway"], tmp_path) for each in (plain, locked))
    assert after.gateway.api_keys_file is not None and before.gateway.api_keys_file is None
    named = (after.gateway.api_keys_file, after.gateway.tls_certificate, after.gateway.tls_key)
    assert {str(path) for path in named if path is not None} == set(mounted)
    unlocked = {"api_keys_file": None, "tls_certificate": None, "tls_key": None}
    assert after.gateway.model_copy(update=unlocked) == before.gateway and after.model == before.model
    variables = {name: f"/keys/{name}" for name in variables_of(lock) - variables_of(file)}
    files = {secret["file"] for secret in load_compose(file, variables, lock)["secrets"].values()}
    assert files == set(variables.values()), "a variable can move each secret file"


def test_secrets_are_not_committed() -> None:
    assert "deploy/secrets/" in (DEPLOY.parent / ".gitignore").read_text().splitlines()


def test_the_shared_memory_outlives_each_worker(model: dict[str, Any]) -> None:
    workers = [model["services"][name] for name in ("attn_worker", "dense_worker")]
    if all("ipc" in worker for worker in workers):  # /dev/shm belongs to the IPC namespace
        [holder] = {worker["ipc"] for worker in workers}
        name = holder.removeprefix("service:")
        assert name not in OWN and model["services"][name]["ipc"] == "shareable"
        assert "shm_size" in model["services"][name]
    else:
        [volume] = {mount(worker, "/dev/shm") for worker in workers}
        options = model["volumes"][volume]["driver_opts"]
        assert options["type"] == "tmpfs" and "size=1g" in options["o"]
        assert f"uid={workers[0]['user'].split(':')[0]}" in options["o"].split(",")
    assert len({worker["user"] for worker in workers}) == 1, "only their owner can read the regions"


def test_services_start_workers_first_and_so_stop_the_gateway_first(model: dict[str, Any]) -> None:
    services = model["services"]
    assert "dense_worker" in services["gateway"]["depends_on"]
    assert "attn_worker" in services["dense_worker"]["depends_on"]
    graces = {name: seconds(services[name]["stop_grace_period"]) for name in OWN}
    assert graces["gateway"] > max(graces["dense_worker"], graces["attn_worker"])


def test_configs_are_valid_and_agree_with_what_is_mounted_and_probed(model: dict[str, Any], tmp_path: Path) -> None:
    for name in OWN:
        service = model["services"][name]
        config = read_config(model, service, tmp_path)
        module = "services.gateway" if name == "gateway" else "services.launch"
        assert service["command"][:3] == [module, "--config", config_file(model, service)[1]]
        assert name == "gateway" or config.launch.services == (name,)
        local = {
            "gateway": config.gateway.local_address,
            "dense_worker": config.dense.address,
            "attn_worker": config.attention.address,
        }
        probe = service["healthcheck"]["test"]
        assert probe[:4] == ["CMD", "python", "-m", "services.rpc.probe"]
        probed = probe[probe.index("--address") + 1]
        assert probed == local[name], "the probe must use the local socket, which needs no certificate"
        assert mount(service, "/run/twostroke") == "run", "the directory of the sockets"
        for port in service.get("ports", []):
            assert port.rpartition(":")[2] in (config.gateway.address + config.gateway.http_address)
    assert str(read_config(model, model["services"]["dense_worker"], tmp_path).dense.plan_dir).startswith(
        "/var/cache/twostroke"
    )


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_each_worker_has_a_standby_unless_a_variable_says_that_there_are_none(file: str, tmp_path: Path) -> None:
    for variables, expected in (({}, "auto"), ({"TWOSTROKE_STANDBY": "off"}, "off")):
        model = load_compose(file, variables)
        dense, attention = (
            read_config(model, model["services"][name], tmp_path) for name in ("dense_worker", "attn_worker")
        )
        assert (dense.launch.standby_dense, attention.launch.standby_attention) == (expected, expected)
        assert all(each.dense.address.startswith("unix:") for each in (dense, attention)), "so that it can be switched"


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_a_variable_adds_a_host_tier_that_outlives_the_container(file: str, tmp_path: Path) -> None:
    for variables, expected in (({}, 0), ({"TWOSTROKE_HOST_KV_BYTES": "536870912"}, 2**29)):
        model = load_compose(file, variables)
        config = read_config(model, model["services"]["attn_worker"], tmp_path)
        path = config.attention.host_kv_path
        assert config.attention.host_kv_bytes == expected and path is not None
        assert path.parent == Path("/dev/shm"), "which outlives each worker, see the test above"
        assert not path.match("twostroke-*"), "workers remove such files as those of dead processes"


def test_gpu_services_share_one_gpu_one_pod_and_one_mps_daemon(cuda: dict[str, Any]) -> None:
    services = cuda["services"]
    for name in GPU_SERVICES:
        service = services[name]
        assert (service["ipc"], service["pid"]) == ("service:pod", "service:pod"), name
        [device] = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["device_ids"] == ["0"] and "gpu" in device["capabilities"]
        directory = service["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
        mps = services["mps"]["command"]
        assert directory == mps[mps.index("--directory") + 1] + "/pipe"
        assert directory.startswith("/run/twostroke/") and mount(service, "/run/twostroke") == "run"
        assert service["ulimits"]["memlock"] == -1 and service["ulimits"]["stack"] == 64 * 2**20
        if name != "mps":
            assert service["depends_on"]["mps"] == {"condition": "service_healthy"}
    assert services["pod"]["entrypoint"] == shlex.split("sleep infinity") and services["pod"]["init"]
    assert "deploy" not in services["gateway"], "the gateway needs no GPU"


def test_prometheus_and_grafana_start_only_with_their_profile(model: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles") for name, service in model["services"].items()}
    assert {name for name, profile in profiles.items() if profile} == {"prometheus", "grafana"}
    assert {profiles["prometheus"][0], profiles["grafana"][0]} == {"observe"}


def compose_bytes(amount: str) -> int:
    """The bytes of an amount such as 64m or 2g."""
    return int(amount[:-1]) * {"m": 2**20, "g": 2**30}[amount[-1]]


def variables_of(file: str) -> set[str]:
    return set(re.findall(r"\$\{(\w+)", (DEPLOY / file).read_text()))


def read_config(model: dict[str, Any], service: dict[str, Any], directory: Path) -> Config:
    """The config that the service would read, except for the model's path, which has to exist here."""
    file, _ = config_file(model, service)
    copy = directory / file.name
    copy.write_text(file.read_text())
    overrides = [after for word, after in pairwise(service["command"]) if word == "--set"]
    return load_config(copy, [*overrides, f"model.path={directory}"])
