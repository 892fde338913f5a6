"""A body holds as much of the budget as it and its numbers take, however short they are written."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.http.authorize import Authorize
from services.gateway.resources.memory_budget import MemoryBudget

PIECE_BYTES = 2**16


def num_held(data: bytes) -> int:
    """By a request with this body, when all of it has come."""
    found = []
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]

    async def receive() -> dict[str, Any]:
        body = pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        found.append(scope["state"]["held"].num_bytes)

    caller = SimpleNamespace(client_id=(0, 1))
    addresses = SimpleNamespace(find=lambda peer, forwarded: "a")
    access: Any = SimpleNamespace(client_addresses=addresses, identify=lambda key, address: caller)
    connection = SimpleNamespace(reads_nothing=nullcontext)
    scope = {"type": "http", "path": "/detokenize", "headers": [], "state": {"connection": connection}}
    asyncio.run(Authorize(app, access, MemoryBudget(10**9))(scope, receive, send))
    return found[0]


def num_taken(data: bytes) -> int:
    """By the body and the objects that it becomes."""
    tracemalloc.start()
    try:
        value = json.loads(data)
        num_bytes, _ = tracemalloc.get_traced_memory()
        assert value
        return len(data) + num_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("numbers", [range(300, 1000), range(300, 100_000), [1, 2, 3]])
def test_numbers_count_as_objects(numbers: Sequence[int]) -> None:
    data = json.dumps({"tokens": [numbers[i % len(numbers)] for i in range(300_000)]}, separators=(",", ":")).encode()
    assert num_taken(data) <= num_held(data) <= 60 * 300_000


def test_a_text_counts_by_its_bytes() -> None:
    data = json.dumps({"prompt": "Some words that follow each other " * 10_000}).encode()
    assert num_held(data) == 4 * len(data)
