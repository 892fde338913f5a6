"""Whose address counts: the peer's, or the one that a trusted proxy names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config import load_config
from services.common.errors import ConfigError
from services.gateway.access.client_address import ClientAddresses, number_of

PROXIES = ClientAddresses(["10.0.0.0/8", "2001:db8:ffff::1", "unix"])


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, "unix"),
        ("", "unix"),
    ],
)
def test_a_peer_is_its_address_or_its_network(peer: str | None, client: str) -> None:
    assert ClientAddresses().find(peer, ["203.0.113.9"]) == client, "nobody is trusted"


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:192.0.2.7:4321", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:4321", "2001:db8::/64"),
        ("ipv6:[2001:db8::7]:4321", "2001:db8::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:4321", "192.0.2.7"),
        ("unix:", "unix"),
        ("unix:/run/gateway.sock", "unix"),
    ],
)
def test_peers_of_grpc(peer: str, client: str) -> None:
    assert ClientAddresses().find_peer(peer, []) == client


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["203.0.113.9"], "203.0.113.9"),
        (["198.51.100.1, 203.0.113.9"], "203.0.113.9"),  # the client wrote the first one itself
        (["203.0.113.9, 10.1.1.1"], "203.0.113.9"),  # through two proxies
        (["203.0.113.9", "10.1.1.1"], "203.0.113.9"),  # the same in two headers
        (["203.0.113.9:5555"], "203.0.113.9"),
        (["[2001:db8:1::1]:5555"], "2001:db8:1::/64"),
        (["2001:db8:1::1"], "2001:db8:1::/64"),
        (["203.0.113.9, 2001:db8:ffff::1"], "203.0.113.9"),
        (["10.2.2.2, 10.1.1.1"], "10.2.2.2"),  # all trusted: the first
        ([], "10.0.0.1"),
        ([""], "10.0.0.1"),
        (["unknown"], "10.0.0.1"),
        (["203.0.113.9, _hidden"], "10.0.0.1"),
        (["203.0.113.9,"], "10.0.0.1"),
    ],
)
def test_a_trusted_proxy_names_the_client(forwarded: list[str], client: str) -> None:
    assert PROXIES.find("10.0.0.1", forwarded) == client


def test_others_cannot_invent_an_address() -> None:
    assert PROXIES.find("192.0.2.7", ["203.0.113.9"]) == "192.0.2.7"
    assert PROXIES.find(None, ["203.0.113.9"]) == "203.0.113.9", "Unix sockets are trusted here"
    assert ClientAddresses().find(None, ["203.0.113.9"]) == "unix"


@settings(deadline=None)
@given(st.one_of(st.none(), st.text()), st.lists(st.text()))
def test_anything_in_the_header_is_survived(peer: str | None, forwarded: list[str]) -> None:
    assert isinstance(PROXIES.find(peer, forwarded), str)
    assert isinstance(PROXIES.find("10.0.0.1", forwarded), str)
    assert isinstance(PROXIES.find_peer(peer or "", forwarded), str)


def test_only_the_last_hops_of_a_long_header_are_read() -> None:
    assert PROXIES.find("10.0.0.1", ["10.0.0.2," * 100_000 + "10.0.0.3"]) == "10.0.0.2"


def test_numbers_of_names_and_addresses_differ() -> None:
    numbers = {number_of(kind, name) for kind in ("key", "address") for name in ("a", "b", "10.0.0.1")}
    assert len(numbers) == 6 and all(0 < number < 2**64 for number in numbers)


@pytest.mark.parametrize("proxy", ["10.0.0.1/8", "proxy.example", "10.0.0.0/33", ""])
def test_a_proxy_that_is_no_network_is_refused_at_start(proxy: str) -> None:
    with pytest.raises(ConfigError, match="trusted_proxies"):
        load_config(None, [f'gateway.trusted_proxies=["{proxy}"]'])
