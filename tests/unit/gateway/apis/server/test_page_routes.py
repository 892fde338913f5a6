"""GET / and GET /stats of a gateway whose workers are scripted or missing."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser
from pathlib import Path

import httpx2

from tests.support.clients.http_clients import async_client, socket_path
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense


async def get(gateway: RunningGateway, path: str) -> httpx2.Response:
    """Sends a GET request to a gateway that may still be starting."""
    await until(Path(socket_path(gateway.http_address)).exists)
    async with async_client(gateway.http_address) as client:
        return await client.get(path)


class Parts(HTMLParser):
    """The inline scripts and styles of a page, and all addresses in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in self.inline:
            self.inline[self._tag].append(data)


def test_the_content_security_policy_allows_only_the_page_itself(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, None) as gateway:
            response = await get(gateway, "/")
        headers = response.headers
        assert response.status_code == 200
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        parts = Parts()
        parts.feed(response.text)
        for tag in ("script", "style"):
            (content,) = parts.inline[tag]
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert [address for address in parts.addresses if not address.startswith("data:")] == []
        assert parts.handlers == [], "the policy forbids handlers and styles in attributes"

    run(test())


def test_stats_without_workers_name_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, None) as gateway:
            response = await get(gateway, "/stats")
        assert response.status_code == 200
        stats = response.json()
        assert stats["requests"] is None and stats["kv_cache"] is None
        assert "dense worker" in stats["unready_reason"]
        assert stats["model"] == "tiny-llama"

    run(test())


def test_stats_of_a_ready_server_have_no_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, FakeDense(lambda _: [])) as gateway:
            response = await get(gateway, "/stats")
        assert response.json()["unready_reason"] is None

    run(test())
