"""`ClientAddresses`: finds the address of the client that sent a request, for fair shares. It is never logged.

The peer of a connection may be a proxy. Its header `X-Forwarded-For` (over gRPC: metadata) is believed only if the peer
is one of `gateway.trusted_proxies`; anybody else could invent addresses. Addresses in it are read from the right, where
the nearest proxy wrote, as long as they are trusted proxies, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
from collections.abc import Iterable
from urllib.parse import unquote

FORWARDED_FOR = "x-forwarded-for"
UNIX = "unix"  # the peer of a Unix socket
IPV6_PREFIX = 64  # bits of the network of one client, which may have any address in it
MAX_HOPS = 32  # of a forwarded request
MAX_REMEMBERED = 1024  # addresses: a client sends one request after another

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientAddresses:
    """`trusted_proxies`: addresses or networks, or `unix` for the peers of Unix sockets."""

    def __init__(self, trusted_proxies: Iterable[str] = ()) -> None:
        proxies = set(trusted_proxies)
        self._trusts_unix = UNIX in proxies
        self._networks = [ipaddress.ip_network(each) for each in proxies - {UNIX}]

    def find(self, peer: str | None, forwarded: Iterable[str]) -> str:
        """The client's address, or the network of its IPv6 address.

        peer: the host at the other end; None or empty for a Unix socket. forwarded: the values of all headers
        `X-Forwarded-For`.
        """
        client = peer or UNIX
        if self._is_trusted(client):
            hops = ",".join(forwarded).rsplit(",", MAX_HOPS)
            for hop in reversed(hops):
                ip = _read_ip(_without_port(hop.strip()))
                if ip is None:
                    break  # missing or unreadable: the last proxy is all that is known
                client = str(ip)
                if not self._is_trusted(client):
                    break
        return _network_of(client)

    def of_connection(self, peer: str | None) -> str | None:
        """The client at the other end of a connection; None for a proxy, which has those of many clients, and for a
        Unix socket.
        """
        return None if peer is None or self._is_trusted(peer) else _network_of(peer)

    def find_peer(self, peer: str, forwarded: Iterable[str]) -> str:
        """The client's address for a peer as gRPC writes it, such as `ipv4:10.0.0.7:4321` or `ipv6:%5B::1%5D:4321`."""
        scheme, _, address = peer.partition(":")
        return self.find(None if scheme == UNIX else _without_port(unquote(address)), forwarded)

    def _is_trusted(self, client: str) -> bool:
        if client == UNIX:
            return self._trusts_unix
        ip = _read_ip(client) if self._networks else None
        return ip is not None and any(ip in network for network in self._networks)


@functools.lru_cache(MAX_REMEMBERED)
def number_of(kind: str, name: str) -> int:
    """A number of 64 bits for a key's name or a client's address. Messages carry it in place of the name itself."""
    return int.from_bytes(hashlib.blake2b(f"{kind}:{name}".encode(errors="surrogatepass"), digest_size=8).digest())


@functools.lru_cache(MAX_REMEMBERED)
def _network_of(client: str) -> str:
    ip = _read_ip(client)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(ip), IPV6_PREFIX), strict=False))
    return client if ip is None else str(ip)


def _read_ip(text: str) -> _Ip | None:
    """An IPv4 address inside an IPv6 address becomes the former; the zone of an IPv6 address is dropped."""
    with contextlib.suppress(ValueError):
        ip = ipaddress.ip_address(text.partition("%")[0])
        return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip
    return None


def _without_port(address: str) -> str:
    """The host of `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`; a bare IPv6 address stays whole."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
