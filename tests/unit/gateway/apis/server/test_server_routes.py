"""What probes and load balancers ask: /ping, /load, and HEAD."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2

from tests.support.clients.http_gateway import COMPLETIONS, MODEL, PROMPT, check_error, with_client
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense


def test_ping_is_the_health_by_get_and_post(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for method in ("GET", "POST", "HEAD"):
            assert (await client.request(method, "/ping")).status_code == 200
        await dense.kill()
        await until(lambda: not dense.num_streams)
        for method in ("GET", "POST", "HEAD"):
            await until_status(client, method, 503)

    dense = FakeDense(lambda submit: [5])
    with_client(tmp_path, dense, test)


async def until_status(client: httpx2.AsyncClient, method: str, status: int) -> None:
    """Waits until the gateway has noticed; the test's own limit of time ends the wait."""
    while (await client.request(method, "/ping")).status_code != status:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_the_load_is_the_number_of_open_requests(tmp_path: Path) -> None:
    async def load(client: httpx2.AsyncClient) -> int:
        return (await client.get("/load")).json()["server_load"]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        assert await load(client) == 0
        tasks = [asyncio.create_task(client.post(COMPLETIONS, json=PROMPT | {"n": 2})) for _ in range(3)]
        await until(lambda: len(dense.running) == 6)
        assert await load(client) == 3
        for task in tasks:
            task.cancel()
        await until(lambda: not dense.running)
        while await load(client):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    dense = FakeDense(lambda submit: [])  # no answer ever ends
    with_client(tmp_path, dense, test)


def test_head_has_the_status_and_headers_of_get_and_no_body(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        paths = ["/", "/health", "/ready", "/live", "/version", "/v1/models", f"/v1/models/{MODEL}", "/v2/health/ready"]
        for path in [*paths, "/v1/models/none", "/none", "/openapi.json"]:
            get, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content)), path
            assert head.headers.get("content-type") == get.headers.get("content-type"), path
        assert (await client.head("/metrics")).status_code == 200
        refused = await client.head(COMPLETIONS)
        assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
        check_error(await client.get(COMPLETIONS), 405, None)
        assert (await client.get("/health")).json() == {"status": "ok"}, "the connection goes on"

    with_client(tmp_path, FakeDense(lambda submit: [5]), test)


KEY = "0123456789abcdef"
WITH_KEY = {"authorization": f"Bearer {KEY}"}


def test_every_route_may_have_the_configured_prefix(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in ("/health", "/v1/models", "/openapi.json", "/v1/models/none", "/"):
            for prefix in ("", "/a/llm"):
                response = await client.get(prefix + path, headers=WITH_KEY)
                assert response.content == (await client.get(path, headers=WITH_KEY)).content
        assert (await client.get("/a/llm")).status_code == 200, "the page"
        body = PROMPT | {"max_tokens": 1}
        assert (await client.post(f"/a/llm{COMPLETIONS}", json=body)).status_code == 401, "it opens nothing"
        answer = await client.post(f"/a/llm{COMPLETIONS}", json=body, headers=WITH_KEY)
        assert answer.status_code == 200
        assert (await client.get("/a/llm/health")).status_code == 200
        for path in ("/a/llmx/health", "/a/llm/a/llm/health", "/a/health"):
            assert (await client.get(path, headers=WITH_KEY)).status_code == 404

    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "one"\nkey = "{KEY}"\n')
    with_client(tmp_path, FakeDense(lambda submit: [5]), test, root_path="/a/llm", api_keys_file=keys)


def test_with_api_keys_only_some_may_flush_the_cache(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in ("/flush_cache", "/reset_prefix_cache"):
            assert (await client.post(path)).status_code == 401
            refused = await client.post(path, headers={"authorization": f"Bearer {KEY}-other"})
            assert refused.status_code == 403 and "'two' may not flush" in refused.json()["error"]["message"]
            flushed = await client.post(path, headers=WITH_KEY)
            assert (flushed.status_code, flushed.text) == (200, "Cache flushed.\n")
        assert dense.flushes == [0, 0], "confirmed before the answer"
        await dense.kill()
        await until(lambda: not dense.num_streams)
        while (refused := await client.post("/flush_cache", headers=WITH_KEY)).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the gateway has not noticed yet
        check_error(refused, 503, None, "dense worker")

    keys, dense = tmp_path / "keys.toml", FakeDense(lambda submit: [5])
    pairs = {"one": KEY, "two": f"{KEY}-other"}
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in pairs.items()))
    with_client(tmp_path, dense, test, api_keys_file=keys, weights_admins=("one",))
