"""The config of each of the launcher's services: the common config with a few own values.

Several gateways serve at the same ports; the kernel distributes connections among them (SO_REUSEPORT). Each has its own
Unix socket, at which the launcher reaches it, another one for its peers alone, and its own port for metrics. What they
may take together they count together, except connections, of which each has its part.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from services.common.addresses import MAX_PORT, is_same_address
from services.common.child_options import ChildOptions
from services.common.config import AttentionSection, Config, add_api_key, api_keys_of_environment
from services.common.encoders.encoder_types import is_encoder
from services.common.errors import ConfigError
from services.common.process import available_cores
from services.common.several_attention_workers import device_of_worker, devices_of_workers
from services.common.several_ranks import check_ranks_config
from services.common.shared_counts import SharedCounts
from services.launch.addresses import control_address
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE, SECTIONS, worker_name
from services.launch.gpus import is_on_gpu
from services.launch.switched_address import SwitchedAddress

CORES_PER_GATEWAY, MOST_GATEWAYS = 4, 4  # if their number is up to us
# Limits of what a process alone can know. The kernel gives each process about as many connections.
DIVIDED_LIMITS = ("max_connections", "max_grpc_connections", "max_receiving")
COUNTS_NAME = "gateway-counts"
OWN_KEY_NAME = "twostroke-launcher"
CHANGE_LOCK_NAME = "gateways.lock"
METRICS_PORT_STEP = 10  # 9100, 9110, ...: other services usually have the ports between


class ServiceStart(NamedTuple):
    """The parameters of a `Child`."""

    name: str  # of its files
    role: str
    config: Config
    options: ChildOptions


def without_needless_services(config: Config) -> Config:
    """The config without the attention worker if the model is an encoder, which has no past.

    Raises `ModelError`, and `ConfigError` for ranks, which an encoder has not.
    """
    if not is_encoder(config.model.path):
        return config
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (count := getattr(config.dense, key)) > 1:
            raise ConfigError(f"dense.{key} is {count}, but the model is an encoder: supported is 1")
    services = tuple(name for name in config.launch.services if name != ATTENTION_ROLE)
    return config.with_values("launch", services=services)


def num_gateways(config: Config) -> int:
    """How many gateway processes this launcher starts; with "auto" as many as the cores allow."""
    section, services = config.gateway, config.launch.services
    if "gateway" not in services:
        return 0
    if config.launch.gateway_processes != "auto":
        return config.launch.gateway_processes
    if not all(is_on_gpu(getattr(config, name).device) for name in SECTIONS.values()):
        return 1  # a worker needs the cores, whichever launcher starts it
    if section.store_responses or section.max_session_bytes:
        return 1
    if not _is_shareable(section.address) or not _is_shareable(section.http_address):
        return 1
    if section.metrics_address is not None or config.metrics.compat != "none":
        return 1  # who watches one process there would not see the others
    return min(MOST_GATEWAYS, max(1, available_cores() // CORES_PER_GATEWAY))


def service_configs(
    config: Config,
    run_dir: Path,
    addresses: Mapping[tuple[str, int], SwitchedAddress],
    counts_dir: Path | None = None,
    listeners: Sequence[int] = (),
) -> list[ServiceStart]:
    """The services of `launch.services`, in starting order. Others look for a worker at its switched address.

    addresses: of the workers among them, by role and rank, in starting order. counts_dir: a directory in shared
    memory; several gateways need one. listeners: descriptors of the sockets that systemd passes, one for each gateway,
    or none.
    """
    _check_attention_addresses(config)
    starts = [
        ServiceStart(role, role, with_address(config, role, address.new_address()), ChildOptions())
        for (role, rank), address in addresses.items()
        if rank == 0
    ]
    if config.dense.num_ranks > 1:
        starts = rank_starts(config, addresses, starts)
    if (ATTENTION_ROLE, 0) in addresses and (config.attention.workers > 1 or config.attention.elastic):
        starts = attention_starts(config, run_dir, starts)
    if "gateway" in config.launch.services:
        gateways = gateway_configs(config, run_dir, counts_dir)
        if listeners:
            gateways = [
                (own, options.model_copy(update={"http_listener": listener}))
                for (own, options), listener in zip(gateways, listeners, strict=True)
            ]
        names = ["gateway"] if len(gateways) == 1 else [f"gateway-{index}" for index in range(len(gateways))]
        starts += [ServiceStart(name, "gateway", *each) for name, each in zip(names, gateways, strict=True)]
    return starts


def _check_attention_addresses(config: Config) -> None:
    """Raises `ConfigError` if the dense worker would not look for the attention workers of the same launcher."""
    attention, services = config.attention, config.launch.services
    if not attention.addresses or not {ATTENTION_ROLE, DENSE_ROLE} <= {*services}:
        return
    has_own = any(is_same_address(attention.address, each) for each in attention.addresses)
    if attention.workers > 1 or attention.elastic or not has_own:
        raise ConfigError(
            f"attention.addresses is {', '.join(attention.addresses)}, of workers that others start, but this launcher"
            f" starts attention workers of its own: take {ATTENTION_ROLE} out of launch.services, leave"
            f" attention.addresses out, or name a single own one there, too, which is at {attention.address}"
        )


def worker_addresses(config: Config, run_dir: Path) -> dict[tuple[str, int], SwitchedAddress]:
    """Where the others look for each worker of `launch.services`, by role and rank, in starting order."""
    roles = {role: section for role, section in SECTIONS.items() if role in config.launch.services}
    addresses = {(role, 0): SwitchedAddress(getattr(config, section).address) for role, section in roles.items()}
    for rank in range(1, config.dense.num_ranks):
        for role in roles:
            addresses[role, rank] = SwitchedAddress(f"unix:{run_dir}/{worker_name(role, rank)}.sock")
    return addresses


def rank_starts(
    config: Config, addresses: Mapping[tuple[str, int], SwitchedAddress], of_first: Sequence[ServiceStart]
) -> list[ServiceStart]:
    """The workers of all ranks; `of_first`: those of the first one. `addresses`: by role and rank.

    Each rank has a GPU, if there are any. On a CPU the ranks share its cores. The first one tells of blocks: all caches
    have the same plans.
    """
    check_ranks_config(config)
    count = config.dense.num_ranks
    for name in SECTIONS.values():
        if getattr(config, name).device not in ("auto", "cuda", "cpu"):
            raise ConfigError(
                f"{name}.device is {getattr(config, name).device!r} and there are {count} ranks: set it to auto, for"
                " ranks on the first GPU and those after it, or to cpu"
            )
    others = {
        key: tuple(addresses[role, rank].address for rank in range(1, count))
        for key, role in (("rank_attention_addresses", ATTENTION_ROLE), ("shard_addresses", DENSE_ROLE))
    }
    starts = []
    for start in of_first:
        leads = others if start.role == DENSE_ROLE else {}
        first = start._replace(config=_of_rank(start.config, 0), options=ChildOptions(**leads))
        starts.append(first)
        for rank in range(1, count):
            silent = _of_rank(config, rank).with_values("attention", kv_events=None, kv_events_replay=None)
            own = with_address(silent, start.role, addresses[start.role, rank].new_address())
            starts.append(ServiceStart(worker_name(start.role, rank), start.role, own, ChildOptions(rank=rank)))
    return starts


def attention_starts(config: Config, run_dir: Path, of_first: Sequence[ServiceStart]) -> list[ServiceStart]:
    """The workers, with all attention workers; `of_first`: with the first one. The dense worker is told all addresses.

    On a CPU they share its cores. On a GPU each gets its part of the memory for KV caches, in turn.
    """
    sockets = [f"unix:{run_dir}/{ATTENTION_ROLE}-{index}.sock" for index in range(1, config.attention.workers)]
    starts = []
    for start in of_first:
        if start.role != ATTENTION_ROLE:
            addresses = (config.attention.address, *sockets)
            starts.append(start._replace(config=start.config.with_values("attention", addresses=addresses)))
            continue
        starts.append(start._replace(config=_of_attention_worker(start.config, 0)))
        for index, address in enumerate(sockets, start=1):
            own = attention_worker_config(config, index, address)
            name = f"{ATTENTION_ROLE}-{index}"
            starts.append(ServiceStart(name, start.role, own, ChildOptions(attention_index=index)))
    return starts


def attention_worker_config(config: Config, index: int, address: str) -> Config:
    """The config of one of several attention workers; `index`: one that is started beside them later has a higher one.
    """
    return with_address(_of_attention_worker(config, index), ATTENTION_ROLE, address)


def _of_attention_worker(config: Config, index: int) -> Config:
    """The config of one of several attention workers: its part of the cores and memory, and what it has alone."""
    section, device = config.attention, device_of_worker(config, index)
    metrics_address = _metrics_address("attention.metrics_address", section.metrics_address, index)
    changes: dict[str, object] = {"device": device, "metrics_address": metrics_address}
    changes["host_kv_path"] = _own_host_kv_path(section, index)
    if is_on_gpu(section.device):
        if index < section.workers:
            all_devices = devices_of_workers(config)
            # Of the memory of its GPU that is free before the first one attaches.
            part = section.kv_cache_memory_fraction / all_devices.count(device)
            changes["kv_cache_memory_fraction"] = part / (1 - all_devices[:index].count(device) * part)
    elif section.num_threads is None:
        changes["num_threads"] = max(1, available_cores() // (1 + section.workers))
    return config.with_values("attention", **changes)


def _own_host_kv_path(section: AttentionSection, index: int) -> Path | None:
    """The file of the host tier of one of several attention workers, or of a rank's."""
    path = section.host_kv_path
    return path if path is None or index == 0 else path.with_name(f"{path.name}-{index}")


def _of_rank(config: Config, rank: int) -> Config:
    """The config of a rank's workers: its own GPU, host tier and part of the cores; the first one's have metrics."""
    of_rank = config
    for name in SECTIONS.values():
        section = getattr(config, name)
        changes: dict[str, object] = {} if rank == 0 else {"metrics_address": None}
        if is_on_gpu(section.device):
            changes["device"] = f"cuda:{rank}"
        elif section.num_threads is None:
            changes["num_threads"] = max(1, available_cores() // (2 * config.dense.num_ranks))
        if name == SECTIONS[ATTENTION_ROLE]:
            changes["host_kv_path"] = _own_host_kv_path(config.attention, rank)
        of_rank = of_rank.with_values(name, **changes)
    return of_rank


def with_address(config: Config, role: str, address: str) -> Config:
    """The config of a worker with its own address; other services have the address of the present worker."""
    return config.with_values(SECTIONS[role], address=address)


def gateway_configs(
    config: Config, run_dir: Path, counts_dir: Path | None = None
) -> list[tuple[Config, ChildOptions]]:
    """The config and the options of every gateway process. Makes the file in `counts_dir` for what several count.

    Raises `ConfigError` for an address that only one process can have, and `CapacityError` without room for the file.
    """
    section, num_processes = config.gateway, num_gateways(config)
    if num_processes == 1:
        return [(config, ChildOptions(control_address=control_address(run_dir)))]
    assert counts_dir is not None, "several gateways need it"
    for key in ("address", "http_address"):
        _check_shareable(f"gateway.{key}", getattr(section, key), num_processes)
    own = [f"unix:{run_dir}/gateway-{index}.sock" for index in range(num_processes)]
    own[0] = section.local_address or own[0]
    peers = [f"unix:{run_dir}/peer-{index}.sock" for index in range(num_processes)]
    counts = counts_dir / COUNTS_NAME
    SharedCounts.make(counts, num_processes)
    divided = {key: -(-getattr(section, key) // num_processes) for key in DIVIDED_LIMITS}
    pairs = []
    for index, address in enumerate(own):
        metrics_address = _metrics_address("gateway.metrics_address", section.metrics_address, index)
        changes = {"local_address": address, "metrics_address": metrics_address}
        changes |= divided
        pairs.append(
            (
                config.with_values("gateway", **changes),
                ChildOptions(
                    shares_ports=True,
                    peer_address=peers[index],
                    peer_addresses=tuple(other for other in peers if other != peers[index]),
                    shared_counts=counts,
                    process_index=index,
                    change_lock=counts_dir / CHANGE_LOCK_NAME,  # there a full disk keeps nobody from it
                    control_address=control_address(run_dir),
                ),
            )
        )
    return pairs


def _check_shareable(key: str, address: str, num_processes: int) -> None:
    if not _is_shareable(address):
        raise ConfigError(
            f"launch.gateway_processes is {num_processes} and {key} is {address}: several processes can share a TCP "
            "port with a number, and nothing else"
        )


def _is_shareable(address: str) -> bool:
    return not address.startswith("unix:") and not address.endswith(":0")


def _metrics_address(key: str, first: str | None, index: int) -> str | None:
    if first is None:
        return None
    host, _, port = first.rpartition(":")
    own_port = int(port) + METRICS_PORT_STEP * index if int(port) else 0
    if own_port > MAX_PORT:
        raise ConfigError(
            f"{key} is {first}: process {index} would have port {own_port}, the last is {MAX_PORT}"
        )
    return f"{host}:{own_port}"


def make_own_key(config: Config) -> str | None:
    """Adds a key for the gateways that this process will start and returns it; None if they require none."""
    if config.gateway.api_keys_file is None and not api_keys_of_environment():
        return None
    api_key = secrets.token_urlsafe(32)
    add_api_key(OWN_KEY_NAME, api_key)
    return api_key
