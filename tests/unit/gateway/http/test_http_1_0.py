"""Clients of HTTP/1.0 get answers without chunks, which end with the connection or have a length."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_clients import connect, request_bytes
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

TEXT = " one two"


def answer_to(directory: Path, body: dict[str, Any]) -> tuple[list[bytes], bytes]:
    """Header lines in lower case, and everything behind them up to the end of the connection."""
    answers: list[bytes] = []

    async def ask() -> None:
        async with running_gateway(directory, FakeDense(lambda submit: ids(TEXT))) as gateway:
            reader, writer = await connect(gateway.http_address)
            writer.write(request_bytes("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
            answers.append(await asyncio.wait_for(reader.read(), 20))
            writer.close()

    run(ask())
    head, _, rest = answers[0].partition(b"\r\n\r\n")
    return head.lower().split(b"\r\n"), rest


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_has_no_chunks(tmp_path: Path, streams: bool) -> None:
    lines, rest = answer_to(tmp_path, {"prompt": "Hello", "max_tokens": len(ids(TEXT)), "stream": streams})
    assert lines[0].endswith(b" 200 ok") and b"connection: close" in lines
    assert not any(line.startswith(b"transfer-encoding") for line in lines)
    if not streams:
        assert b"content-length: %d" % len(rest) in lines
        assert json.loads(rest)["choices"][0]["text"] == TEXT
        return
    *events, last, end = rest.split(b"\n\n")
    assert (last, end) == (b"data: [DONE]", b"")
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == TEXT
