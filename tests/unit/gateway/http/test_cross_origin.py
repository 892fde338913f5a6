"""Pages of the origins in `gateway.cors_origins` may call the server and read every kind of answer; others may not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from services.common.config import GatewaySection
from tests.support.clients.http_clients import async_client, connect, events
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

PAGE = "https://app.example"
COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": "Hello", "max_tokens": 2}
KEY = "a-key-of-at-least-thirty-two-characters"
Test = Callable[[httpx2.AsyncClient, RunningGateway], Awaitable[None]]


def with_origins(tmp_path: Path, test: Test, *origins: str, **options: Any) -> None:
    async def body() -> None:
        dense = FakeDense(lambda submit: [5] * 100)
        async with (
            running_gateway(tmp_path, dense, cors_origins=origins, **options) as gateway,
            async_client(gateway.http_address) as client,
        ):
            await test(client, gateway)

    run(body())


def check_readable(headers: httpx2.Headers, origin: str = PAGE) -> None:
    """Applies the CORS check of the Fetch standard (section 4.10), and checks which other headers scripts can read."""
    assert headers.get_list("access-control-allow-origin") == [origin]
    exposed = {name.strip() for name in headers["access-control-expose-headers"].split(",")}
    assert {"x-request-id", "retry-after"} <= exposed
    assert "access-control-allow-credentials" not in headers


def preflight(origin: str = PAGE, headers: str = "authorization,content-type,x-request-id") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": headers,
    }


def with_keys(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "a"\nkey = "{KEY}"\n')
    return {"api_keys_file": file}


def test_a_preflight_needs_no_key_and_grants_what_clients_send(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        asked = "authorization,content-type,x-request-id,x-stainless-lang,x-stainless-retry-count"
        answer = await client.options(COMPLETIONS, headers=preflight(headers=asked))
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        granted = {name.strip() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert set(asked.split(",")) <= granted
        refused = await client.options(COMPLETIONS, headers=preflight("https://evil.example"))
        assert refused.status_code == 403 and refused.json()["error"]["param"] == "origin"
        assert "access-control-allow-origin" not in refused.headers

    with_origins(tmp_path, test, PAGE, **with_keys(tmp_path))


def test_answers_streams_and_errors_can_be_read(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        client.headers["origin"] = PAGE
        refused = await client.post(COMPLETIONS, json=PROMPT)
        assert refused.status_code == 401
        check_readable(refused.headers)
        client.headers["authorization"] = f"Bearer {KEY}"
        answer = await client.post(COMPLETIONS, json=PROMPT)
        assert answer.status_code == 200
        check_readable(answer.headers)
        async with client.stream("POST", COMPLETIONS, json=PROMPT | {"stream": True}) as stream:
            check_readable(stream.headers)
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert events((await stream.aread()).decode())
        errors = {
            400: await client.post(COMPLETIONS, json={"prompt": 5}),
            404: await client.get("/nothing"),
            405: await client.get(COMPLETIONS),
            413: await client.post(COMPLETIONS, content=b"x" * 2000),
        }
        for status, error in errors.items():
            assert error.status_code == status
            check_readable(error.headers)
        wrong_id = await client.get("/health", headers={"x-request-id": "a b"})
        assert wrong_id.status_code == 400
        check_readable(wrong_id.headers)
        # The parser refuses this before it becomes a request.
        too_long = await client.get("/health", headers={"x": "y" * 5000})
        assert too_long.status_code == 431
        check_readable(too_long.headers)

    options = {"max_body_bytes": 1000, "max_header_bytes": 4000, **with_keys(tmp_path)}
    with_origins(tmp_path, test, "https://other.example", PAGE, **options)


def test_all_origins_are_allowed_on_request(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post(COMPLETIONS, json=PROMPT, headers={"origin": "null"})
        assert answer.status_code == 200
        check_readable(answer.headers, "*")
        assert (await client.options(COMPLETIONS, headers=preflight("https://any.example"))).status_code == 200
        reader, writer = await connect(gateway.http_address)
        writer.write(b"this is not HTTP\r\n\r\n")
        assert b"\r\naccess-control-allow-origin: *\r\n" in await asyncio.wait_for(reader.read(), 10)
        writer.close()

    with_origins(tmp_path, test, "*")


def test_without_configuration_other_origins_are_refused(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for origin in (PAGE, "null", "http://gateway.evil.example", "http://gateway:81"):
            for refused in (
                await client.post(COMPLETIONS, json=PROMPT, headers={"origin": origin}),
                await client.get("/v1/models", headers={"origin": origin}),
                await client.options(COMPLETIONS, headers=preflight(origin)),
            ):
                assert refused.status_code == 403
                error = refused.json()["error"]
                assert (error["type"], error["param"]) == ("permission_error", "origin")
                assert repr(origin) in error["message"] and "gateway.cors_origins" in error["message"]
                assert not [name for name in refused.headers if name.startswith("access-control")]
        assert not gateway.service.done()
        for own in ("http://gateway", "https://gateway", "http://gateway:80"):  # the client sends "host: gateway"
            answer = await client.post(COMPLETIONS, json=PROMPT, headers={"origin": own})
            assert answer.status_code == 200, own
            assert "access-control-allow-origin" not in answer.headers
        # A page of this server behind a proxy that sends another host.
        proxied = {"origin": PAGE, "sec-fetch-site": "same-origin"}
        assert (await client.post(COMPLETIONS, json=PROMPT, headers=proxied)).status_code == 200

    with_origins(tmp_path, test)


@pytest.mark.parametrize("wrong", ["app.example", "https://app.example/", "https://App.example", ""])
def test_an_origin_that_no_browser_sends_is_a_config_error(wrong: str) -> None:
    with pytest.raises(ValidationError, match="cors_origins"):
        GatewaySection(cors_origins=(wrong,))
