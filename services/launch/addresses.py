"""The addresses of the services: Unix sockets in the launcher's directory unless the config gives addresses."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.addresses import MAX_PORT
from services.common.config import Config, api_keys_of_environment
from services.common.errors import ConfigError
from services.gateway.access.api_keys import read_api_keys
from services.launch.child import SECTIONS
from services.rpc.bindable import check_bindable, check_socket_free
from services.rpc.client import read_peer_tls
from services.rpc.tls import tls_files

# Who meets at the address of a section of the config: the service that listens, and those that call it.
MEETING_AT = {"attention": {"attn_worker", "dense_worker"}, "dense": {"dense_worker", "gateway"}}


def place_sockets(config: Config, run_dir: Path, *, is_private: bool) -> Config:
    """Sets Unix sockets for workers without a configured address, and for the gateway if only the launcher calls it.

    The gateway always has a socket for the launcher, which needs no certificate there and where no clients interfere.
    Raises `ConfigError` if a service of another launcher, or of none, would not find one of this launcher.
    """
    services = config.launch.services
    for name, roles in MEETING_AT.items():
        is_elsewhere = not roles.isdisjoint(services) and not roles.issubset(services)
        is_named = name == "attention" and bool(config.attention.addresses)
        if is_elsewhere and not is_named and "address" not in getattr(config, name).model_fields_set:
            raise ConfigError(
                f"launch.services is {', '.join(services)}: set {name}.address, at which "
                f"{' and '.join(sorted(roles))} meet, for both alike"
            )
    endpoints = {
        "dense": {"address": "dense"},
        "attention": {"address": "attention"},
        "gateway": {"local_address": "gateway-0"},  # for the first one, if there are several
    }
    if is_private:
        endpoints["gateway"] |= {"address": "gateway", "http_address": "http"}
    for name, keys in endpoints.items():
        section = getattr(config, name)
        sockets = {
            key: f"unix:{run_dir}/{file}.sock" for key, file in keys.items() if key not in section.model_fields_set
        }
        config = config.with_values(name, **sockets)
    return config


def control_address(run_dir: Path) -> str:
    """The address at which the launcher of a directory answers `ctl`."""
    return f"unix:{run_dir}/launch.sock"


def check_tls(config: Config) -> None:
    """Raises `ConfigError` for TLS files that the services cannot use, before any service starts."""
    gateway = config.gateway
    tls_files(gateway.tls_certificate, gateway.tls_key, gateway.tls_client_ca)
    read_peer_tls(config.peers)


def check_chat_template(config: Config) -> None:
    """Raises `ConfigError` for a template that the gateway could not read, before any service starts."""
    file = config.gateway.chat_template
    if file is not None and "gateway" in config.launch.services and not os.access(file, os.R_OK):
        raise ConfigError(f"gateway.chat_template {str(file)!r} cannot be read: it is not there, or not for this user")


def check_api_keys(config: Config) -> None:
    """Raises `ConfigError` for API keys that the gateway would refuse, before any service starts."""
    if "gateway" in config.launch.services:
        read_api_keys(config.gateway.api_keys_file, api_keys_of_environment())


def check_addresses(config: Config, *, is_http_passed: bool = False) -> None:
    """Raises `ConfigError` for an address where a service cannot listen, or where its clients cannot find it.

    `is_http_passed`: systemd listens already at the address of the HTTP API.
    """
    services = config.launch.services
    if "gateway" in services:
        check_free(config.gateway.address, "gateway.address")
        if not is_http_passed:
            check_free(config.gateway.http_address, "gateway.http_address")
    for role, name in SECTIONS.items():
        if role in services:
            check_free(getattr(config, name).address, f"{name}.address")


def check_free(address: str, setting: str) -> None:
    """Raises `ConfigError` if another process serves there: its answers would be taken for those of our service.

    Port 0 is also an error, because only the service itself would know its real port. The error names the setting: the
    key of the config that the address is from.
    """
    if address.startswith("unix:"):
        check_socket_free(address.removeprefix("unix:"))
    elif int(address.rpartition(":")[2]) == 0:
        raise ConfigError(f"cannot listen on {setting} {address}: nobody would find it; ports are from 1 to {MAX_PORT}")
    check_bindable(address, setting)
