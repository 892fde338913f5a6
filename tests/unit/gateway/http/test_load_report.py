"""The header with the server's load, for load balancers that ask for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from services.gateway.http.load_report import LoadReport
from services.gateway.link.worker_load import CacheLoad, Load, RequestLoad

BUSY = Load(RequestLoad(3, 2), CacheLoad(100, 75))
TEXT = (
    "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_running=3, "
    "named_metrics.num_requests_waiting=2"
)
JSON = 'JSON {"named_metrics":{"kv_cache_usage_perc":0.25,"num_requests_running":3,"num_requests_waiting":2}}'


class Workers:
    def __init__(self, load: Load) -> None:
        self.load, self.num_asked = load, 0

    async def read(self) -> Load:
        self.num_asked += 1
        return self.load


def header_of(workers: Workers, asked: str | None) -> str | None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    report = LoadReport(PlainTextResponse("hi"), workers)  # type: ignore[arg-type]
    headers = [] if asked is None else [(b"endpoint-load-metrics-format", asked.encode())]
    scope: Any = {"type": "http", "method": "GET", "path": "/", "headers": headers}
    asyncio.run(report(scope, receive, send))
    assert sent[-1]["body"] == b"hi"
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}.get("endpoint-load-metrics")


@pytest.mark.parametrize(("asked", "written"), [("TEXT", TEXT), ("text", TEXT), ("JSON", JSON)])
def test_the_load_is_in_the_form_that_was_asked_for(asked: str, written: str) -> None:
    assert header_of(Workers(BUSY), asked) == written


@pytest.mark.parametrize("asked", [None, "BIN", ""])
def test_nobody_asks_the_workers_for_others(asked: str | None) -> None:
    workers = Workers(BUSY)
    assert header_of(workers, asked) is None and not workers.num_asked


def test_what_is_not_known_is_left_out() -> None:
    assert header_of(Workers(Load(None, CacheLoad(4, 4))), "TEXT") == "TEXT named_metrics.kv_cache_usage_perc=0.0"
    assert header_of(Workers(Load(None, None)), "TEXT") is None
