"""The configuration with which the launcher starts each service."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from services.common.child_options import ChildOptions
from services.common.cli import parse_service_args
from services.common.config import dump_config, load_config
from services.common.errors import ConfigError
from services.launch import service_configs
from services.launch.service_configs import (
    ServiceStart,
    attention_starts,
    attention_worker_config,
    gateway_configs,
    num_gateways,
    rank_starts,
    with_address,
    without_needless_services,
    worker_addresses,
)
from services.launch.switched_address import SwitchedAddress

RUN_DIR = Path("/run/x")


@pytest.mark.parametrize("own", ["attention.workers=2", "attention.elastic=true", "attention.workers=1"])
def test_a_launcher_starts_no_attention_workers_that_its_dense_worker_does_not_look_for(own: str) -> None:
    elsewhere = 'attention.addresses=["unix:/run/x/other.sock"]'
    addresses = worker_addresses(load_config(None), RUN_DIR)
    with pytest.raises(ConfigError, match=r"attention\.addresses is unix:/run/x/other\.sock, of workers that others"):
        service_configs.service_configs(load_config(None, [elsewhere, own]), RUN_DIR, addresses)
    beside = 'attention.addresses=["unix:/run/x/own.sock", "unix:/run/x/other.sock"]'
    config = load_config(None, [beside, "attention.address=unix:/run/x/own.sock"])
    assert len(service_configs.service_configs(config, RUN_DIR, addresses)) == 3


@pytest.mark.parametrize(
    ("own", "named", "is_own"),
    [
        ("localhost:50053", "127.0.0.1:50053", True),
        ("localhost:50053", "127.0.0.1:50054", False),
        ("unix:/run/x/own.sock", "unix:/run/x/../x/own.sock", True),
        ("unix:/run/x/own.sock", "127.0.0.1:50053", False),
        ("127.0.0.1:50053", "no-such-host.invalid:50053", False),
    ],
)
def test_the_own_attention_worker_may_have_another_name_in_the_list(own: str, named: str, is_own: bool) -> None:
    listed = f'attention.addresses=["{named}", "unix:/run/x/other.sock"]'
    config = load_config(None, [listed, f"attention.address={own}"])
    addresses = worker_addresses(load_config(None), RUN_DIR)
    expected = contextlib.nullcontext() if is_own else pytest.raises(ConfigError, match="name a single own one there")
    with expected:
        service_configs.service_configs(config, RUN_DIR, addresses)


def test_gateway_processes_share_ports_and_have_their_own_sockets_and_metrics(tmp_path: Path) -> None:
    config = load_config(None, ["launch.gateway_processes=3", "gateway.metrics_address=127.0.0.1:9100"])
    configs, options = zip(*gateway_configs(config, RUN_DIR, tmp_path), strict=True)
    assert {(each.gateway.address, each.gateway.http_address) for each in configs} == {
        ("127.0.0.1:50051", "127.0.0.1:8080")
    }
    assert all(each.shares_ports for each in options)
    own = [each.gateway.local_address for each in configs]
    assert own == ["unix:/run/x/gateway-0.sock", "unix:/run/x/gateway-1.sock", "unix:/run/x/gateway-2.sock"]
    for_peers = [each.peer_address for each in options]
    assert for_peers == ["unix:/run/x/peer-0.sock", "unix:/run/x/peer-1.sock", "unix:/run/x/peer-2.sock"]
    assert options[1].peer_addresses == (for_peers[0], for_peers[2])
    assert {each.change_lock for each in options} == {tmp_path / "gateways.lock"}, "in memory: a disk may be full"
    assert [each.gateway.metrics_address for each in configs] == [f"127.0.0.1:{port}" for port in (9100, 9110, 9120)]
    file = tmp_path / "config.toml"
    file.write_text(dump_config(configs[1]))
    arguments = ["--config", str(file), "--child", options[1].model_dump_json()]
    assert parse_service_args("gateway", arguments) == (configs[1], options[1]), "the process must read the same values"
    assert [each.process_index for each in options] == [0, 1, 2]
    assert {each.shared_counts for each in options} == {tmp_path / "gateway-counts"}


def test_processes_divide_what_each_alone_can_count(tmp_path: Path) -> None:
    settings = ["gateway.max_connections=100", "gateway.max_grpc_connections=9", "gateway.max_receiving=2"]
    config = load_config(None, ["launch.gateway_processes=3", *settings])
    for each, _ in gateway_configs(config, RUN_DIR, tmp_path):
        section = each.gateway
        assert (section.max_connections, section.max_grpc_connections, section.max_receiving) == (34, 3, 1)
        assert section.max_num_waiting == config.gateway.max_num_waiting, "these are for what all count together"


@pytest.mark.parametrize(
    ("num_cores", "settings", "expected"),
    [
        (2, [], 1),
        (8, [], 2),
        (16, [], 4),
        (128, [], 4),
        (16, ["dense.device=cpu"], 1),
        (16, ["attention.device=cpu"], 1),
        (16, ["gateway.store_responses=true"], 1),
        (16, ["gateway.address=unix:/a.sock"], 1),
        (16, ["gateway.http_address=127.0.0.1:0"], 1),
        (16, ["gateway.metrics_address=127.0.0.1:9100"], 1),
        (16, ["metrics.compat=vllm"], 1),
        (2, ["launch.gateway_processes=3"], 3),
        (16, ['launch.services=["gateway"]', "dense.device=cpu", "attention.device=cpu"], 1),
        (16, ['launch.services=["gateway"]'], 4),
        (16, ['launch.services=["attn_worker", "dense_worker"]'], 0),
    ],
)
def test_auto_takes_a_process_for_four_cores_where_there_can_be_several(
    num_cores: int, settings: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    monkeypatch.setattr(service_configs, "is_on_gpu", lambda device: device != "cpu")
    assert num_gateways(load_config(None, ["launch.gateway_processes=auto", *settings])) == expected


def test_a_single_process_shares_nothing() -> None:
    config = load_config(None)
    assert gateway_configs(config, RUN_DIR) == [(config, ChildOptions(control_address="unix:/run/x/launch.sock"))]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("gateway.address=unix:/a.sock", "gateway.address is unix:/a.sock"),
        ("gateway.http_address=127.0.0.1:0", "gateway.http_address is 127.0.0.1:0"),
        ("gateway.metrics_address=127.0.0.1:65530", "process 1 would have port 65540"),
    ],
)
def test_the_error_names_an_address_that_cannot_be_shared(override: str, words: str, tmp_path: Path) -> None:
    config = load_config(None, ["launch.gateway_processes=2", override])
    with pytest.raises(ConfigError, match=words):
        gateway_configs(config, RUN_DIR, tmp_path)


def addresses_of_others(run_dir: Path) -> dict[tuple[str, int], SwitchedAddress]:
    """Those of all workers of three ranks but the first one's, whose sockets are the user's."""
    own = [f"attention.address=unix:{run_dir}/a.sock", f"dense.address=unix:{run_dir}/d.sock"]
    found = worker_addresses(load_config(None, ["dense.tensor_parallel_size=3", *own]), run_dir)
    first = [found.pop((role, 0)).address for role in ("attn_worker", "dense_worker")]
    assert first == [each.partition("=")[2] for each in own]
    return found


def test_each_rank_has_a_dense_shard_and_an_attention_worker(tmp_path: Path) -> None:
    settings = ["dense.tensor_parallel_size=3", "dense.device=cpu", "attention.device=cpu", "dense.num_threads=2"]
    tier = ("attention.host_kv_bytes=1000000", "attention.host_kv_path=/disk/kv")
    config = load_config(None, [*settings, *tier, "dense.metrics_address=127.0.0.1:9101"])
    own = {"attn_worker": "unix:/run/x/a.sock-1", "dense_worker": "unix:/run/x/d.sock-1"}
    first = [
        ServiceStart(role, role, with_address(config, role, address), ChildOptions()) for role, address in own.items()
    ]
    addresses = addresses_of_others(tmp_path)
    starts = {each.name: each for each in rank_starts(config, addresses, first)}
    assert list(starts) == [f"{role}{suffix}" for role in own for suffix in ("", "-1", "-2")]
    leading = starts["dense_worker"]
    assert leading.config.dense.address == own["dense_worker"]
    assert leading.config.dense.metrics_address == "127.0.0.1:9101"
    for rank in (1, 2):
        shard, attention = starts[f"dense_worker-{rank}"], starts[f"attn_worker-{rank}"]
        assert shard.options.rank == attention.options.rank == rank
        assert leading.options.shard_addresses[rank - 1] == addresses["dense_worker", rank].address
        assert leading.options.rank_attention_addresses[rank - 1] == addresses["attn_worker", rank].address
        assert shard.config.dense.address.startswith(f"unix:{tmp_path}/dense_worker-{rank}.sock-")
        assert attention.config.attention.address.startswith(f"unix:{tmp_path}/attn_worker-{rank}.sock-")
        assert shard.config.dense.metrics_address is None, "a port is one process's"
        assert shard.config.dense.num_threads == 2
        assert attention.config.attention.host_kv_path == Path(f"/disk/kv-{rank}"), "each cache has copies of its own"
    assert starts["attn_worker"].config.attention.host_kv_path == Path("/disk/kv")
    assert len({each.config.dense.address for each in starts.values() if each.role == "dense_worker"}) == 3


@pytest.mark.parametrize("services", [["dense_worker", "gateway"], ["attn_worker"]], ids=", ".join)
def test_ranks_without_all_services_are_refused_before_anything_starts(services: list[str], tmp_path: Path) -> None:
    config = load_config(None, ["dense.tensor_parallel_size=2", f"launch.services={json.dumps(services)}"])
    message = f"^dense.tensor_parallel_size is 2, but launch.services is {', '.join(services)}: one launcher must start"
    with pytest.raises(ConfigError, match=message):
        service_configs.service_configs(config, tmp_path, worker_addresses(config, tmp_path))


def test_ranks_have_no_device_of_a_number() -> None:
    config = load_config(None, ["dense.tensor_parallel_size=2", "dense.device=cuda:1"])
    with pytest.raises(ConfigError, match=r"dense.device is 'cuda:1' and there are 2 ranks: set it to auto"):
        rank_starts(config, {}, [])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ('attention.devices=["cuda:0", "cuda:1"]', {"cuda:0": [36.0, 36.0], "cuda:1": [72.0]}),
        ("attention.device=cuda:1", {"cuda:1": [24.0, 24.0, 24.0]}),
    ],
)
def test_attention_workers_are_dealt_to_gpus_and_divide_the_memory_of_each(
    setting: str, expected: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_configs, "is_on_gpu", lambda device: device != "cpu")
    config = load_config(None, ["attention.workers=3", setting])
    first = [ServiceStart("attn_worker", "attn_worker", config, ChildOptions())]
    free_gb, taken_gb = dict.fromkeys(expected, 80.0), {device: list[float]() for device in expected}
    for start in attention_starts(config, RUN_DIR, first):  # each takes its fraction of what those before have left
        section = start.config.attention
        taken_gb[section.device].append(free_gb[section.device] * section.kv_cache_memory_fraction)
        free_gb[section.device] -= taken_gb[section.device][-1]
    assert taken_gb == {device: pytest.approx(each) for device, each in expected.items()}


def test_an_attention_worker_that_is_added_is_on_the_next_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_configs, "is_on_gpu", lambda device: device != "cpu")
    settings = ["attention.elastic=true", 'attention.devices=["cuda:0", "cuda:1"]']
    config = load_config(None, [*settings, "attention.kv_cache_memory_fraction=1"])
    added = attention_worker_config(config, 1, "unix:/run/x/attn_worker-1.sock").attention
    assert (added.device, added.kv_cache_memory_fraction) == ("cuda:1", 1.0)


def test_the_error_names_the_key_of_an_attention_worker_without_a_port() -> None:
    config = load_config(None, ["attention.workers=2", "attention.metrics_address=127.0.0.1:65530"])
    first = [ServiceStart("attn_worker", "attn_worker", config, ChildOptions())]
    with pytest.raises(ConfigError, match=r"^attention.metrics_address is 127.0.0.1:65530: process 1 would have"):
        attention_starts(config, RUN_DIR, first)


@pytest.mark.parametrize("key", ["dense.tensor_parallel_size", "dense.pipeline_parallel_size"])
def test_an_encoder_has_no_ranks(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=f"^{key} is 2, but the model is an encoder: supported is 1$"):
        without_needless_services(load_config(None, [f"model.path={tmp_path}", f"{key}=2"]))


def test_the_first_rank_alone_tells_of_blocks(tmp_path: Path) -> None:
    endpoints = ["attention.kv_events=tcp://*:5557", "attention.kv_events_replay=tcp://*:5558"]
    config = load_config(None, [*endpoints, "dense.tensor_parallel_size=3"])
    first = ServiceStart("attn_worker", "attn_worker", config, ChildOptions())
    sections = [each.config.attention for each in rank_starts(config, addresses_of_others(tmp_path), [first])]
    assert [each.kv_events for each in sections] == ["tcp://*:5557", None, None]
    assert [each.kv_events_replay for each in sections] == ["tcp://*:5558", None, None]
