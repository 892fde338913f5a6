"""Bodies in an ingress of Ray Serve: bounded one by one and together. `make ray` tests the rest, with Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from deploy.ray.bodies import Bodies, Refused


def make_request(*pieces: bytes, stated: int | None = None, ends: bool = True) -> Request:
    """A request whose body arrives in pieces; one that does not end sends nothing more."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    headers = [] if stated is None else [(b"content-length", str(stated).encode())]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        if not ends:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


async def status_of(bodies: Bodies, request: Request) -> int:
    try:
        async with bodies.read(request):
            return 200
    except Refused as error:
        return error.status


def test_the_bodies_that_are_held_are_bounded_together_and_give_up_their_room() -> None:
    async def test() -> None:
        bodies = Bodies(100, 150)
        async with bodies.read(make_request(b"a" * 60, b"b" * 40)) as body:
            assert (body, bodies.held_bytes) == (b"a" * 60 + b"b" * 40, 100)
            assert await status_of(bodies, make_request(b"c" * 50)) == 200
            assert await status_of(bodies, make_request(b"c" * 30, b"c" * 21)) == 503
            assert await status_of(bodies, make_request(stated=51)) == 503
            with pytest.raises(Refused, match="hold 130 bytes, 150 is the limit"):
                async with bodies.read(make_request(b"c" * 30, b"c" * 21)):
                    pass
            assert bodies.held_bytes == 100
        assert bodies.held_bytes == 0
        assert await status_of(bodies, make_request(b"d" * 100)) == 200

    asyncio.run(test())


def test_one_body_is_bounded_in_bytes_and_time() -> None:
    async def test() -> None:
        bodies = Bodies(100, timeout_s=0.01)
        assert await status_of(bodies, make_request(b"a" * 60, b"b" * 41)) == 413
        assert await status_of(bodies, make_request(stated=101)) == 413
        assert await status_of(bodies, make_request(b"a", ends=False)) == 408
        assert await status_of(bodies, make_request(b"a" * 100)) == 200
        assert bodies.held_bytes == 0

    asyncio.run(test())
