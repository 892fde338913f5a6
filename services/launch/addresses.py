"""Where the services listen: Unix sockets in the launcher's directory unless the config gives addresses."""

from __future__ import annotations

import socket
from pathlib import Path

from services.common.config import MAX_PORT, Config
from services.common.errors import ConfigError
from services.rpc.client import read_peer_tls
from services.rpc.tls import tls_files


def place_sockets(config: Config, run_dir: Path, *, is_private: bool) -> Config:
    """Unix sockets for the workers that got no address of their own; for the gateway if nobody else calls.

    The gateway always has one for the launcher, which needs no certificate there and which no crowd of clients fills.
    """
    places = {
        "dense": {"address": "dense"},
        "attention": {"address": "attention"},
        "gateway": {"local_address": "gateway-0"},  # of the first, if there are several
    }
    if is_private:
        places["gateway"] |= {"address": "gateway", "http_address": "http"}
    update = {}
    for name, keys in places.items():
        section = getattr(config, name)
        sockets = {
            key: f"unix:{run_dir}/{file}.sock" for key, file in keys.items() if key not in section.model_fields_set
        }
        update[name] = section.model_copy(update=sockets)
    return config.model_copy(update=update)


def control_address(run_dir: Path) -> str:
    """Where the launcher of that directory answers `ctl`."""
    return f"unix:{run_dir}/launch.sock"


def check_tls(config: Config) -> None:
    """Raises `ConfigError` for files that the services could not use: sooner than they would, and once."""
    gateway = config.gateway
    tls_files(gateway.tls_certificate, gateway.tls_key, gateway.tls_client_ca)
    read_peer_tls(config.peers)


def check_addresses(config: Config) -> None:
    """Raises `ConfigError` for an address where no service could listen, or where its clients would not find it."""
    for address in (
        config.gateway.address, config.gateway.http_address, config.dense.address, config.attention.address
    ):
        check_free(address)


def check_free(address: str) -> None:
    """Raises `ConfigError` when somebody serves there: their answers would be taken for our own.

    So it does for port 0, where only the service itself would know the address.
    """
    if address.startswith("unix:"):
        return  # the service itself can tell
    host, _, port = address.rpartition(":")
    if int(port) == 0:
        raise ConfigError(f"cannot listen on {address}: nobody would find it; ports are from 1 to {MAX_PORT}")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: port in use or address not of this host") from error
