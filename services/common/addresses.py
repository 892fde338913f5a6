"""Checks of addresses in the config. Each returns its value, or raises `ValueError` with what is expected."""

from __future__ import annotations

import ipaddress
import os
import socket

MAX_PORT = 65535
BALANCED_SCHEMES = ("dns:", "ipv4:", "ipv6:")


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")  # as sockets do; refuses empty parts and parts of more than 63 bytes
    except UnicodeError:
        return False
    return bool(host) and "/" not in host and port.isdecimal() and int(port) <= MAX_PORT


def check_address(address: str) -> str:
    """The address, which is unix:PATH or HOST:PORT. Raises `ValueError` if it is neither."""
    is_valid = bool(address.removeprefix("unix:")) if address.startswith("unix:") else _is_host_and_port(address)
    if not is_valid:
        raise ValueError(f"must be unix:PATH or HOST:PORT, with a port from 0 to {MAX_PORT}")
    return address


def is_same_address(first: str, second: str) -> bool:
    """Whether two addresses that `check_address` has passed are of one socket, whatever names they have for it."""
    return not _places(first).isdisjoint(_places(second))


def _places(address: str) -> set[str]:
    """The file, or all numbers of the host with the port; the address itself if its host is not known."""
    if address.startswith("unix:"):
        return {os.path.realpath(address.removeprefix("unix:"))}
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return {address}
    return {f"{place[0]} {place[1]}" for *_, place in found}


def check_tcp_address(address: str) -> str:
    """The address, which is HOST:PORT. Raises `ValueError` if it is not."""
    if address.startswith("unix:") or not _is_host_and_port(address):
        raise ValueError(f"must be HOST:PORT, with a port from 0 to {MAX_PORT}")
    return address


def check_target(address: str) -> str:
    """An address, or a name that gRPC resolves to several: dns:///NAME:PORT, ipv4:HOST:PORT,HOST:PORT, ipv6:..."""
    scheme = next((scheme for scheme in BALANCED_SCHEMES if address.startswith(scheme)), None)
    if scheme is None:
        return check_address(address)
    targets = address.removeprefix(scheme)
    if not all(map(_is_host_and_port, [targets.rpartition("/")[2]] if scheme == "dns:" else targets.split(","))):
        raise ValueError(f"must be dns:///NAME:PORT or {scheme}HOST:PORT,..., with ports from 0 to {MAX_PORT}")
    return address


def check_proxy(proxy: str) -> str:
    """A proxy whose headers are believed: "unix", or an IP address or network. Raises `ValueError`."""
    if proxy != "unix":
        ipaddress.ip_network(proxy)  # its ValueError says what is wrong
    return proxy
