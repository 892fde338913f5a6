"""Warnings of fields that the server does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from services.gateway.http import unknown_fields
from services.gateway.http.unknown_fields import MAX_WARNINGS
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

COMPLETIONS, GENERATE = "/v1/completions", "/generate"


def warnings_of(tmp_path: Path, requests: list[tuple[str, dict[str, Any]]]) -> list[tuple[Any, ...]]:
    async def test(client: httpx2.AsyncClient) -> None:
        for path, body in requests:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text

    async def serve() -> None:
        dense = FakeDense(lambda submit: [5])
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            await test(client)

    with capture_logs() as events:
        run(serve())
    found = [each for each in events if each["event"] == "unknown field ignored"]
    assert all(each["log_level"] == "warning" and each["request_id"] for each in found)
    return [(each["path"], each["field"], each.get("did_you_mean")) for each in found]


@pytest.mark.parametrize(
    ("name", "meant"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("pot_p", "top_p"), ("xyzzy", None)]
)
def test_a_misspelt_field_is_logged_once_with_the_name_that_is_meant(
    tmp_path: Path, name: str, meant: str | None
) -> None:
    body = {"prompt": "a", "max_tokens": 1, name: 1}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, name: 1}
    found = warnings_of(tmp_path, [(COMPLETIONS, body)] * 3 + [("/v1/chat/completions", chat)] * 2)
    assert found == [(COMPLETIONS, name, meant), ("/v1/chat/completions", name, meant)]


def test_options_in_an_object_of_their_own_are_looked_at_too(tmp_path: Path) -> None:
    sglang = {"text": "a", "sampling_params": {"max_new_token": 1, "max_new_tokens": 1}}
    tgi = {"inputs": "a", "parameters": {"max_new_tokns": 1, "max_new_tokens": 1}}
    assert warnings_of(tmp_path, [(GENERATE, sglang), (GENERATE, tgi)] * 2) == [
        (GENERATE, "max_new_token", "max_new_tokens"),
        (GENERATE, "max_new_tokns", "max_new_tokens"),
    ]


def test_fields_that_are_known_or_refused_with_a_value_are_no_reason(tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1, "user": "u", "metadata": {}, "messages": None, "tools": None}
    assert warnings_of(tmp_path, [(COMPLETIONS, body)]) == []


def test_neither_many_names_nor_long_ones_flood_the_log(tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    many = [(COMPLETIONS, body | {f"{i}-{j}" + "x" * 1000: 1 for j in range(100)}) for i in range(30)]
    found = warnings_of(tmp_path, many)
    assert len(found) == len(set(found)) == MAX_WARNINGS
    assert max(len(name) for _, name, _ in found) == 60
    assert [sum(name.startswith(f"{i}-") for _, name, _ in found) for i in range(3)] == [3, 3, 3], "of each request"


def test_what_a_terminal_would_obey_is_escaped(tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1, "größe\n\x1b[31m": 1}
    assert warnings_of(tmp_path, [(COMPLETIONS, body)]) == [(COMPLETIONS, r"größe\n\x1b[31m", None)]


def test_many_names_hide_others_for_no_longer_than_a_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    many = [(COMPLETIONS, body | {f"{i}-{j}": 1 for j in range(3)}) for i in range(30)]
    misspelt = (COMPLETIONS, body | {"max_token": 1})
    assert (COMPLETIONS, "max_token", "max_tokens") not in warnings_of(tmp_path, [*many, misspelt])
    monkeypatch.setattr(unknown_fields, "PERIOD_S", 0.0)
    assert (COMPLETIONS, "max_token", "max_tokens") in warnings_of(tmp_path, [*many, misspelt])
