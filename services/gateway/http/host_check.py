"""Protects a server without API keys from requests that foreign web pages send through a user's browser.

A page of another site can send requests to this machine (cross-site request forgery). If the owner of a domain lets
its name point to 127.0.0.1, the page can also read the answers (DNS rebinding). The `Origin` header reveals the first
attack, the `Host` header the second. gRPC needs no check, since browsers cannot use it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from services.common.config import GatewaySection
from services.common.errors import PermissionDenied
from services.rpc.tls import is_exposed

DEFAULT_PORTS = {"http": ":80", "https": ":443"}
MAX_QUOTED = 80  # characters of a wrong value in an error


class HostCheck:
    """The check for the HTTP address of one gateway."""

    def __init__(self, section: GatewaySection) -> None:
        self._hosts = _allowed_hosts(section)
        self._origins = section.cors_origins

    def refuse(self, headers: Collection[tuple[bytes, bytes]]) -> PermissionDenied | None:
        """The error if the request's Host or Origin is foreign, else None."""
        hosts = _values(headers, b"host")
        for host in hosts:
            if self._hosts is not None and not _is_local(name := _name_of(host)) and name not in self._hosts:
                return PermissionDenied(
                    f"the host {host[:MAX_QUOTED]!r} is not one of this machine's own names, nor one of "
                    "gateway.allowed_hosts",
                    "host",
                )
        is_same_origin = "same-origin" in _values(headers, b"sec-fetch-site")  # a proxy may change Host
        for origin in _values(headers, b"origin"):
            if "*" in self._origins or origin in self._origins or is_same_origin or _is_of_host(origin, hosts):
                continue
            return PermissionDenied(
                f"the origin {origin[:MAX_QUOTED]!r} is not this server's own, nor one of gateway.cors_origins",
                "origin",
            )
        return None


def _allowed_hosts(section: GatewaySection) -> frozenset[str] | None:
    """The allowed names in addition to local ones; None: all names are allowed.

    A server that other machines can reach has names that it does not know, so by default it allows all.
    """
    address = section.http_address
    is_local = not address.startswith("unix:") and not is_exposed(address)
    if "*" in section.allowed_hosts or not (section.allowed_hosts or is_local):
        return None
    own = () if address.startswith("unix:") else (_name_of(address),)
    return frozenset({*own, *(host.lower() for host in section.allowed_hosts)})


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_of_host(origin: str, hosts: Collection[str]) -> bool:
    """Whether the page comes from the host that it sends the request to; the schemes may differ behind a proxy."""
    scheme, _, address = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    return bool(address) and address.removesuffix(port) in {host.lower().removesuffix(port) for host in hosts}


def _name_of(host: str) -> str:
    """The host name without port and trailing dot; an IPv6 address keeps its brackets."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower().removesuffix(".")


def _values(headers: Collection[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in headers if name == wanted]
