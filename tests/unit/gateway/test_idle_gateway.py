"""What a gateway does while it has no request."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

from tests.support.clients.http_clients import async_client
from tests.support.clients.http_gateway import say
from tests.support.garbage import make_cycle
from tests.support.running_gateway import run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense


def test_garbage_is_collected_when_no_request_is_open(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(say("One two three " * 200), step_s=0.02)
        async with running_gateway(tmp_path, dense) as gateway, async_client(gateway.http_address) as client:
            body = {"prompt": "Hello", "max_tokens": 500, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                gc.disable()
                garbage, kept = make_cycle(), [[] for _ in range(1000)]
                await asyncio.sleep(0.1)
                assert garbage() is not None and len(kept) == 1000, "a request is open"
            await until(lambda: garbage() is None)

    try:
        run(test())
    finally:
        gc.enable()
