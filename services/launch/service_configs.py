"""The config of each of the launcher's services: the common config with a few own values.

Several gateways serve at the same ports; the kernel distributes connections among them (SO_REUSEPORT). Each has its own
Unix socket, at which the launcher reaches it, another one for its peers alone, and its own port for metrics.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from services.common.addresses import MAX_PORT
from services.common.child_options import ChildOptions
from services.common.config import Config, add_api_key, api_keys_of_environment
from services.common.errors import ConfigError
from services.launch.addresses import control_address
from services.launch.child import SECTIONS
from services.launch.switched_address import SwitchedAddress

OWN_KEY_NAME = "twostroke-launcher"
CHANGE_LOCK_NAME = "gateways.lock"
HOST_KV_NAME = "host-kv"
METRICS_PORT_STEP = 10  # 9100, 9110, ...: other services usually have the ports between


class ServiceStart(NamedTuple):
    """The parameters of a `Child`."""

    name: str  # of its files
    role: str
    config: Config
    options: ChildOptions


def service_configs(config: Config, run_dir: Path, addresses: Mapping[str, SwitchedAddress]) -> list[ServiceStart]:
    """The services of `launch.services`, in starting order. Others look for a worker at its switched address.

    addresses: of the workers among them, by role, in starting order.
    """
    starts = [
        ServiceStart(role, role, with_address(config, role, address.new_address()), ChildOptions())
        for role, address in addresses.items()
    ]
    if "gateway" in config.launch.services:
        gateways = gateway_configs(config, run_dir)
        names = ["gateway"] if len(gateways) == 1 else [f"gateway-{index}" for index in range(len(gateways))]
        starts += [ServiceStart(name, "gateway", *each) for name, each in zip(names, gateways, strict=True)]
    return starts


def with_address(config: Config, role: str, address: str) -> Config:
    """The config of a worker with its own address; other services have the address of the present worker."""
    name = SECTIONS[role]
    return config.model_copy(update={name: getattr(config, name).model_copy(update={"address": address})})


def with_host_kv_path(config: Config, memory_dir: Path) -> Config:
    """The config of an attention worker whose host tier lies in a directory that outlives it, but not the launcher."""
    attention = config.attention.model_copy(update={"host_kv_path": memory_dir / HOST_KV_NAME})
    return config.model_copy(update={"attention": attention})


def gateway_configs(config: Config, run_dir: Path) -> list[tuple[Config, ChildOptions]]:
    """The config and the options of every gateway process.

    Raises `ConfigError` for an address that only one process can have.
    """
    section, num_processes = config.gateway, config.launch.gateway_processes
    if num_processes == 1:
        return [(config, ChildOptions(control_address=control_address(run_dir)))]
    for key in ("address", "http_address"):
        _check_shareable(f"gateway.{key}", getattr(section, key), num_processes)
    own = [f"unix:{run_dir}/gateway-{index}.sock" for index in range(num_processes)]
    own[0] = section.local_address or own[0]
    peers = [f"unix:{run_dir}/peer-{index}.sock" for index in range(num_processes)]
    pairs = []
    for index, address in enumerate(own):
        changes = {"local_address": address, "metrics_address": _metrics_address(section.metrics_address, index)}
        pairs.append(
            (
                config.model_copy(update={"gateway": section.model_copy(update=changes)}),
                ChildOptions(
                    shares_ports=True,
                    peer_address=peers[index],
                    peer_addresses=tuple(other for other in peers if other != peers[index]),
                    change_lock=run_dir / CHANGE_LOCK_NAME,
                    control_address=control_address(run_dir),
                ),
            )
        )
    return pairs


def _check_shareable(key: str, address: str, num_processes: int) -> None:
    if address.startswith("unix:") or address.endswith(":0"):
        raise ConfigError(
            f"launch.gateway_processes is {num_processes} and {key} is {address}: several processes can share a TCP "
            "port with a number, and nothing else"
        )


def _metrics_address(first: str | None, index: int) -> str | None:
    if first is None:
        return None
    host, _, port = first.rpartition(":")
    own_port = int(port) + METRICS_PORT_STEP * index if int(port) else 0
    if own_port > MAX_PORT:
        raise ConfigError(
            f"gateway.metrics_address is {first}: process {index} would have port {own_port}, the last is {MAX_PORT}"
        )
    return f"{host}:{own_port}"


def make_own_key(config: Config) -> str | None:
    """Adds a key for the gateways that this process will start and returns it; None if they require none."""
    if config.gateway.api_keys_file is None and not api_keys_of_environment():
        return None
    api_key = secrets.token_urlsafe(32)
    add_api_key(OWN_KEY_NAME, api_key)
    return api_key
