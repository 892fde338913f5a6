"""Gateways of one process share what FastAPI finds out about a route, but not what its body is read by."""

from __future__ import annotations

from typing import Annotated

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, Discriminator, Tag

from tests.support.shared_routes import share_routes


class First(BaseModel):
    text: str


class Second(BaseModel):
    text: str


def build_app(kind: str) -> FastAPI:
    """Its one route reads bodies as `kind` says, a value of the application as whether a gateway's model classifies."""
    app = FastAPI()
    either = Annotated[Annotated[First, Tag("first")] | Annotated[Second, Tag("second")], Discriminator(lambda _: kind)]

    async def answer(body: either) -> str:  # type: ignore[valid-type]
        return type(body).__name__

    answer.__annotations__["body"] = either
    app.add_api_route("/", answer, methods=["POST"])
    return app


def test_a_body_is_read_as_its_own_gateway_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastapi._compat.v2 as fastapi_fields
    import fastapi.routing as fastapi_routing

    for module, name in ((fastapi_fields, "TypeAdapter"), (fastapi_routing, "_populate_api_route_state")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back behind the test
    share_routes()
    for kind in ("first", "second"):
        answer = TestClient(build_app(kind)).post("/", json={"text": "a"})
        assert answer.json() == kind.title()
