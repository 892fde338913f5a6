"""The sockets that systemd opens for the HTTP API and passes on (sd_listen_fds(3)); several share a port.

systemd listens on them also while no server runs: whoever connects then waits in a socket's queue, until a gateway
accepts. The launcher keeps them open as long as it lives, for gateways that it starts again. Each gateway process has
one of its own, because one of several that accept from one socket would take most of the connections.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import structlog

from services.common.config import Config, take_listen_environment, with_values
from services.common.errors import ConfigError

log = structlog.get_logger()

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START
NAME = "http"


def take_passed_sockets() -> list[socket.socket]:
    """The sockets that were passed to this process, all listening at one address; empty without systemd.

    The first call takes them. Raises `ConfigError`, naming what the socket unit should say, for any others.
    """
    passed = take_listen_environment()
    if not passed.num_sockets:
        return []
    if passed.pid != os.getpid():
        whose = "no LISTEN_PID is set" if passed.pid is None else f"LISTEN_PID is {passed.pid}"
        log.warning(
            "systemd's sockets are not used: they were passed to another process",
            reason=f"{whose}, and this process is {os.getpid()}; a script around it must start it by exec",
        )
        return []
    names = passed.names or (NAME,) * passed.num_sockets
    if len(names) != passed.num_sockets:
        raise ConfigError(f"LISTEN_FDS is {passed.num_sockets} and LISTEN_FDNAMES has {len(names)} names")
    for name in names:
        _check_name(name)
    sockets = [_listening_socket(FIRST_DESCRIPTOR + index) for index in range(passed.num_sockets)]
    addresses = list(dict.fromkeys(map(address_of, sockets)))
    if len(addresses) > 1:
        raise ConfigError(
            f"systemd passes sockets at {' and '.join(addresses)}, and the HTTP API has one address: let all "
            "ListenStream= of the socket unit be the same"
        )
    return sockets


def with_passed_sockets(config: Config, sockets: Sequence[socket.socket]) -> Config:
    """The config in which the gateway listens at these sockets, one for each process; unchanged if there are none.

    Raises `ConfigError` if the config says otherwise.
    """
    if not sockets:
        return config
    address, number = address_of(sockets[0]), len(sockets)
    if "gateway" not in config.launch.services:
        own = ", ".join(config.launch.services)
        raise ConfigError(f"systemd passes a socket for the gateway, and launch.services is {own}")
    check_same_address(config, address)
    processes = config.launch.gateway_processes
    if processes not in ("auto", number):
        sockets_needed = "" if address.startswith("unix:") else f", or repeat ListenStream={address} with ReusePort=yes"
        raise ConfigError(
            f"launch.gateway_processes is {processes}, and each process needs one of the sockets that systemd passes, "
            f"which are {number}: set it to {number}{sockets_needed}"
        )
    return with_values(config, {"gateway.http_address": address, "launch.gateway_processes": number})


def check_same_address(config: Config, address: str) -> None:
    """Raises `ConfigError` if the config gives the HTTP API another address than the one where systemd listens."""
    own = config.gateway.http_address
    if "http_address" in config.gateway.model_fields_set and address not in _numeric(own):
        raise ConfigError(
            f"gateway.http_address is {own}, and systemd listens at {address} for it: let ListenStream= of the socket "
            "unit be the same, or leave gateway.http_address out"
        )


def address_of(listener: socket.socket) -> str:
    """Where a socket listens, as the config says it."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name.decode().replace(chr(0), '@') if isinstance(name, bytes) else name}"  # @: without a file
    return _host_and_port(name)


def _check_name(name: str) -> None:
    if name == "grpc":
        raise ConfigError(
            "systemd passes a socket named 'grpc', and gRPC's library opens its port itself: take it out of the socket "
            "unit"
        )
    if name != NAME:
        raise ConfigError(
            f"systemd passes a socket named {name!r}, and only {NAME!r} is known: set FileDescriptorName={NAME} in the "
            "socket unit"
        )


def _listening_socket(descriptor: int) -> socket.socket:
    what = f"descriptor {descriptor}, which systemd passes,"
    try:
        passed = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"{what} is not an open socket: {error.strerror}") from error
    if passed.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) or passed.type != socket.SOCK_STREAM:
        raise ConfigError(f"{what} is no stream of TCP or a Unix socket: the socket unit needs ListenStream=")
    if not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ConfigError(f"{what} does not listen: it is a single connection, take Accept=yes out of the socket unit")
    passed.set_inheritable(False)
    passed.setblocking(False)
    return passed


def _numeric(address: str) -> list[str]:
    """What a socket bound to the address may say that it is; empty for a name that is unknown."""
    if address.startswith("unix:"):
        return [address]
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return [_host_and_port(target) for *_, target in found]


def _host_and_port(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
