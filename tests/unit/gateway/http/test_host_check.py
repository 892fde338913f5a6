"""The names by which clients may call the server. On loopback only local names work, against DNS rebinding."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.common.config import GatewaySection
from services.gateway.http.envelope import HostCheck
from tests.support.cluster import REQUEST_TIMEOUT_S, free_port
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

LOCAL = ["localhost", "LOCALHOST:8080", "localhost.", "app.localhost:1", "127.0.0.1:9", "127.9.9.9", "[::1]:8080"]
FOREIGN = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.eu", "8.8.8.8", "[::2]", ""]


def is_served(host: str, **options: Any) -> bool:
    check = HostCheck(GatewaySection(**options))
    return check.refuse([(b"accept", b"*/*"), (b"host", host.encode())]) is None


@pytest.mark.parametrize("address", ["127.0.0.1:8080", "localhost:8080", "[::1]:8080"])
def test_on_loopback_only_local_names_are_served(address: str) -> None:
    assert [host for host in LOCAL if not is_served(host, http_address=address)] == []
    assert [host for host in FOREIGN if is_served(host, http_address=address)] == []


@pytest.mark.parametrize("address", ["0.0.0.0:8080", "[::]:8080", "192.0.2.1:80", "llm.example:80", "unix:/http.sock"])
def test_on_other_addresses_every_name_is_served(address: str) -> None:
    for host in (*LOCAL, "gateway:8080", "twostroke.default.svc.cluster.local", "evil.example"):
        assert is_served(host, http_address=address)


@pytest.mark.parametrize("address", ["127.0.0.1:8080", "0.0.0.0:8080"])
def test_configured_names_are_served_as_well_as_local_ones(address: str) -> None:
    options = {"http_address": address, "allowed_hosts": ("LLM.example", "192.0.2.7")}
    for host in ("llm.example", "llm.EXAMPLE:443", "192.0.2.7:8080", "localhost:8080", "127.0.0.1"):
        assert is_served(host, **options)
    assert not is_served("evil.example", **options)


def test_all_names_are_served_on_request() -> None:
    assert is_served("evil.example", allowed_hosts=("*",))


def test_the_name_in_the_address_is_served() -> None:
    assert is_served("llm.example", http_address="llm.example:80", allowed_hosts=("other.example",))


def test_a_rebound_name_is_refused_and_the_servers_own_page_works(tmp_path: Path) -> None:
    async def body() -> None:
        port = free_port()
        dense = FakeDense(lambda submit: [5] * 10)
        prompt = {"prompt": "Hello", "max_tokens": 1}
        async with (
            running_gateway(tmp_path, dense, http_address=f"127.0.0.1:{port}"),
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_TIMEOUT_S) as client,
        ):
            evil = f"evil.example:{port}"
            # After DNS rebinding the browser believes that the page has the server's origin.
            rebound = {"host": evil, "origin": f"http://{evil}", "sec-fetch-site": "same-origin"}
            for refused in (
                await client.post("/v1/completions", json=prompt, headers=rebound),
                await client.get("/", headers=rebound),
            ):
                assert refused.status_code == 403
                error = refused.json()["error"]
                assert (error["type"], error["param"]) == ("permission_error", "host")
                assert repr(evil) in error["message"] and "gateway.allowed_hosts" in error["message"]
            long = await client.get("/", headers={"host": "x" * 10_000})
            assert long.status_code == 403 and len(long.text) < 1000
            for name in ("localhost", "127.0.0.1"):
                own = {"host": f"{name}:{port}", "origin": f"http://{name}:{port}"}
                answers = await asyncio.gather(
                    client.post("/v1/completions", json=prompt, headers=own),
                    client.get("/", headers={"host": own["host"]}),
                )
                assert [answer.status_code for answer in answers] == [200, 200]

    run(body())
